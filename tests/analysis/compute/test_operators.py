"""Operators by what they launched, computed and moved, on hand-made traces with known answers."""

import math
from pathlib import Path

import numpy as np

from dlprof.analysis.compute.operators import operators
from dlprof.analysis.engine import RankData
from dlprof.analysis.timeline.host import parents
from dlprof.read.run import open_run
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS

A100 = "NVIDIA A100-SXM4-80GB"
ADDED = ([512], [1024, 256], [256, 512])
THIN = ([8192, 8], [8, 8192])


def test_each_kernel_counts_for_the_innermost_operator_that_launched_it(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(0, 0, MS),
        traces.op("aten::linear", 0, 100_000),
        traces.product("aten::addmm", 10_000, "ampere_sgemm_128x64_tn", 50_000, 200_000, 1, *ADDED, dtype="float"),
        traces.launched("splitKreduce_kernel", 20_000, 600_000, 10_000, 3),  # by the same operator
        traces.op("aten::relu", 120_000, 20_000),
        traces.launched("vectorized_elementwise_kernel", 125_000, 250_000, 5_000, 2),
        traces.kernel("of nobody", 400_000, 100_000),
        device=A100,
    )
    frame = runs.rank_of(tmp_path, made).once(operators)
    found = {r["operator"]: r for r in frame.to_dict("records")}
    assert list(found) == ["aten::addmm", "of nobody", "aten::relu"]
    mine = found["aten::addmm"]
    assert (mine["shape"], mine["dtype"]) == ("512 1024x256 256x512", "float32")
    assert (mine["calls"], mine["ns"], mine["float32_ns"], mine["tensor_ns"]) == (2, 210_000, 200_000, 0)
    assert mine["flops"] == 2 * 1024 * 256 * 512
    assert mine["bytes"] == 4 * (1024 * 256 + 256 * 512 + 1024 * 512)
    # 268 MFLOP take 13.8 µs at 19.5 TFLOP/s, and 3.7 MB 1.9 µs at 1,935 GB/s.
    assert mine["bound"] == "compute"
    assert (found["aten::relu"]["bound"], math.isnan(found["aten::relu"]["flops"])) == ("launch", True)


def test_a_product_that_moves_much_is_bound_by_memory(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(0, 0, MS),
        traces.product("aten::mm", 0, "ampere_bf16_s16816gemm", 10_000, 50_000, 1, *THIN, dtype="c10::BFloat16"),
        device=A100,
    )
    (row,) = runs.rank_of(tmp_path, made).once(operators).to_dict("records")
    assert (row["dtype"], row["bound"], row["tensor_ns"]) == ("bfloat16", "memory", 50_000)


def test_on_a_cpu_an_operator_has_the_time_that_it_spends_in_no_other(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(0, 0, MS),
        traces.op("aten::linear", 0, 500_000),
        traces.op("aten::addmm", 100_000, 300_000),
        traces.op("aten::mm", 600_000, 100_000, tid=traces.AUTOGRAD),
        device="",
        backend="",
        world_size=1,
    )
    frame = runs.rank_of(tmp_path, made).once(operators)
    assert dict(zip(frame["operator"], frame["ns"], strict=True)) == {
        "aten::addmm": 300_000,
        "aten::linear": 200_000,
        "aten::mm": 100_000,
    }
    assert set(frame["bound"]) == {""}


def test_a_recording_without_shapes_has_those_of_the_counted_step(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(0, 0, MS),
        traces.op("aten::cudnn_convolution", 0, 20_000),
        traces.launched("sm80_xmma_fprop_implicit_gemm_bf16", 5_000, 10_000, 300_000, 1),
        device=A100,
    )
    each = {"operator": "aten::convolution", "dtype": "bfloat16", "bytes": 500}
    shapes = [
        {**each, "shape": "8x64x9x9 64x64x3x3", "calls": 2, "flops": 2_000},
        {**each, "shape": "8x3x9x9 64x3x3x3", "calls": 1, "flops": 1_000},
    ]
    counted = {"state": "counted", "total": 3_000, "shapes": shapes}
    facts = {"device": {"type": "cuda", "name": A100}, "flops": counted}
    rank = RankData(open_run(runs.recorded(tmp_path / "run", (made, [], facts))).ranks[0])
    frame = rank.once(operators)
    assert frame[["shape", "ns", "flops", "bytes", "calls"]].to_numpy().tolist() == [
        ["8x64x9x9 64x64x3x3", 200_000, 2_000, 500, 2],
        ["8x3x9x9 64x3x3x3", 100_000, 1_000, 500, 1],
    ]


def test_the_interval_around_each() -> None:
    spans = [(0, 100), (10, 50), (20, 30), (35, 50), (60, 90), (200, 300), (200, 210)]
    start, end = (np.array(x, dtype=np.int64) for x in zip(*spans, strict=True))
    assert parents(start, end).tolist() == [-1, 0, 1, 1, 0, -1, 5]
