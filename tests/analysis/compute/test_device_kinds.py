"""The device's own time by kind and its floor: on jobs made by hand, and on recordings of a GPU with known answers."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.compute.device_kinds import kinds_of_work
from dlprof.result.figures import DeviceWork, WorkKind
from tests.fixtures import runs, traces
from tests.fixtures.places import TRACES
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


def work_of(folder: Path, made: dict[str, Any], facts: dict[str, Any], modules: list[Any] | None = None) -> DeviceWork:
    path = runs.recorded(folder / "run", (made, [], facts))
    if modules is not None:
        (path / "ranks/00000/modules.jsonl").write_text("".join(json.dumps(m) + "\n" for m in modules))
    return work_at(path)


def work_at(path: Path) -> DeviceWork:
    work = runs.measured(path, kinds_of_work).frame(kinds_of_work)
    assert isinstance(work, DeviceWork)
    return work


def by_kind(work: DeviceWork) -> dict[str, WorkKind]:
    return {row.kind: row for row in work.rows}


def test_of_a_product_it_is_the_flops_at_the_peak_and_of_a_copy_the_bytes_at_the_bandwidth(tmp_path: Path) -> None:
    made = job(("aten::mm", GEMM, 4), ("aten::copy_", "Memcpy DtoD (Device -> Device)", 2), ("", "Memset", 1))
    later = traces.call("cudaMemsetAsync", 80 * MS, 5_000, 999), traces.clear(90 * MS, MS, 10**9)
    later[1]["args"]["correlation"] = 999
    made["traceEvents"] += later  # behind the last step
    work = work_of(tmp_path, made, counted(shape("aten::mm", 2 * PEAK / 1e3, 1e6), moved("aten::mm", 1e6)))
    product, copies = work.rows
    assert [copies.ns, copies.floor_ns] == pytest.approx([3 * MS, 5e6 / BANDWIDTH * 1e9])
    assert (product.kind, product.kernels, product.ns) == ("matrix products", 1, 4 * MS)
    assert product.floor_ns == pytest.approx(2 * MS)
    assert product.flops == pytest.approx(2 * PEAK / 1e3)
    # 2 MB are copied, read and written; 1 MB is set.
    assert (copies.kind, copies.kernels, copies.bytes) == ("copies and fills", 2, 5e6)
    assert work.floor_ns == pytest.approx(2 * MS + 5e6 / BANDWIDTH * 1e9)
    assert (work.ns, work.fused_floor_ns, work.why) == (7 * MS, None, "")


def test_each_shape_is_bound_by_what_takes_it_longer(tmp_path: Path) -> None:
    # 1 ms of arithmetic and next to no bytes; 1 ms of bytes and next to no arithmetic; 0.5 ms of shapes not kept.
    flops, size = PEAK / 1e3, BANDWIDTH / 1e3
    facts = counted(shape("aten::mm", flops), shape("aten::mm", 0, size), moved("aten::mm", size))
    facts["flops"]["operators"] = [{"operator": "aten::mm", "dtype": "bfloat16", "flops": int(1.5 * flops), "calls": 9}]
    work = work_of(tmp_path, job(("aten::mm", GEMM, 4)), facts)
    assert work.floor_ns == pytest.approx(2.5 * MS)


def test_changes_of_layout_in_a_convolution_are_beyond_its_floor(tmp_path: Path) -> None:
    convolution = "aten::conv2d aten::convolution aten::cudnn_convolution"
    made = job(
        (convolution, TO_NHWC, 3), (convolution, GEMM, 2), ("aten::contiguous aten::clone aten::copy_", TO_NHWC, 2)
    )
    facts = counted(
        shape("aten::convolution", PEAK / 1e3), moved("aten::clone", BANDWIDTH / 1e3), moved("aten::copy_", 8)
    )
    kinds = by_kind(work_of(tmp_path, made, facts))
    assert kinds["convolution"].floor_ns == pytest.approx(1 * MS)
    assert kinds["convolution"].ns == 2 * MS
    # The clone is the script's, the three others are not.
    layout = kinds["layout and type changes"]
    assert [layout.ns, layout.floor_ns] == pytest.approx([5 * MS, 1 * MS])


def test_no_operator_needs_longer_than_it_takes(tmp_path: Path) -> None:
    facts = counted(moved("aten::add", 3 * BANDWIDTH / 1e3), moved("aten::mul", BANDWIDTH / 1e3))
    work = work_of(tmp_path, job(("aten::add", ADD, 1), ("aten::mul", ADD, 2)), facts)
    (row,) = work.rows
    assert row.kind == "elementwise operators"
    assert row.floor_ns == pytest.approx(2 * MS)


def test_what_the_optimizer_launches_is_its_own_by_any_name(tmp_path: Path) -> None:
    made = job(("aten::mul", ADD, 3), ("aten::_foreach_mul_", ADD, 1), optimizer=1)
    facts = counted(moved("aten::mul", BANDWIDTH / 1e3), moved("aten::_foreach_mul_", BANDWIDTH / 2e3))
    kinds = by_kind(work_of(tmp_path, made, facts))
    assert {kind: (row.ns, round(row.floor_ns or 0)) for kind, row in kinds.items()} == {
        "elementwise operators": (3 * MS, 1 * MS),
        "optimizer kernels": (1 * MS, MS // 2),
    }


def test_what_is_not_known_counts_as_long_as_it_takes(tmp_path: Path) -> None:
    made = job(("aten::mm", GEMM, 8), ("", "my_kernel", 1), ("mine::attention", "flash_fwd_kernel", 1))
    # An operator of a formula that nobody knows has more of a floor than its bytes.
    facts = counted(
        shape("aten::mm", PEAK / 1e3),
        moved("mine::attention", 8),
        moved("aten::mm", BANDWIDTH, device="cpu"),  # that is the host's
        uncounted={"mine::attention": 1},
    )
    work = work_of(tmp_path, made, facts)
    assert work.floor_ns == pytest.approx(3 * MS)
    assert {row.kind: work.above_ns(row) for row in work.rows} == {
        "matrix products": pytest.approx(7 * MS),
        "other": 0,
        "attention": 0,
    }


def test_rates_are_of_kinds_that_are_known(tmp_path: Path) -> None:
    made = job(("aten::mm", GEMM, 8), ("mine::mm", GEMM, 2), ("aten::add", ADD, 1))
    kinds = by_kind(work_of(tmp_path, made, counted(shape("aten::mm", PEAK / 1e3), moved("aten::add", 1e6))))
    assert [(kinds[k].flops, kinds[k].bytes) for k in ("matrix products", "elementwise operators")] == [
        (None, None),
        (None, 1e6),
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


def test_fused_chains_take_off_the_bytes_that_stay_in_registers(tmp_path: Path) -> None:
    size = int(BANDWIDTH / 1e3)
    facts = counted(moved("aten::add", 4 * size), chained_bytes=4 * size, fused_bytes=size)
    work = work_of(tmp_path / "a", job(("aten::add", ADD, 5)), facts)
    assert [work.floor_ns, work.fused_floor_ns] == pytest.approx([4 * MS, 1 * MS])
    # In a cache the operators take half of what the memory would: so does what is saved.
    work = work_of(tmp_path / "b", job(("aten::add", ADD, 2)), facts)
    assert [work.floor_ns, work.fused_floor_ns] == pytest.approx([2 * MS, MS / 2])


def test_of_the_modules_bytes_all_kinds_but_products_share_one_floor(tmp_path: Path) -> None:
    size = int(BANDWIDTH / 1e3)
    made = job(
        ("aten::mm", GEMM, 4), ("aten::batch_norm", NORM, 5), ("aten::add", ADD, 1), ("mine::attention", "flash_fwd", 1)
    )
    # All that the host launches in a step is the module's.
    made["traceEvents"] += [traces.annotation("nn.Module: x (X)", step * 12 * MS, 80_000) for step in range(3)]
    row = {"parameters": 1, "parameter_bytes": 4, "bucket": -1, "recompute_flops": 0, "sharded": 0, "forward_flops": 1}
    module = {"path": "x", "kind": "X", "backward_flops": 0, "moved_bytes": 3 * size, **row}
    facts = counted(shape("aten::mm", 2 * PEAK / 1e3, size), uncounted={"mine::attention": 1})
    del facts["flops"]["moved"]
    work = work_of(tmp_path, made, facts, [module])
    assert work.floor_ns == pytest.approx((2 + 2 + 1) * MS)
    assert work.shared_floor_ns == pytest.approx(2 * MS)
    kinds = by_kind(work)
    above = {kind: work.above_ns(row) for kind, row in kinds.items()}
    # Were all of the bytes those of the normalization, it would take 2 of its 5 ms.
    assert above == {
        "normalization": pytest.approx(3 * MS),
        "matrix products": pytest.approx(2 * MS),
        "elementwise operators": 0,
        "attention": 0,  # of no known formula
    }
    assert kinds["normalization"].bytes is None


def test_ranks_are_averaged(tmp_path: Path) -> None:
    facts = counted(shape("aten::mm", 2 * PEAK / 1e3))
    steps = (job(("aten::mm", GEMM, 4)), job(("aten::mm", GEMM, 6), ("aten::mm", GEMM, 2)))
    path = runs.recorded(tmp_path / "run", *((made, [], facts) for made in steps))
    work = work_at(path)
    assert [(row.kernels, row.ns) for row in work.rows] == [(1.5, 6 * MS)]
    assert work.floor_ns == pytest.approx(2 * MS)


H200 = TRACES / "h200"
needs_recordings = pytest.mark.skipif(not H200.is_dir(), reason="the recordings of an H200 are not here (../shared)")


def checked(folder: Path, name: str) -> tuple[DeviceWork, dict[str, Any]]:
    """Return the work of a recording that `make gpu` made, and what was measured beside it."""
    with tarfile.open(H200 / "checks/2/recordings-nvidia_h200-1.tar.gz") as packed:
        packed.extractall(folder, [m for m in packed if m.name.startswith(f"{name}/")], filter="data")
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
