"""What traced work waited for, and what the host did: found in hand-made traces, and so replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlprof.analysis.timeline import launched_work
from dlprof.analysis.timeline.launched_work import replay_of
from dlprof.errors import NotMeasured
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS


def test_of_many_steps_as_many_are_replayed_as_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = runs.rank_of(tmp_path, traces.ahead(6, host=2 * MS, busy=1 * MS, synchronises=True))
    assert (rank.once(replay_of).steps, len(rank.once(replay_of).rows)) == (6, 12)
    monkeypatch.setattr(launched_work, "MOST_WORK", 5)
    rank = runs.rank_of(tmp_path, traces.ahead(6, host=2 * MS, busy=1 * MS, synchronises=True))
    assert (rank.once(replay_of).steps, len(rank.once(replay_of).rows)) == (2, 4)


def test_a_queue_that_is_full_holds_the_host_until_work_starts(tmp_path: Path) -> None:
    events: list[Any] = []
    for n in range(5):
        t = n * MS
        events += [
            traces.step(n, t, MS),
            # The launch waits for room: it returns when the step before begins on the device.
            traces.call("cudaLaunchKernel", t + 10_000, 900_000, n + 1),
            traces.kernel("gemm", t + 1_900_000, 999_000, n + 1),
        ]
    replay = runs.rank_of(tmp_path, traces.trace(*events, world_size=1)).once(replay_of)
    assert any(wait.from_start for wait in replay.waits)
    assert replay.step_ns() == pytest.approx(1.0 * MS, rel=0.002)
    assert replay.step_ns(durations=replay.durations // 2) == pytest.approx(0.5 * MS, rel=0.05)


def test_work_that_waits_for_another_stream_still_does(tmp_path: Path) -> None:
    events: list[Any] = []
    for n in range(4):
        t = n * MS
        events += [
            traces.step(n, t, MS),
            traces.launched("produces", t + 10_000, t + 20_000, 600_000, 10 * n + 1, stream=9),
            traces.call("cudaStreamWaitEvent", t + 20_000, 2_000, 10 * n + 2),
            traces.launched("consumes", t + 30_000, t + 622_000, 300_000, 10 * n + 3),
            traces.call("cudaDeviceSynchronize", t + 50_000, 880_000, 10 * n + 4),
        ]
    replay = runs.rank_of(tmp_path, traces.trace(*events, world_size=1)).once(replay_of)
    half = np.where(replay.durations == 600_000, 300_000, replay.durations)
    assert replay.step_ns() - replay.step_ns(durations=half) == pytest.approx(300_000, rel=0.01)
    waiting = np.flatnonzero(replay.durations == 300_000).tolist()
    # Without waiting it begins beside the other.
    assert replay.step_ns() - replay.step_ns(at_once=waiting) == pytest.approx(300_000, rel=0.1)


def test_what_cannot_be_replayed_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured, match="no work of a device"):
        runs.rank_of(tmp_path, traces.trace(traces.step(0, 0, MS), traces.op("aten::mm", 0, MS))).once(replay_of)
    unlinked = traces.trace(traces.step(0, 0, MS), traces.kernel("gemm", 10, MS, 0))
    with pytest.raises(NotMeasured, match="does not link"):
        runs.rank_of(tmp_path / "unlinked", unlinked).once(replay_of)
    unmarked = traces.trace(*traces.launched("gemm", 0, 10_000, MS, 1))
    with pytest.raises(NotMeasured, match="nothing marks the steps"):
        runs.rank_of(tmp_path / "unmarked", unmarked).once(replay_of)
