"""A rank's traced steps replayed with other speeds, with a known answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.whatif.answers import COLUMNS, replays
from dlprof.analysis.whatif.asked import Asked
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS

GEMM, COPY = 600_000, 200_000


def job(fetch: int = 0) -> dict[str, Any]:
    """Steps of 1 ms: the host may fetch, then launches a copy and a kernel, and waits for both."""
    events: list[Any] = []
    for n in range(5):
        t = n * MS
        events += [traces.step(n, t, MS)]
        events += [traces.fetch(t, fetch)] if fetch else []
        at = t + fetch
        copied = traces.copy(at + 2_000, COPY, 4096, "HtoD (Pinned -> Device)", 10 * n + 1)
        events += [traces.call("cudaMemcpyAsync", at + 1_000, 1_000, 10 * n + 1), copied]
        events += traces.launched("gemm", at + 3_000, at + 2_000 + COPY, GEMM, 10 * n + 2)
        events += [traces.call("cudaStreamSynchronize", at + 5_000, GEMM + COPY, 10 * n + 3)]
    return traces.trace(*events, world_size=1)


def ratio(folder: Path, made: dict[str, Any], asked: Asked, fetch: float = 1.0) -> float:
    frame = replays((Asked(), asked), runs.rank_of(folder, made))
    assert tuple(frame.columns) == COLUMNS
    (found,) = frame[(frame["change"] == 1) & (frame["fetch"] == fetch)]["ratio"]
    return float(found)


def test_nothing_changed_is_the_step(tmp_path: Path) -> None:
    assert ratio(tmp_path, job(), Asked()) == pytest.approx(1.0)


def test_faster_kernels_and_copies(tmp_path: Path) -> None:
    assert ratio(tmp_path / "a", job(), Asked(device=2.0)) == pytest.approx(1 - 0.3, abs=0.01)
    assert ratio(tmp_path / "b", job(), Asked(copies=2.0)) == pytest.approx(1 - 0.1, abs=0.01)
    assert ratio(tmp_path / "c", job(), Asked(device=2.0, copies=2.0)) == pytest.approx(1 - 0.4, abs=0.01)


def test_a_slower_device(tmp_path: Path) -> None:
    assert ratio(tmp_path, job(), Asked(device=0.5)) == pytest.approx(1.6, abs=0.02)


def test_without_the_wait_for_data(tmp_path: Path) -> None:
    assert ratio(tmp_path, job(fetch=150_000), Asked(), fetch=0.0) == pytest.approx(1 - 0.15, abs=0.01)


def test_a_rank_without_a_device_has_no_replay(tmp_path: Path) -> None:
    rank = runs.rank_of(tmp_path, traces.trace(traces.step(1, 0, MS), traces.op("aten::mm", 0, MS), world_size=1))
    assert len(replays((Asked(),), rank)) == 0
