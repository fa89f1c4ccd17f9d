"""Kernels and operators by name: of several ranks the mean of all, the one with most, and what compares runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlprof.analysis.compute.operators import (
    LONGEST_NAME,
    MOST_KERNELS,
    heaviest_kernels,
    heaviest_operators,
    work,
    work_means,
)
from dlprof.analysis.timeline.steady import standard_error
from dlprof.errors import NotMeasured
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


def test_the_longest_kernels_are_listed_with_their_share_of_all(tmp_path: Path) -> None:
    many = [traces.kernel(f"kernel_{n}", n * 10_000, 1_000 + n) for n in range(MOST_KERNELS + 10)]
    made = traces.trace(traces.step(1, 0, MS), *many, traces.kernel("kernel_0", 900_000, 100_000))
    frame = runs.measured(runs.foreign(tmp_path, made), heaviest_kernels).frame(heaviest_kernels)
    assert frame["name"].to_list() == ["kernel_0", *(f"kernel_{n}" for n in range(MOST_KERNELS + 9, 10, -1))]
    assert frame[["calls", "ns"]].to_numpy()[:2].tolist() == [[2, 101_000], [1, 1_000 + MOST_KERNELS + 9]]
    assert set(frame["known"]) == {MOST_KERNELS + 10}
    total = 100_000 + sum(1_000 + n for n in range(MOST_KERNELS + 10))
    assert frame["share"].to_list() == pytest.approx((frame["ns"] / total).to_list())


def test_a_trace_without_kernels_abstains(tmp_path: Path) -> None:
    copies = traces.trace(traces.step(1, 0, MS), traces.copy(0, 1_000, 8))
    on_cpu = traces.trace(traces.step(1, 0, MS), traces.op("aten::mm", 0, 1_000))
    for name, made in (("copies", copies), ("cpu", on_cpu)):
        with pytest.raises(NotMeasured):
            runs.measured(runs.foreign(tmp_path / name, made), heaviest_kernels).frame(heaviest_kernels)


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


def of(folder: Path, *events: Any, **keys: Any) -> dict[tuple[str, str], dict[str, float]]:
    rank = runs.rank_of(folder, traces.trace(*events, **keys))
    rows = rank.once(work).to_dict("records")
    return {(str(r["kind"]), str(r["name"])): {c: float(r[c]) for c in ("calls", "ns", "noise_ns")} for r in rows}


def test_kernels_and_the_operators_that_launched_them(tmp_path: Path) -> None:
    found = of(
        tmp_path,
        traces.step(0, 0, MS),
        traces.step(1, MS, MS),
        traces.op("aten::mm", 0, 100_000),
        traces.launched("gemm", 10_000, 20_000, 300_000, 1),
        traces.launched("gemm", 30_000, 320_000, 100_000, 2),
        traces.op("aten::mm", MS, 100_000),
        traces.launched("gemm", MS + 10_000, MS + 20_000, 200_000, 3),
    )
    noise = standard_error(np.array([400_000.0, 200_000.0]))
    same = {"calls": 1.5, "ns": 300_000.0, "noise_ns": pytest.approx(noise)}
    assert found == {("operator", "aten::mm"): same, ("kernel", "gemm"): same}


def test_on_a_cpu_an_operator_has_the_time_that_it_spends_in_no_other(tmp_path: Path) -> None:
    found = of(
        tmp_path,
        traces.step(0, 0, MS),
        traces.op("aten::linear", 0, 500_000),
        traces.op("aten::addmm", 100_000, 300_000),
        device="",
        backend="gloo",
    )
    assert found["operator", "aten::linear"]["ns"] == 200_000
    assert found["operator", "aten::addmm"]["ns"] == 300_000
    assert not [k for k in found if k[0] == "kernel"]


def test_names_are_cut(tmp_path: Path) -> None:
    found = of(tmp_path, traces.step(0, 0, MS), traces.op("x" * 5_000, 0, 100_000), device="")
    assert found == {("operator", "x" * (LONGEST_NAME - 1) + "…"): {"calls": 1, "ns": 100_000, "noise_ns": 0}}


def test_without_an_operator_there_is_nothing_to_tell(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured):
        of(tmp_path, traces.step(0, 0, MS), device="")


def test_of_several_ranks_the_mean_counts_and_what_one_lacks_is_nothing(tmp_path: Path) -> None:
    def one(rank: int, *more: Any) -> dict[str, Any]:
        gemm = traces.kernel("gemm", 0, 100_000 * (1 + rank))
        return traces.trace(traces.step(0, 0, MS), gemm, *more, rank=rank, world_size=2)

    path = runs.foreign(tmp_path, one(0), one(1, traces.kernel("only", 500_000, 80_000)))
    rows = runs.measured(path, work_means).frame(work_means).to_dict("records")
    assert [(r["kind"], r["name"], r["calls"], r["ns"]) for r in rows] == [
        ("kernel", "gemm", 1, 150_000),
        ("kernel", "only", 0.5, 40_000),
    ]
