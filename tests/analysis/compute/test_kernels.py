"""Kernels by their units, launchers and times, and what shorter ones would gain, on hand-made traces."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlprof.analysis.compute.kernels import around, kernels, larger_batches
from dlprof.analysis.compute.operators import tensor_cores
from dlprof.analysis.engine import RankData
from dlprof.analysis.timeline import host
from dlprof.errors import NotMeasured
from dlprof.read.run import open_run
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS

A100 = "NVIDIA A100-SXM4-80GB"


def test_a_kernel_has_its_unit_its_step_and_the_innermost_operator_that_launched_it(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(0, 0, MS),
        traces.step(1, MS, MS),
        traces.op("aten::linear", 0, 100_000),
        traces.op("aten::addmm", 10_000, 50_000),
        traces.launched("ampere_sgemm_128x64_tn", 20_000, 50_000, 200_000, 1),
        traces.launched("attn_fwd", MS + 20_000, MS + 50_000, 100_000, 2),
        traces.copy(MS + 300_000, 1_000, 8),
    )
    rank = runs.rank_of(tmp_path, made)
    frame, spans = rank.once(kernels), rank.table("spans")
    assert frame["name"].to_list() == spans["name"][frame.index].to_list() == ["ampere_sgemm_128x64_tn", "attn_fwd"]
    assert frame["unit"].to_list() == ["float32", "unknown"]
    assert frame["step"].to_list() == [0, 1]
    assert frame["dur_ns"].to_list() == [200_000, 100_000]
    launcher, none = frame["owner"]
    assert (spans["name"][launcher], none) == ("aten::addmm", -1)


def test_time_on_tensor_cores_and_what_16_bits_would_save(tmp_path: Path) -> None:
    # 2 × 4096³ FLOP: 7.05 ms at the float32 peak, 0.88 ms at half of bfloat16's. The host waits in the end.
    size = [4096, 4096]
    made = traces.trace(
        traces.step(0, 0, 20 * MS),
        traces.product("aten::mm", 0, "ampere_sgemm_128x128_tn", 10_000, 8 * MS, 1, size, size, dtype="float"),
        traces.op("aten::conv2d", 30_000, 20_000),
        traces.launched("sm80_xmma_fprop_implicit_gemm_tf32f32", 40_000, 8 * MS + 10_000, MS, 2),
        traces.launched("elementwise", 50_000, 9 * MS + 10_000, 1 * MS, 3),
        traces.call("cudaStreamSynchronize", 60_000, 10 * MS, 4),
        device=A100,
    )
    (row,) = runs.rank_of(tmp_path, made).once(tensor_cores).to_dict("records")
    assert (row["kernel_ns"], row["tensor_ns"], row["tf32_ns"], row["float32_ns"]) == (10 * MS, MS, MS, 8 * MS)
    assert row["unknown_ns"] == 0
    casts = 4 * 3 * 4096**2 / 2 / 2.039e12 * 1e9
    assert row["fp32_saved_ns"] == pytest.approx(8 * MS - 2 * 4096**3 / 156e12 * 1e9 - casts, rel=1e-4)
    assert row["aligned"] == 0


def test_no_kernel_can_run_before_it_is_launched(tmp_path: Path) -> None:
    # Each kernel ends before the next is launched: shorter ones only leave the device idle.
    made = traces.trace(
        traces.step(0, 0, 4 * MS),
        *(traces.launched("ampere_sgemm_128x128_tn", n * MS, n * MS + 10_000, MS - 20_000, n + 1) for n in range(4)),
        device=A100,
    )
    (row,) = runs.rank_of(tmp_path, made).once(tensor_cores).to_dict("records")
    assert row["float32_ns"] == 4 * (MS - 20_000)
    assert row["fp32_saved_ns"] == 0  # the host launches no sooner


def steps_of(busy: int, optimizer: int = 0, *, python: bool = False) -> dict[str, Any]:
    """Make steps of 1 ms of host time, operators or the script's own: `busy` ns of computing, `optimizer` ns of it."""
    events: list[Any] = []
    for n in range(4):
        t, c = n * MS, 10 * n + 1
        events += [traces.step(n, t, MS), *traces.launched("gemm", t, t + 10_000, busy, c)]
        events += [] if python else [traces.op("aten::linear", t + 6_000, MS - 7_000)]
        if optimizer:
            events.append(traces.annotation("Optimizer.step#SGD.step", t + 20_000, 100_000))
            events += traces.launched("sgd", t + 30_000, t + 12_000 + busy, optimizer, c + 1)
    return traces.trace(*events, world_size=1)


