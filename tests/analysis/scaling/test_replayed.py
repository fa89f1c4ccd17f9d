"""A rank's traced steps replayed with longer collectives and shorter kernels, with a known answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dlprof.analysis.scaling.replayed import COLUMNS, Change, replays, replays_of
from dlprof.analysis.scaling.transfers import Fits
from dlprof.result.scale import Fit
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS

GEMM, REDUCE = 600_000, 200_000
# 1 µs for every other rank.
FITS = {("all_reduce", False): Fits(Fit("all_reduce", 0.0, 1_000.0, 0.0, "ring", 0.0))}


def job() -> dict[str, Any]:
    """Steps of 1 ms: a kernel, the all-reduce of 101 ranks that waits for it, and a host that waits for both."""
    events: list[Any] = []
    for n in range(5):
        t = n * MS
        events += [traces.step(n, t, MS)]
        events += traces.launched("gemm", t + 3_000, t + 100_000, GEMM, 10 * n + 2)
        events += traces.launched(
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            t + 10_000, t + 100_000 + GEMM, REDUCE, 10 * n + 3,
        )  # fmt: skip
        events += [traces.call("cudaStreamSynchronize", t + 20_000, 80_000 + GEMM + REDUCE, 10 * n + 4)]
    return traces.trace(*events, world_size=101)


def ratio(folder: Path, change: Change) -> float:
    frame = replays((Change({}), change), FITS, False, runs.rank_of(folder, job()))
    assert tuple(frame.columns) == COLUMNS
    by = frame[frame["other"] == 0].set_index("change")["ratio"]
    assert by[0] == pytest.approx(1.0)
    return float(by[1])


def test_a_group_of_more_ranks_takes_longer(tmp_path: Path) -> None:
    assert ratio(tmp_path, Change({("all_reduce", 101): (301, False)})) == pytest.approx(1.2, abs=0.01)


def test_other_groups_stay(tmp_path: Path) -> None:
    assert ratio(tmp_path, Change({("all_reduce", 4): (301, False)})) == pytest.approx(1.0)


def test_less_work_of_the_batch_is_less_waiting_too(tmp_path: Path) -> None:
    # Of the 200 µs of an all-reduce 100 are its transfer, and the rest is waiting.
    assert ratio(tmp_path, Change({}, compute=0.5)) == pytest.approx(1 - 0.3 - 0.05, abs=0.01)


def test_a_rank_without_a_device_has_no_replay(tmp_path: Path) -> None:
    made = traces.trace(traces.step(1, 0, MS), traces.op("aten::mm", 0, MS), world_size=1)
    assert isinstance(frame := replays((Change({}),), FITS, False, runs.rank_of(tmp_path, made)), pd.DataFrame)
    assert len(frame) == 0


def test_without_a_run_nothing_is_replayed() -> None:
    assert replays_of({})(4, (Change({}),), FITS) == {}
