"""What operators, kernels by name, a CPU's products and the optimizer take of a step, on jobs with known answers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dlprof.analysis.compute import cpu_work as work_of_cpu
from dlprof.analysis.compute.cpu_work import cpu_parts, cpu_work
from dlprof.analysis.compute.operators import (
    LONGEST_NAME,
    MOST_KERNELS,
    heaviest_kernels,
    heaviest_operators,
    operators,
    work,
    work_means,
)
from dlprof.analysis.compute.optimizer import optimizer_work
from dlprof.analysis.engine import RankData
from dlprof.analysis.step.partition import in_optimizer
from dlprof.analysis.timeline.steady import standard_error
from dlprof.errors import NotMeasured
from dlprof.read.run import open_run
from tests.fixtures import runs, traces
from tests.fixtures.processors import PRODUCTS, SERIAL, SMALL, SPLIT, computing
from tests.fixtures.runs import MS

US = 1_000
A100 = "NVIDIA A100-SXM4-80GB"
ADDED = ([512], [1024, 256], [256, 512])
THIN = ([8192, 8], [8, 8192])
BF16 = "c10::BFloat16"
CPU: Any = {"device": "", "backend": "", "world_size": 1}


# ---- operators -----------------------------------------------------------------------------------------------------


def test_each_kernel_counts_for_the_innermost_operator_that_launched_it(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(0, 0, MS),
        traces.op("aten::linear", 0, 100_000),
        traces.product("aten::addmm", 10_000, "ampere_sgemm_128x64_tn", 50_000, 200_000, 1, *ADDED, dtype="float"),
        traces.launched("splitKreduce_kernel", 20_000, 600_000, 10_000, 3),  # by the same operator
        traces.op("aten::relu", 120_000, 20_000),
        traces.launched("vectorized_elementwise_kernel", 125_000, 250_000, 5_000, 2),
        traces.product("aten::mm", 150_000, "ampere_bf16_s16816gemm", 300_000, 50_000, 4, *THIN, dtype=BF16),
        traces.kernel("of nobody", 400_000, 100_000),
        device=A100,
    )
    frame = runs.rank_of(tmp_path, made).once(operators)
    found = {r["operator"]: r for r in frame.to_dict("records")}
    assert list(found) == ["aten::addmm", "of nobody", "aten::mm", "aten::relu"]
    mine = found["aten::addmm"]
    assert (mine["shape"], mine["dtype"]) == ("512 1024x256 256x512", "float32")
    assert (mine["calls"], mine["ns"], mine["float32_ns"], mine["tensor_ns"]) == (2, 210_000, 200_000, 0)
    assert mine["flops"] == 2 * 1024 * 256 * 512
    assert mine["bytes"] == 4 * (1024 * 256 + 256 * 512 + 1024 * 512)
    # 268 MFLOP take 13.8 µs at 19.5 TFLOP/s, and 3.7 MB 1.9 µs at 2,039 GB/s.
    assert mine["bound"] == "compute"
    assert (found["aten::relu"]["bound"], math.isnan(found["aten::relu"]["flops"])) == ("launch", True)
    thin = found["aten::mm"]
    assert (thin["dtype"], thin["bound"], thin["tensor_ns"], thin["float32_ns"]) == ("bfloat16", "memory", 50_000, 0)


def test_on_a_cpu_an_operator_has_the_time_that_it_spends_in_no_other(tmp_path: Path) -> None:
    events = [
        traces.step(0, 0, MS),
        traces.op("aten::linear", 0, 500_000),
        traces.op("aten::addmm", 100_000, 300_000),
        traces.op("aten::mm", 600_000, 100_000, tid=traces.AUTOGRAD),
        traces.op("x" * 5_000, 800_000, 50_000),
    ]
    rank = runs.rank_of(tmp_path, traces.trace(*events, **CPU))
    frame, rows = rank.once(operators), rank.once(work)
    own = {"aten::addmm": 300_000, "aten::linear": 200_000, "aten::mm": 100_000, "x" * 5_000: 50_000}
    assert dict(zip(frame["operator"], frame["ns"], strict=True)) == own
    assert set(frame["bound"]) == {""}
    # Long names are cut in what compares runs.
    assert rows["name"].tolist() == [*list(own)[:3], "x" * (LONGEST_NAME - 1) + "…"]
    assert (set(rows["kind"]), rows["ns"].tolist(), set(rows["noise_ns"])) == ({"operator"}, [*own.values()], {0})
    # Without marks all of the trace is a step, which begins with an operator.
    alone = runs.rank_of(tmp_path / "alone", traces.trace(traces.op("aten::mm", 0, 1_000), **CPU)).once(work)
    assert alone[["name", "ns"]].to_numpy().tolist() == [["aten::mm", 1_000]]
    with pytest.raises(NotMeasured):
        runs.rank_of(tmp_path / "none", traces.trace(traces.step(0, 0, MS), **CPU)).once(work)


@pytest.mark.parametrize(
    ("kernels", "shares"),
    [
        # One call of which nobody knows the shape: by FLOPs, of 2 × 2,000 and 1,000.
        ([300], [(2 / 3, True), (1 / 3, True)]),
        # As many as were counted: the longest are those that compute most a call, 1,000 and 1,000 each of 1,000.
        ([100, 50, 150], [(250 / 300, False), (50 / 300, False)]),
    ],
)
def test_a_recording_without_shapes_has_those_of_the_counted_step(
    tmp_path: Path, kernels: list[int], shares: list[tuple[float, bool]]
) -> None:
    events: list[Any] = [traces.step(0, 0, MS)]
    for n, us in enumerate(kernels):
        events.append(traces.op("aten::cudnn_convolution", n * 30 * US, 20 * US))
        name = "sm80_xmma_fprop_implicit_gemm_bf16"
        events += traces.launched(name, (n * 30 + 5) * US, (200 + n * 200) * US, us * US, n + 1)
    each = {"operator": "aten::convolution", "dtype": "bfloat16", "bytes": 500}
    shapes = [
        {**each, "shape": "8x64x9x9 64x64x3x3", "calls": 2, "flops": 4_000},
        {**each, "shape": "8x3x9x9 64x3x3x3", "calls": 1, "flops": 1_000},
    ]
    shapes = [{**shape, "flops": 2_000} if n == 0 and len(kernels) == 1 else shape for n, shape in enumerate(shapes)]
    facts = {"device": {"type": "cuda", "name": A100}, "flops": {"state": "counted", "total": 3_000, "shapes": shapes}}
    path = runs.recorded(tmp_path / "run", (traces.trace(*events, device=A100), [], facts))
    frame = RankData(open_run(path).ranks[0]).once(operators)
    columns = ["shape", "flops", "bytes", "calls"]
    assert frame[columns].to_dict("records") == [{c: shape[c] for c in columns} for shape in shapes]
    expected = [(pytest.approx(sum(kernels) * US * share), shared) for share, shared in shares]
    assert list(zip(frame["ns"], frame["shared"], strict=True)) == expected


def gemm(rank: int, ns: int, *more: Any) -> dict[str, Any]:
    """Make a step of a product of 64 × 64 matrices that takes so long."""
    size = [64, 64]
    product = traces.product("aten::mm", 0, "gemm", MS, ns, 1, size, size, dtype="float")
    return traces.trace(traces.step(0, 0, 10 * MS), product, *more, rank=rank, world_size=2)


def test_of_several_ranks_the_mean_counts_and_what_one_lacks_is_nothing_there(tmp_path: Path) -> None:
    more = traces.kernel("other", 5 * MS, 100_000), traces.kernel("other", 6 * MS, 100_000)
    add = [traces.op("aten::add", 30_000, 15_000), *traces.launched("add", 31_000, 7 * MS, 50_000, 2)]
    path = runs.foreign(tmp_path, gemm(0, 200_000), gemm(1, 400_000, *more, add))
    run = runs.measured(path, heaviest_kernels, heaviest_operators, work_means)
    gemms, other, added = run.frame(heaviest_kernels).to_dict("records")
    assert (gemms["name"], gemms["calls"], gemms["ns"], gemms["call_ns"]) == ("gemm", 1, 300_000, 300_000)
    assert (gemms["most_on"], gemms["most_ns"], gemms["known"]) == (1, 400_000, 3)
    assert (other["calls"], other["ns"], other["call_ns"], other["most_ns"]) == (1, 100_000, 100_000, 200_000)
    assert [row["share"] for row in (gemms, other, added)] == pytest.approx([300 / 425, 100 / 425, 25 / 425])

    rows = {row["operator"]: row for row in run.frame(heaviest_operators).to_dict("records")}
    product = rows["aten::mm"]
    assert (product["shape"], product["dtype"], product["shapes"]) == ("64x64 64x64", "float32", 1)
    assert (product["calls"], product["ns"], product["most_on"], product["most_ns"]) == (1, 300_000, 1, 400_000)
    assert (product["flops"], product["rate"]) == (2 * 64**3, pytest.approx(2 * 64**3 / 300e-6))
    assert (rows["aten::add"]["calls"], rows["aten::add"]["ns"]) == (0.5, 25_000)
    assert math.isnan(rows["aten::add"]["flops"])

    means = run.frame(work_means)
    means = means[means["kind"] == "kernel"]
    assert list(zip(means["name"], means["calls"], means["ns"], strict=True)) == [
        ("gemm", 1, 300_000),
        ("other", 1, 100_000),
        ("add", 0.5, 25_000),
    ]


@pytest.mark.parametrize(("ns", "bound"), [((5_000, 5_000), "launch"), ((5_000, 500_000), "")])
def test_what_bounds_an_operator_is_told_where_it_is_the_same_on_all_ranks(
    tmp_path: Path, ns: tuple[int, int], bound: str
) -> None:
    run = runs.measured(runs.foreign(tmp_path, gemm(0, ns[0]), gemm(1, ns[1])), heaviest_operators)
    assert run.frame(heaviest_operators)["bound"].to_list() == [bound]


def test_the_longest_kernels_are_listed_with_their_share_of_all(tmp_path: Path) -> None:
    many = [traces.kernel(f"kernel_{n}", n * 10_000, 1_000 + n) for n in range(MOST_KERNELS + 10)]
    made = traces.trace(traces.step(1, 0, MS), *many, traces.kernel("kernel_0", 900_000, 100_000))
    frame = runs.measured(runs.foreign(tmp_path, made), heaviest_kernels).frame(heaviest_kernels)
    assert frame["name"].to_list() == ["kernel_0", *(f"kernel_{n}" for n in range(MOST_KERNELS + 9, 10, -1))]
    assert frame[["calls", "ns"]].to_numpy()[:2].tolist() == [[2, 101_000], [1, 1_000 + MOST_KERNELS + 9]]
    assert set(frame["known"]) == {MOST_KERNELS + 10}
    total = 100_000 + sum(1_000 + n for n in range(MOST_KERNELS + 10))
    assert frame["share"].to_list() == pytest.approx((frame["ns"] / total).to_list())


@pytest.mark.parametrize("event", [traces.copy(0, 1_000, 8), traces.op("aten::mm", 0, 1_000)], ids=["copy", "operator"])
def test_a_trace_without_kernels_abstains(tmp_path: Path, event: Any) -> None:
    path = runs.foreign(tmp_path, traces.trace(traces.step(1, 0, MS), event))
    with pytest.raises(NotMeasured):
        runs.measured(path, heaviest_kernels).frame(heaviest_kernels)


def test_kernels_and_the_operators_that_launched_them_vary_from_step_to_step(tmp_path: Path) -> None:
    made = traces.trace(
        *(traces.step(n, n * MS, MS) for n in range(2)),
        *(traces.op("aten::mm", n * MS, 100_000) for n in range(2)),
        traces.launched("gemm", 10_000, 20_000, 300_000, 1),
        traces.launched("gemm", 30_000, 320_000, 100_000, 2),
        traces.launched("gemm", MS + 10_000, MS + 20_000, 200_000, 3),
    )
    rows = runs.rank_of(tmp_path, made).once(work)
    assert rows[["kind", "name"]].to_numpy().tolist() == [["operator", "aten::mm"], ["kernel", "gemm"]]
    noise = standard_error(np.array([400_000.0, 200_000.0]))
    assert rows[["calls", "ns", "noise_ns"]].to_numpy().tolist() == [[1.5, 300_000.0, pytest.approx(noise)]] * 2


# ---- a CPU's products ----------------------------------------------------------------------------------------------


def test_products_are_told_from_what_is_split_and_what_is_not(tmp_path: Path) -> None:
    run = runs.measured(computing(tmp_path), cpu_work, cpu_parts)
    (row,) = run.frame(cpu_work).to_dict("records")
    assert (row["products_ns"], row["products"], row["inner"]) == (PRODUCTS, 1, 1)
    assert (row["split_ns"], row["split"]) == (SPLIT, 1)
    # With what the layer takes around its product.
    assert row["operators_ns"] == PRODUCTS + SPLIT + SERIAL + SMALL + 10_000
    # The mean step's computation is divided as the traced ones.
    parts = run.frame(cpu_parts)
    assert parts["products_ns"].to_list() == pytest.approx([PRODUCTS], rel=0.01)
    share = (PRODUCTS + SPLIT) / (900 * MS)
    assert work_of_cpu.split_share(parts, 900.0 * MS) == {0: pytest.approx(share, rel=0.01)}
    assert work_of_cpu.split_share(None, 900.0 * MS) == {}


@pytest.mark.parametrize(
    ("name", "kind", "calls_another"),
    [
        *((f"aten::{name}", "product", False) for name in ("addmm", "bmm", "_slow_conv2d_forward")),
        *((f"aten::{name}", "product", False) for name in ("mkldnn_convolution", "mkldnn_convolution_backward")),
        *((f"aten::{name}", "product", True) for name in ("conv2d", "convolution", "_convolution")),
        ("aten::convolution_backward", "product", True),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "product", False),
        ("aten::embedding_dense_backward", "serial", False),
        ("aten::normal_", "serial", False),
        ("aten::native_layer_norm", "other", False),
        ("aten::summary_of_mm", "other", False),
    ],
)
def test_operators_are_known_by_their_names(name: str, kind: str, calls_another: bool) -> None:
    assert (work_of_cpu._kind(name), work_of_cpu._CALLS_PRODUCT.match(name) is not None) == (kind, calls_another)


@pytest.mark.parametrize(
    ("parts", "times", "expected", "most"),
    [
        ({"products_ns": 100 * MS, "products": 10}, 2, 100 * MS * (1 - 2**-0.9) - 10 * 5_000, 50 * MS),
        ({"split_ns": 10 * MS, "split": 10}, 3, 10 * MS * (1 - 3**-0.7) - 10 * 5_000, 10 * MS * 2 / 3),
        # Many small ones: to start the threads takes longer than they save.
        ({"split_ns": MS, "split": 1_000}, 2, 0, MS / 2),
        # What memory feeds gains no more from 64 threads than from 4.
        ({"split_ns": MS}, 64, MS * (1 - 4**-0.7), MS * 63 / 64),
    ],
)
def test_what_more_threads_take_off(parts: dict[str, float], times: float, expected: float, most: float) -> None:
    none = {"products_ns": 0.0, "products": 0.0, "split_ns": 0.0, "split": 0.0}
    gain = work_of_cpu.by_threads(pd.DataFrame([{"rank": 0, **none, **parts}]), 0, times)
    assert (gain.expected_ns, gain.most_ns) == pytest.approx((expected, most))


# ---- the optimizer -------------------------------------------------------------------------------------------------


def optimizer_of(path: Path) -> dict[Any, Any]:
    (row,) = RankData(open_run(path).ranks[0]).once(optimizer_work).to_dict("records")
    return row


def test_a_foreign_trace_of_a_cpu_tells_the_optimizers_ranges_and_operators(tmp_path: Path) -> None:
    events: list[Any] = []
    for at in (0, MS):
        events += [traces.step(at // MS, at, MS), traces.op("aten::mm", at, 100_000)]
        events += [traces.annotation("Optimizer.step#SGD.step", at + 200_000, 300_000)]
        events += [traces.op(name, at + us * US, 50_000) for name, us in (("aten::add_", 210), ("aten::mul_", 270))]
    (row,) = runs.rank_of(tmp_path, traces.trace(*events, **CPU)).once(optimizer_work).to_dict("records")
    assert (row["ns"], row["calls"]) == (300_000, 2)


@pytest.mark.parametrize(
    ("mark", "untraced", "ns"),
    [
        ("horovod:all_reduce", 4 * MS, 1 * MS),  # gradients, within the optimizer's step
        # In the other steps it waits for longer: what it computes takes no longer for that.
        ("gloo:broadcast", 24 * MS, 1 * MS),  # parameters (ZeRO)
        ("gloo:broadcast", 2 * MS, MS // 2),
    ],
)
def test_what_the_optimizer_exchanges_is_none_of_it(tmp_path: Path, mark: str, untraced: int, ns: int) -> None:
    """It waits for 3 of its 4 traced ms until something is exchanged."""
    events: list[Any] = []
    for n in range(3):
        at = n * 10 * MS
        events += [traces.step(20 + n, at, 10 * MS), traces.op("aten::mm", at, 6 * MS)]
        events += [
            traces.annotation("dlprof::optimizer", at + 6 * MS, 4 * MS),
            traces.op("aten::add_", at + 9 * MS, MS),
        ]
        events += [traces.annotation(mark, at + 6 * MS, 3 * MS)]
    steps = [runs.light(n, 6 * MS + untraced, optimizer_ns=untraced, profiled=int(n > 19)) for n in range(23)]
    made = traces.trace(*events, device="", backend="")
    row = optimizer_of(runs.recorded(tmp_path / "run", (made, steps, runs.CPU)))
    assert (row["calls"], row["ns"]) == (1, pytest.approx(ns, rel=1e-3))


def test_on_a_gpu_the_optimizer_takes_its_kernels_and_the_idle_time_before_them(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(1, 0, MS),
        traces.kernel("gemm", 10_000, 190_000),  # whose launch was not traced: the first one is the optimizer's
        traces.annotation("Optimizer.step#Adam.step", 250_000, 400_000),
        # The device ran dry at 200 µs: 50 µs of that are before the optimizer, 55 µs within, and 5 µs the launch's own.
        traces.launched("multi_tensor_apply", 300_000, 310_000, 40_000, 2),
        traces.launched("multi_tensor_apply", 320_000, 350_000, 50_000, 3),
        traces.launched("elsewhere", 700_000, 710_000, 290_000, 4),
    )
    (row,) = runs.rank_of(tmp_path, made).once(optimizer_work).to_dict("records")
    # From 400 to 650 µs the device idles, too, while the thread is in the optimizer.
    assert row["idle_ns"] == 55_000 + 250_000
    assert (row["ns"], row["calls"]) == (90_000 + row["idle_ns"], 2)


def test_the_closure_of_a_step_is_none_of_the_optimizer(tmp_path: Path) -> None:
    """LBFGS and Lightning compute the loss inside of the optimizer's step."""
    events = [
        traces.annotation("Optimizer.step#AdamW.step", 0, 1_000),
        traces.annotation("dlprof::forward", 100, 300),
        traces.annotation("dlprof::backward", 500, 200),
        traces.annotation("dlprof::closure", 60, 700),
        traces.op("aten::mm", 150, 100),
    ]
    within = runs.rank_of(tmp_path, traces.trace(*events, **CPU)).once(in_optimizer)
    assert (within - within[0, 0]).tolist() == [[0, 60], [760, 1_000]]


def test_without_an_optimizer_it_abstains(tmp_path: Path) -> None:
    made = traces.trace(traces.step(1, 0, MS), traces.op("aten::mm", 0, MS), **CPU)
    with pytest.raises(NotMeasured, match="no optimizer"):
        runs.rank_of(tmp_path, made).once(optimizer_work)