def recorded(folder: Path, made: dict[str, Any]) -> RankData:
    """Record the job with one reading of its memory."""
    path = runs.recorded(folder / "run", (made, [], {"device": {"type": "cuda", "name": "NVIDIA H100"}}))
    row = {"at_ns": traces.BASE_NS, "step": 0, "device": 0, "allocated_bytes": 1_000, "reserved_bytes": 2_000}
    (path / "ranks/00000/memory.jsonl").write_text(json.dumps(row) + "\n")
    return RankData(open_run(path).ranks[0])


def gains(folder: Path, made: dict[str, Any]) -> list[float]:
    frame = recorded(folder, made).once(larger_batches)
    assert frame["times"].tolist() == [1, 1.5, 2, 3, 4, 8]
    return [float(ns) for ns in frame.loc[frame["times"].isin((2, 4, 8)), "gain_ns"]]


def test_as_long_as_the_host_takes_longer_the_step_does_not_grow(tmp_path: Path) -> None:
    twice, four, eight = gains(tmp_path, steps_of(busy=300_000))
    assert twice == pytest.approx(MS / 2)
    # Then the device sets the pace: 0.3 ms a batch for ever.
    assert [four, eight] == pytest.approx([700_000, 700_000], rel=0.01)


def test_a_device_that_computes_all_the_time_gains_nothing(tmp_path: Path) -> None:
    assert gains(tmp_path, steps_of(busy=988_000)) == [pytest.approx(0, abs=20_000)] * 3


def test_the_optimizer_is_the_same_for_any_batch(tmp_path: Path) -> None:
    twice, *_ = gains(tmp_path, steps_of(busy=588_000, optimizer=390_000))
    # 2 × 588 + 390 µs for two batches, of 1,000 each now.
    assert twice == pytest.approx(MS - (2 * 588_000 + 390_000) / 2, rel=0.03)


def test_the_scripts_own_python_may_grow_with_the_batch(tmp_path: Path) -> None:
    assert gains(tmp_path, steps_of(busy=300_000, python=True)) == [pytest.approx(0, abs=20_000)] * 3


FILLS = {
    "with three times the batch the device works for 0.9 ms": (steps_of(busy=300_000), 0.7, 3.0),
    "so it does with that of which the optimizer's part stays": (steps_of(busy=200_000, optimizer=300_000), 0.5, 3.0),
    "it works all the time": (steps_of(busy=988_000), 0.0, 1.0),
    "it works for nine tenths": (steps_of(busy=905_000), 0.1, 1.0),
    "with eight times the batch it works for 0.8 ms": (steps_of(busy=100_000), 0.9, math.nan),
    "if the script's Python grows no batch fills it": (steps_of(busy=300_000, python=True), 0.7, math.nan),
}


@pytest.mark.parametrize("name", FILLS)
def test_a_batch_fills_the_device_from_where_the_host_is_faster(name: str, tmp_path: Path) -> None:
    made, waits, times = FILLS[name]
    row = recorded(tmp_path, made).once(larger_batches).iloc[0]
    assert row["wait_share"] == pytest.approx(waits, abs=0.02)
    assert row["fills"] == pytest.approx(times, rel=0.02, nan_ok=True)


def test_without_a_replay_it_abstains(tmp_path: Path) -> None:
    rank = runs.rank_of(tmp_path, traces.trace(traces.step(0, 0, MS), traces.op("aten::mm", 0, MS), device=""))
    with pytest.raises(NotMeasured):
        rank.once(larger_batches)


@pytest.mark.parametrize("seed", range(5))
def test_asked_of_some_spans_what_lies_around_them_is_the_same(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    events: list[traces.Event] = []

    def nested(start: int, end: int, tid: int, depth: int) -> None:
        while start + 10 < end and depth < 6:
            stop = rng.randint(start + 5, end)
            if rng.random() < 0.3:
                events.append(traces.call("cudaLaunchKernel", start, stop - start, len(events) + 1, tid=tid))
            else:
                events.append(traces.op(f"aten::op{depth}", start, stop - start, tid=tid))
            nested(start + rng.randint(0, 3), stop, tid, depth + 1)
            start = stop + rng.randint(0, 200)

    for tid in (traces.MAIN, traces.AUTOGRAD):
        nested(0, 20_000, tid, 0)
    data = runs.rank_of(tmp_path, traces.trace(*events, traces.kernel("gemm", 0, 5)))
    spans, on_device = data.table("spans"), data.once(host.is_on_device)
    calls = np.flatnonzero(host.is_kind(spans, "runtime"))
    assert len(calls) > 20
    all_of_them = around(spans, on_device, "op", "runtime")
    assert (all_of_them[calls] >= 0).sum() > 10
    np.testing.assert_array_equal(around(spans, on_device, "op", "runtime", of=calls)[calls], all_of_them[calls])
