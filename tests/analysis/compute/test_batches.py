"""A larger batch: worth what the device waits for its host, and nothing where it computes all the time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.compute.batches import larger_batches
from dlprof.analysis.engine import RankData
from dlprof.errors import NotMeasured
from dlprof.read.run import open_run
from tests.analysis.memory.test_memory import reading
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS


def job(busy: int, optimizer: int = 0) -> dict[str, Any]:
    """Make steps of 1 ms of host time: `busy` ns of computing, and of the optimizer's kernel so many."""
    events: list[Any] = []
    for n in range(4):
        t, c = n * MS, 10 * n + 1
        events += [traces.step(n, t, MS), *traces.launched("gemm", t, t + 10_000, busy, c)]
        if optimizer:
            events.append(traces.annotation("Optimizer.step#SGD.step", t + 20_000, 100_000))
            events += traces.launched("sgd", t + 30_000, t + 12_000 + busy, optimizer, c + 1)
    return traces.trace(*events, world_size=1)


def recorded(folder: Path, made: dict[str, Any]) -> RankData:
    """Record the job with one reading of its memory."""
    path = runs.recorded(folder / "run", (made, [], {"device": {"type": "cuda", "name": "NVIDIA H100"}}))
    row = reading(0, allocated=1_000)
    (path / "ranks/00000/memory.jsonl").write_text(json.dumps(row) + "\n")
    return RankData(open_run(path).ranks[0])


def gains(folder: Path, made: dict[str, Any]) -> list[float]:
    frame = recorded(folder, made).once(larger_batches)
    assert frame["times"].tolist() == [2, 4, 8]
    return [float(ns) for ns in frame["gain_ns"]]


def test_as_long_as_the_host_takes_longer_the_step_does_not_grow(tmp_path: Path) -> None:
    twice, four, eight = gains(tmp_path, job(busy=300_000))
    assert twice == pytest.approx(MS / 2)
    # Then the device sets the pace: 0.3 ms a batch for ever.
    assert [four, eight] == pytest.approx([700_000, 700_000], rel=0.01)


def test_a_device_that_computes_all_the_time_gains_nothing(tmp_path: Path) -> None:
    assert gains(tmp_path, job(busy=988_000)) == [pytest.approx(0, abs=20_000)] * 3


def test_the_optimizer_is_the_same_for_any_batch(tmp_path: Path) -> None:
    twice, *_ = gains(tmp_path, job(busy=588_000, optimizer=390_000))
    # 2 × 588 + 390 µs for two batches, of 1,000 each now.
    assert twice == pytest.approx(MS - (2 * 588_000 + 390_000) / 2, rel=0.03)


def test_without_a_replay_it_abstains(tmp_path: Path) -> None:
    rank = runs.rank_of(tmp_path, traces.trace(traces.step(0, 0, MS), traces.op("aten::mm", 0, MS), device=""))
    with pytest.raises(NotMeasured):
        rank.once(larger_batches)
