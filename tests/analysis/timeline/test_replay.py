"""The replay of traced steps: as recorded without a change, and with known ones exactly as long as they must be."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dlprof.analysis import intervals as iv
from dlprof.analysis.timeline.launched_work import replay_of
from dlprof.analysis.timeline.replay import Replay
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS

GAP = 1_000


def synchronised(steps: int = 4, python: int = 400_000) -> dict[str, Any]:
    """Make steps of 2 ms: the host launches 1 ms of work, waits for it (to 1.1 ms), and is in Python for the rest."""
    events: list[Any] = []
    period = 1_100_000 + python
    for n in range(steps):
        t = n * period
        events += [
            traces.step(n, t, period),
            traces.launched("a", t + 10_000, t + 20_000, 500_000, 10 * n + 1),
            traces.launched("b", t + 30_000, t + 520_000 + GAP, 500_000, 10 * n + 2),
            traces.call("cudaStreamSynchronize", t + 50_000, 1_050_000, 10 * n + 3),
        ]
    return traces.trace(*events, world_size=1)


def test_nothing_changed_is_the_recorded_step(tmp_path: Path) -> None:
    replay = runs.rank_of(tmp_path, synchronised()).once(replay_of)
    assert replay.step_ns() == pytest.approx(1.5 * MS)
    assert (replay.steps, len(replay.waits)) == (4, 4)


def test_python_that_a_synchronised_device_waits_for_is_gained_in_full(tmp_path: Path) -> None:
    replay = runs.rank_of(tmp_path, synchronised()).once(replay_of)
    python = traces.BASE_NS + np.array([[n * 1_500_000 + 1_100_000, (n + 1) * 1_500_000] for n in range(4)])
    assert replay.step_ns([(python, 0.0)]) == pytest.approx(1.1 * MS)
    assert replay.step_ns([(python, 0.5)]) == pytest.approx(1.3 * MS)


def test_without_the_wait_the_host_runs_ahead_and_the_device_sets_the_pace(tmp_path: Path) -> None:
    replay = runs.rank_of(tmp_path, synchronised()).once(replay_of)
    # 1 ms of work and the gap between the two kernels; the next step's first kernel follows as closely.
    free = range(len(replay.waits))
    assert replay.step_ns(free=free) == pytest.approx(1_000_000 + 2 * GAP, rel=0.001)


def test_the_host_still_sets_the_pace_where_its_python_is_longer_than_the_work(tmp_path: Path) -> None:
    replay = runs.rank_of(tmp_path, synchronised(python=2 * MS)).once(replay_of)
    assert replay.step_ns() == pytest.approx(3.1 * MS)
    # What is left of a synchronising call that does not wait is short.
    without = replay.step_ns(free=range(len(replay.waits)))
    assert without == pytest.approx(2 * MS + 50_000, rel=0.02)


def test_shorter_kernels_gain_what_the_device_waited_for_nobody_in(tmp_path: Path) -> None:
    replay = runs.rank_of(tmp_path, synchronised()).once(replay_of)
    durations = replay.durations // 2
    assert replay.step_ns(durations=durations) == pytest.approx(1.0 * MS, rel=0.001)
    # Work that is gone leaves no gap either.
    gone = np.where(np.arange(len(replay.rows)) % 2 == 1, -1, replay.durations)
    assert replay.step_ns(durations=gone) == pytest.approx(1.5 * MS - 500_000 - GAP, rel=0.002)


def test_work_without_a_launch_keeps_its_place(tmp_path: Path) -> None:
    made = synchronised()
    beside = [traces.kernel("unlinked", n * 1_500_000 + 600_000, 100_000, 0, stream=21) for n in range(4)]
    made["traceEvents"] += beside
    replay = runs.rank_of(tmp_path, made).once(replay_of)
    assert replay.step_ns() == pytest.approx(1.5 * MS)
    assert replay.step_ns(durations=replay.durations // 2) == pytest.approx(1.0 * MS, rel=0.001)


def crowded(at: random.Random) -> dict[str, Any]:
    """Make steps on three streams that wait for each other, with waits of the host between them."""
    events: list[Any] = []
    host, free, number = 0, {7: 0, 9: 0, 11: 0}, 0
    for n in range(4):
        begin = host
        for _ in range(at.randrange(5, 30)):
            number += 1
            stream = at.choice((7, 7, 7, 9, 11))
            other = at.choice(list(free.values())) if at.random() < 0.3 else 0
            start = max(host + at.randrange(5_000, 9_000), free[stream] + at.randrange(900, 3_000), other + 500)
            dur = at.randrange(2_000, 90_000)
            events += traces.launched(f"kernel{at.randrange(4)}", host, start, dur, number, stream=stream)
            free[stream] = start + dur
            host += at.randrange(6_000, 40_000)
            if at.random() < 0.1:
                number += 1
                end = max(*free.values(), host + 30_000) + 1_000
                events.append(traces.call("cudaDeviceSynchronize", host, end - host, number))
                host = end + 1_000
        events.append(traces.step(n, begin, host - begin))
    return traces.trace(*events, world_size=1)


def piece_by_piece(
    replay: Replay, durations: Any, gap_ns: int | None, free: frozenset[int], at_once: set[int]
) -> float:
    """Replay without runs: what the model says of each piece of work, one after the other."""
    ended: dict[int, int] = {}
    streams = dict.fromkeys(replay._stream.tolist(), -(1 << 62)) | replay._before
    base, shift, boundaries = replay.begin, 0, []
    for _ in range(2):
        shifts = [shift]
        for waits, i in enumerate([*replay._wait_order, -1]):
            for row in np.flatnonzero(replay._until == waits).tolist():
                on, gap = int(replay._stream[row]), int(replay._gap[row])
                starts = [
                    streams[on] + (gap if gap_ns is None else min(gap, gap_ns)),
                    int(replay._called[row] + replay._latency[row]) + shifts[replay._waited[row]],
                ]
                if replay._needs[row] >= 0 and row not in at_once:
                    starts.append(ended[int(replay._needs[row])] + int(replay._needs_gap[row]))
                ended[row] = max(starts)
                if durations[row] >= 0:
                    rest = 0 if row in at_once else int(replay._residual[row])
                    ended[row] = streams[on] = max(starts) + rest + int(durations[row])
            if i < 0:
                continue
            wait = replay.waits[i]
            until = wait.begin + shift + min(wait.end - wait.begin, 20_000)
            if i not in free:
                if wait.row < 0:
                    until = max(until, base + wait.end - replay.begin)
                else:
                    began = int(replay._start[wait.row])
                    done = max(streams.values()) if wait.everything else ended[wait.row]
                    late = done - began - int(replay.durations[wait.row])
                    if wait.from_start:
                        late = ended[wait.row] - max(int(durations[wait.row]), 0) - began
                    until = max(until, wait.end + late)
            shift = until - wait.end
            shifts.append(shift)
        base = max(streams[replay._main], replay.host[1] + shift)
        boundaries.append(base)
        shift += replay.host[1] - replay.host[0]
    return (boundaries[1] - boundaries[0]) / replay.steps


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(seed=1662)  # a stream has work before the steps alone
@given(seed=st.integers(0, 2**32))
def test_runs_of_work_say_exactly_what_its_pieces_say(tmp_path: Path, seed: int) -> None:
    at = random.Random(seed)
    replay = runs.rank_of(tmp_path, crowded(at)).once(replay_of)
    n = len(replay.rows)
    durations = np.array([at.choice((-1, d, d, d // 3, 2 * d)) for d in replay.durations.tolist()], dtype=np.int64)
    free = frozenset(i for i in range(len(replay.waits)) if at.random() < 0.3)
    at_once = {i for i in range(n) if at.random() < 0.1}
    gap = at.choice((None, 0, 1_000))
    told = replay.step_ns(durations=durations, free=sorted(free), gap_ns=gap, at_once=sorted(at_once))
    assert told == piece_by_piece(replay, durations, gap, free, at_once)


def test_the_intervals_of_the_host_may_be_empty(tmp_path: Path) -> None:
    replay = runs.rank_of(tmp_path, synchronised()).once(replay_of)
    assert replay.step_ns([(iv.EMPTY, 0.0)]) == replay.step_ns()
