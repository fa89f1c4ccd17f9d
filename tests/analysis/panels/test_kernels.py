"""The tables of kernels and copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.compute.operators import MOST_KERNELS
from dlprof.analysis.panel import drawn
from dlprof.analysis.panels.compute import KERNELS_PICTURE
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS


def test_kernels_stand_with_their_calls_and_share_the_longest_first(tmp_path: Path) -> None:
    made = runs.measured(runs.foreign(tmp_path, traces.training(world_size=1)), KERNELS_PICTURE.draw)
    kernels, copies = drawn(made, [KERNELS_PICTURE])
    assert [row[0] for row in kernels.rows] == ["sm90_gemm", "sm90_gemm_backward", "multi_tensor_apply"]
    assert kernels.columns[2:] == ("calls", "time a step_ns", "a call_ns", "share")
    assert kernels.rows[0][2:] == (1, 300_000, 300_000, pytest.approx(6 / 11))
    assert copies.rows[0][0] == "HtoD"


def test_of_many_kernels_the_longest_are_shown_and_the_rest_are_counted(tmp_path: Path) -> None:
    many = [traces.kernel(f"kernel_{n}", n * 10_000, 1_000 + n) for n in range(MOST_KERNELS + 10)]
    made = runs.measured(runs.foreign(tmp_path, traces.trace(traces.step(1, 0, MS), *many)), KERNELS_PICTURE.draw)
    (panel,) = drawn(made, [KERNELS_PICTURE])
    assert [row[0] for row in panel.rows] == [f"kernel_{n}" for n in range(MOST_KERNELS + 9, 9, -1)]
    assert f"The longest {MOST_KERNELS} of {MOST_KERNELS + 10} kernels" in panel.note


def test_a_job_on_the_cpu_has_neither(tmp_path: Path) -> None:
    made = runs.measured(
        runs.recorded(tmp_path, (None, [runs.light(n, MS) for n in range(5)], runs.CPU)), KERNELS_PICTURE.draw
    )
    assert drawn(made, [KERNELS_PICTURE]) == ()


def test_kernels_that_take_no_time_were_called_all_the_same(tmp_path: Path) -> None:
    made = traces.training(world_size=1)
    for event in made["traceEvents"]:
        if event.get("cat") == "kernel" and "gemm" in event["name"]:
            event["dur"] = 0
    kernels, _ = drawn(runs.measured(runs.foreign(tmp_path, made), KERNELS_PICTURE.draw), [KERNELS_PICTURE])
    assert [row[0] for row in kernels.rows] == ["multi_tensor_apply", "sm90_gemm", "sm90_gemm_backward"]
    assert kernels.rows[1][2:] == (1, 0, 0, 0)


def test_of_several_ranks_the_mean_is_shown_and_the_one_with_most(tmp_path: Path) -> None:
    def job(rank: int, gemm: int, *more: dict[str, Any]) -> dict[str, Any]:
        events = (traces.step(0, 0, MS), traces.kernel("gemm", 10_000, gemm), *more)
        return traces.trace(*events, rank=rank, world_size=2)

    path = runs.foreign(tmp_path, job(0, 100_000), job(1, 200_000, traces.kernel("only", 500_000, 100_000)))
    (panel,) = drawn(runs.measured(path, KERNELS_PICTURE.draw), [KERNELS_PICTURE])
    assert panel.title == "Kernels, mean of 2 ranks"
    assert panel.columns[-2:] == ("most on rank", "there_ns")
    assert [(row[0], *row[2:]) for row in panel.rows] == [
        ("gemm", 1, 150_000, 150_000, 0.75, 1, 200_000),
        ("only", 0.5, 50_000, 100_000, 0.25, 1, 100_000),
    ]
