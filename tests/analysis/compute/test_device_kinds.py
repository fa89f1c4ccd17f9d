"""The device's own time by kind and its floor: on jobs made by hand, and on recordings of a GPU with known answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.compute.kernels import kinds_of_work
from dlprof.result.figures import DeviceWork
from tests.fixtures import runs, traces
from tests.fixtures.places import TRACES
from tests.fixtures.recordings import unpack
from tests.fixtures.runs import MS

H100 = {"device": {"type": "cuda", "name": "NVIDIA H100 80GB HBM3"}}
PEAK, BANDWIDTH = 989.5e12, 3350e9  # of bfloat16, and of the memory, by the data sheet

GEMM, ADD = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "void at::native::vectorized_elementwise_kernel<4, X>"
TO_NHWC, NORM = "void cudnn::nchwToNhwcKernel<float>", "void at::native::batch_norm_backward_kernel<float>"

Piece = tuple[str, str, float]  # operators from the outermost on, the kernel or copy, ms


def job(*pieces: Piece, optimizer: int = 0) -> dict[str, Any]:
    """Make three equal steps of these pieces one after the other, the last of them launched by the optimizer."""
    length = round(sum(ms for *_, ms in pieces) * MS) + MS
    events: list[Any] = []
    for step in range(3):
        at = free = step * length
        events.append(traces.step(step, at, length))
        for n, (operators, name, ms) in enumerate(pieces):
            if n == len(pieces) - optimizer:
                events.append(traces.annotation("Optimizer.step#SGD.step", at, optimizer * 20_000))
            chain = operators.split()
            events += [traces.op(one, at + k, 15_000 - 2 * k) for k, one in enumerate(chain)]
            if name.startswith("Mem"):
                kinds, size = name.partition(" ")[2], round(ms * 1e6)
                events.append(traces.call("cudaMemcpyAsync", at + 5_000, 5_000, 100 * step + n + 1))
                begin, took = free + 20_000, round(ms * MS)
                fills = "set" in name
                events.append(traces.clear(begin, took, size) if fills else traces.copy(begin, took, size, kinds))
                events[-1]["args"]["correlation"] = 100 * step + n + 1
            else:
                events += traces.launched(name, at + 5_000, free + 20_000, round(ms * MS), 100 * step + n + 1)
            at, free = at + 20_000, free + round(ms * MS)
    return traces.trace(*events, world_size=1)


FLOPS, BYTES = int(PEAK / 1e3), int(BANDWIDTH / 1e3)  # that take 1 ms


def shape(operator: str, flops: float = 0, size: float = 0, dtype: str = "bfloat16") -> dict[str, Any]:
    return {"operator": operator, "dtype": dtype, "shape": "1x1", "calls": 1, "flops": int(flops), "bytes": int(size)}


def moved(operator: str, size: float, dtype: str = "bfloat16", device: str = "cuda") -> dict[str, Any]:
    return {"operator": operator, "dtype": dtype, "device": device, "calls": 1, "bytes": int(size)}


def counted(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Make the facts of a counted step from shapes (with FLOPs) and operators (with bytes)."""
    shapes = [row for row in rows if "flops" in row]
    sums = [{"operator": row["operator"], "dtype": row["dtype"], "flops": row["flops"], "calls": 1} for row in shapes]
    each = [row for row in rows if "flops" not in row]
    total = sum(row["flops"] for row in shapes) or 1
    found = {"state": "counted", "total": total, "operators": sums, "shapes": shapes, "moved": each}
    return {**H100, "flops": found | more}


def work_of(folder: Path, made: dict[str, Any], facts: dict[str, Any], *modules: Any) -> DeviceWork:
    path = runs.recorded(folder / "run", (made, [], facts))
    if modules:
        (path / "ranks/00000/modules.jsonl").write_text("".join(json.dumps(m) + "\n" for m in modules))
    return work_at(path)


def work_at(path: Path) -> DeviceWork:
    work = runs.measured(path, kinds_of_work).frame(kinds_of_work)
    assert isinstance(work, DeviceWork)
    return work


MM, ADDED = ("aten::mm", GEMM, 4.0), "elementwise operators"
CONVOLUTION = "aten::conv2d aten::convolution aten::cudnn_convolution"
UNKEPT = {"operators": [{"operator": "aten::mm", "dtype": "bfloat16", "flops": int(1.5 * FLOPS), "calls": 9}]}

