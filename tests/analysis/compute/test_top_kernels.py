"""Kernels and operators of several ranks: the mean of all, and the one with most."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from dlprof.analysis.compute.top_kernels import heaviest_kernels, heaviest_operators
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS


def job(rank: int, gemm: int, *more: Any) -> dict[str, Any]:
    """Make a step of a product of 64 × 64 matrices that takes so long."""
    shape = {"Input Dims": [[64, 64], [64, 64]], "Input type": ["float", "float"]}
    product = traces.op("aten::mm", 0, 15_000, **shape)
    made = (traces.step(0, 0, 10 * MS), product, traces.launched("gemm", 1_000, MS, gemm, 1), *more)
    return traces.trace(*made, rank=rank, world_size=2)


def test_a_kernel_that_one_rank_lacks_takes_nothing_there(tmp_path: Path) -> None:
    more = traces.kernel("other", 5 * MS, 100_000), traces.kernel("other", 6 * MS, 100_000)
    run = runs.measured(runs.foreign(tmp_path, job(0, 200_000), job(1, 400_000, *more)), heaviest_kernels)
    gemm, other = run.frame(heaviest_kernels).to_dict("records")
    assert (gemm["name"], gemm["calls"], gemm["ns"], gemm["call_ns"]) == ("gemm", 1, 300_000, 300_000)
    assert (gemm["share"], gemm["most_on"], gemm["most_ns"], gemm["known"]) == (0.75, 1, 400_000, 2)
    assert (other["calls"], other["ns"], other["call_ns"], other["most_ns"]) == (1, 100_000, 100_000, 200_000)


def test_an_operators_rate_is_that_of_all_its_time(tmp_path: Path) -> None:
    add = [traces.op("aten::add", 20_000, 15_000), *traces.launched("add", 21_000, 5 * MS, 100_000, 2)]
    run = runs.measured(runs.foreign(tmp_path, job(0, 200_000), job(1, 600_000, add)), heaviest_operators)
    product, add_row = run.frame(heaviest_operators).to_dict("records")
    assert (product["operator"], product["shape"], product["dtype"]) == ("aten::mm", "64x64 64x64", "float32")
    assert (product["calls"], product["ns"], product["most_on"], product["most_ns"]) == (1, 400_000, 1, 600_000)
    assert product["flops"] == 2 * 64**3
    assert product["rate"] == 2 * 64**3 / 400e-6
    assert (add_row["operator"], add_row["calls"], add_row["ns"]) == ("aten::add", 0.5, 50_000)
    assert math.isnan(add_row["flops"])
    assert add_row["bound"] == ""


def test_what_bounds_it_is_told_where_it_is_the_same_everywhere(tmp_path: Path) -> None:
    run = runs.measured(runs.foreign(tmp_path, job(0, 5_000), job(1, 5_000)), heaviest_operators)
    assert run.frame(heaviest_operators)["bound"].to_list() == ["launch"]
    run = runs.measured(runs.foreign(tmp_path / "two", job(0, 5_000), job(1, 500_000)), heaviest_operators)
    assert run.frame(heaviest_operators)["bound"].to_list() == [""]