# Pieces of a step and how many the optimizer launches, the facts; of each kind its time and its floor, ms.
KINDS: dict[str, tuple[list[Piece], int, dict[str, Any], dict[str, tuple[float, float]]]] = {
    "a product's FLOPs": ([MM], 0, counted(shape("aten::mm", 2 * FLOPS, 1e6)), {"matrix products": (4, 2)}),
    "each shape by what takes it longer, and those not kept": (
        [MM],
        0,
        counted(shape("aten::mm", FLOPS), shape("aten::mm", 0, BYTES), moved("aten::mm", BYTES), **UNKEPT),
        {"matrix products": (4, 2.5)},
    ),
    # The clone is the script's, the three others are not.
    "changes of layout in a convolution have no floor": (
        [(CONVOLUTION, TO_NHWC, 3), (CONVOLUTION, GEMM, 2), ("aten::contiguous aten::clone aten::copy_", TO_NHWC, 2)],
        0,
        counted(shape("aten::convolution", FLOPS), moved("aten::clone", BYTES), moved("aten::copy_", 8)),
        {"layout and type changes": (5, 1), "convolution": (2, 1)},
    ),
    "no operator needs longer than it takes": (
        [("aten::add", ADD, 1), ("aten::mul", ADD, 2)],
        0,
        counted(moved("aten::add", 3 * BYTES), moved("aten::mul", BYTES)),
        {ADDED: (3, 2)},
    ),
    "what the optimizer launches is its own by any name": (
        [("aten::mul", ADD, 3), ("aten::_foreach_mul_", ADD, 1)],
        1,
        counted(moved("aten::mul", BYTES), moved("aten::_foreach_mul_", BYTES / 2)),
        {ADDED: (3, 1), "optimizer kernels": (1, 0.5)},
    ),
    # An operator of a formula that nobody knows has more of a floor than its bytes; bytes of the CPU are the host's.
    "what is not known takes as long as it does": (
        [("aten::mm", GEMM, 8), ("", "my_kernel", 1), ("mine::attention", "flash_fwd_kernel", 1)],
        0,
        counted(
            *(shape("aten::mm", FLOPS), moved("mine::attention", 8), moved("aten::mm", BANDWIDTH, device="cpu")),
            uncounted={"mine::attention": 1},
        ),
        {"matrix products": (8, 1), "other": (1, 1), "attention": (1, 1)},
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_each_kind_takes_and_the_least_it_could(tmp_path: Path, name: str) -> None:
    pieces, optimizer, facts, kinds = KINDS[name]
    work = work_of(tmp_path, job(*pieces, optimizer=optimizer), facts)
    found: dict[str, Any] = {row.kind: (row.ns / MS, round((row.floor_ns or 0) / MS, 5)) for row in work.rows}
    assert found == {kind: (ns, pytest.approx(floor, rel=1e-4)) for kind, (ns, floor) in kinds.items()}
    assert work.floor_ns == pytest.approx(sum(floor for _, floor in kinds.values()) * MS, rel=1e-4)
    assert work.ns == pytest.approx(sum(ns for ns, _ in kinds.values()) * MS)
    assert sum(map(work.above_ns, work.rows)) == pytest.approx(work.ns - (work.floor_ns or 0))
    assert (work.fused_floor_ns, work.why) == (None, "")


def test_copies_are_read_and_written_and_fills_written(tmp_path: Path) -> None:
    made = job(("aten::copy_", "Memcpy DtoD (Device -> Device)", 2), ("", "Memset", 1), ("aten::mm", GEMM, 8))
    later = traces.call("cudaMemsetAsync", 80 * MS, 5_000, 999), traces.clear(90 * MS, MS, 10**9)
    later[1]["args"]["correlation"] = 999
    made["traceEvents"] += later  # behind the last step
    product, copies = work_of(tmp_path, made, counted(shape("aten::mm", FLOPS))).rows
    # 2 MB are copied; 1 MB is set.
    assert (copies.kind, copies.kernels, copies.bytes, copies.ns) == ("copies and fills", 2, 5e6, 3 * MS)
    assert copies.floor_ns == pytest.approx(5e6 / BANDWIDTH * 1e9)
    assert (product.kernels, product.flops) == (1, FLOPS)


def test_rates_are_of_kinds_that_are_known(tmp_path: Path) -> None:
    made = job(("aten::mm", GEMM, 8), ("mine::mm", GEMM, 2), ("aten::add", ADD, 1))
    work = work_of(tmp_path, made, counted(shape("aten::mm", FLOPS), moved("aten::add", 1e6)))
    assert [(row.kind, row.flops, row.bytes) for row in work.rows] == [
        ("matrix products", None, None),
        (ADDED, None, 1e6),
    ]


@pytest.mark.parametrize(
    ("pieces", "facts", "why"),
    [
        ([("aten::mm", GEMM, 2), ("", "my_kernel", 1)], counted(shape("aten::mm", 1e9)), "67 % of their time"),
        ([("aten::mm", GEMM, 2)], H100, "0 % of their time"),
        ([("aten::mm", GEMM, 2)], counted(shape("aten::mm", 1e9)) | {"device": {"name": "Else"}}, "limits of Else"),
        ([("aten::mm", GEMM, 2)], counted(shape("aten::mm", 1e9, dtype="int8")), "limits of NVIDIA H100"),
    ],
)
def test_without_bytes_or_limits_there_is_no_floor(
    tmp_path: Path, pieces: list[Piece], facts: dict[str, Any], why: str
) -> None:
    work = work_of(tmp_path, job(*pieces), facts)
    assert why in work.why
    assert (work.floor_ns, work.fused_floor_ns, work.rows[0].floor_ns) == (None, None, None)
    assert work.rows[0].ns == 2 * MS


# In a cache the operators take half of what the memory would: so does what is saved.
@pytest.mark.parametrize(("ms", "floor", "fused"), [(5, 4, 1), (2, 2, 0.5)])
def test_fused_chains_take_off_the_bytes_that_stay_in_registers(
    tmp_path: Path, ms: int, floor: float, fused: float
) -> None:
    facts = counted(moved("aten::add", 4 * BYTES), chained_bytes=4 * BYTES, fused_bytes=BYTES)
    work = work_of(tmp_path, job(("aten::add", ADD, ms)), facts)
    assert [work.floor_ns, work.fused_floor_ns] == pytest.approx([floor * MS, fused * MS])


def test_of_the_modules_bytes_all_kinds_but_products_share_one_floor(tmp_path: Path) -> None:
    own = ("mine::attention", "flash_fwd", 1)
    made = job(MM, ("aten::batch_norm", NORM, 5), ("aten::add", ADD, 1), own)
    # All that the host launches in a step is the module's.
    made["traceEvents"] += [traces.annotation("nn.Module: x (X)", step * 12 * MS, 80_000) for step in range(3)]
    row = {"parameters": 1, "parameter_bytes": 4, "bucket": -1, "recompute_flops": 0, "sharded": 0, "forward_flops": 1}
    module = {"path": "x", "kind": "X", "backward_flops": 0, "moved_bytes": 3 * BYTES, **row}
    facts = counted(shape("aten::mm", 2 * FLOPS, BYTES), uncounted={"mine::attention": 1})
    del facts["flops"]["moved"]
    work = work_of(tmp_path, made, facts, module)
    assert (work.floor_ns, work.shared_floor_ns) == pytest.approx(((2 + 2 + 1) * MS, 2 * MS))
    # Were all of the bytes those of the normalization, it would take 2 of its 5 ms.
    assert {row.kind: round(work.above_ns(row) / MS, 4) for row in work.rows} == {
        "normalization": 3,
        "matrix products": 2,
        ADDED: 0,
        "attention": 0,  # of no known formula
    }
    assert next(row.bytes for row in work.rows if row.kind == "normalization") is None


def test_ranks_are_averaged(tmp_path: Path) -> None:
    facts = counted(shape("aten::mm", 2 * FLOPS))
    steps = (job(MM), job(("aten::mm", GEMM, 6), ("aten::mm", GEMM, 2)))
    work = work_at(runs.recorded(tmp_path / "run", *((made, [], facts) for made in steps)))
    assert [(row.kernels, row.ns) for row in work.rows] == [(1.5, 6 * MS)]
    assert work.floor_ns == pytest.approx(2 * MS)


H200 = TRACES / "h200"
needs_recordings = pytest.mark.skipif(not H200.is_dir(), reason="the recordings of an H200 are not here (../shared)")


def checked(folder: Path, name: str) -> tuple[DeviceWork, dict[str, Any]]:
    """Return the work of a recording that `make gpu` made, and what was measured beside it."""
    unpack(H200 / "checks/2/recordings-nvidia_h200-1.tar.gz", name, folder)
    return work_at(folder / name), json.loads((folder / name / "oracle.json").read_text())


@needs_recordings
def test_a_job_of_products_on_an_h200(tmp_path: Path) -> None:
    work, told = checked(tmp_path, "rate-product")
    assert work.rows[0].kind == "matrix products"
    assert work.rows[0].flops == pytest.approx(told["flops"], rel=0.001)
    assert work.floor_ns == pytest.approx(told["flops"] / 989.5e12 * 1e9, rel=0.002)


@needs_recordings
def test_a_job_of_copies_on_an_h200(tmp_path: Path) -> None:
    work, told = checked(tmp_path, "rate-copy")
    copies = work.rows[0]
    assert copies.kind == "copies and fills"
    assert work.floor_ns is not None
    # The copies' rate by CUDA events, over the data sheet's bandwidth: 0.886.
    assert work.floor_ns / work.ns == pytest.approx(told["bytes_per_s"] / 4800e9, rel=0.005)


# The kind that is farthest above its floor, by how many ms at the least, the floor, and the fixed job's step.
FARTHEST = {
    "g01_gpt_fp32": ("matrix products", 10.0, 32.7, 0.0),
    "g02_resnet_layout": ("normalization", 22.9, 12.2, 29.54),
}


@needs_recordings
@pytest.mark.parametrize("name", FARTHEST)
def test_what_is_farthest_from_the_limits_of_an_h200(name: str) -> None:
    kind, above, floor, fixed = FARTHEST[name]
    work = work_at(H200 / name)
    assert work.floor_ns == pytest.approx(floor * MS, rel=0.01)
    farthest = max(work.rows, key=work.above_ns)
    assert farthest.kind == kind
    assert work.above_ns(farthest) == pytest.approx(above * MS, rel=0.01)
    assert work.floor_ns is not None
    assert not fixed or work.floor_ns < fixed * MS
