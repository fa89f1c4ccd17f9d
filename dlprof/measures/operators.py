"""What each operator takes of a step, in which kernels, how much it computes and moves, and what bounds it.

An operator is the innermost one that launched a kernel; on a CPU an operator has the time that it spends in no other.
Shapes come from the trace where it tells them; else from the one step that was counted, and an operator's time is then
shared out among the shapes that it met by their FLOPs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.engine import RankData, per_rank
from dlprof.errors import NotMeasured
from dlprof.measures import device, host
from dlprof.measures.arithmetic import device_peaks, precision_of
from dlprof.measures.gaps import SMALL_NS
from dlprof.measures.steps import timing
from dlprof.units import short

# Kernels by the names that cuBLAS, cuDNN, CUTLASS and rocBLAS give them. Tensor cores show in the shape of one of their
# instructions (884, 1688, 16816), in hmma, wgmma and tensorop, in NVIDIA's newest (nvjet, xmma without simt) and in
# attention's own kernels; AMD's matrix cores (MI16x16) in 16 bits in rocBLAS's Cijk names.
_TENSOR = re.compile(
    r"tensorop|[hs]884|s?1688|16816|hmma|wgmma|gmma|nvjet|xmma|flash_(?:fwd|bwd)|fmha|Cijk_.*_(?:HB|HHS|HSS|BBS|BSS|BB)_"
)
_NO_TENSOR = re.compile(r"simt|ffma")
# Products in float32 without tensor cores, convolutions among them. Winograd's and FFT's multiply within other names.
_FLOAT32 = re.compile(
    r"(?<!fp16_)s(?:c?gemm|cudnn)|gcgemm|simt_sgemm|ffma|convolve_sgemm<float"
    r"|(?:dgrad|wgrad)\w*<float|gem(?:mSN|mk1|v)\w*<(?:int, int, )?float"
    r"|winogradForward\w*<float|winogradWgrad\w*<float|fft2d_\w+<float|f32f32_f32f32_f32.*simt|Cijk_.*_SB_"
)
_TF32 = re.compile(r"tf32|tensorop_s1688(?!.*(?:f16|bf16|h1688))")

# Operators by the names under which a step's FLOPs are counted.
_LIBRARY = r"^aten::(?:cudnn|mkldnn|miopen|thnn|slow|_slow|_mps)\w*conv\w*"
_ATTENTION = "_scaled_dot_product_flash_attention"
_COUNTED_AS = (
    (re.compile(_LIBRARY + "backward"), "aten::convolution_backward"),
    (re.compile(_LIBRARY), "aten::convolution"),
    (re.compile(rf"^aten::_flash_attention_backward|^aten::{_ATTENTION}_backward"), f"aten::{_ATTENTION}_backward"),
    (re.compile(r"^aten::_flash_attention_forward"), f"aten::{_ATTENTION}"),
)

# What a matrix product reaches of the tensor cores' peak where nothing is in its way: well tuned trainings of large
# models report 40 to 57 % over all of a step (Chowdhery et al. 2022, PaLM, table 3; Narayanan et al. 2021).
TENSOR_SHARE = 0.5

SIXTEEN_BITS = ("bfloat16", "float16")
MOST_ROWS = 150

# These calls take 5 µs or so; one that takes this long waits for room in the queue, or for its device.
_BLOCKING = tuple(f"{r}{c}" for r in ("cuda", "hip", "cu") for c in ("Launch", "Mem", "Stream", "Device", "Event"))
_BLOCKED_NS = 100_000


@per_rank
def operators(rank: RankData) -> pd.DataFrame:
    """Give what each operator takes in a mean steady traced step, by dtype and shape, the heaviest first.

    Columns: operator, dtype and shape ("": not told), calls (kernels on a device), ns, tensor_ns and float32_ns (in
    kernels that multiply on tensor cores, and in float32 without), flops and bytes (NaN: not known), bound ("compute",
    "memory", "launch" or "": not known), best_ns: what compute and memory allow at the least (NaN: not known), and
    shared (the operator met several shapes, and its time was shared out among them by FLOPs).
    Raises NotMeasured where no operator's work was traced.
    """
    frame = _traced(rank)
    frame = _with_counts(rank, frame)
    _, peaks, bandwidth = device_peaks(rank.facts, rank.trace_facts)
    compute, memory = [], []
    on_device = device.has_device(rank)
    matmul = rank.facts.get("matmul") or {}
    for row in _records(frame):
        in_tf32: dict[str, Any] = {"allow_tf32": row["tf32_ns"] > 0, "cudnn_allow_tf32": row["tf32_ns"] > 0}
        precision = precision_of(row, in_tf32 if on_device else matmul)
        peak = peaks.get(precision, math.nan)
        compute.append(row["flops"] / peak * 1e9)
        memory.append(row["bytes"] / bandwidth * 1e9 if bandwidth else math.nan)
    frame["best_ns"] = np.fmax(compute, memory)
    bound = np.where(np.array(compute) >= np.array(memory), "compute", "memory")
    bound = np.where(np.isnan(compute) | np.isnan(memory), "", bound)
    short = frame["ns"].to_numpy() < SMALL_NS * frame["calls"].to_numpy()
    frame["bound"] = np.where(on_device & short, "launch", bound)
    return frame.head(MOST_ROWS).drop(columns=["tf32_ns", "times"])


def _traced(rank: RankData) -> pd.DataFrame:
    windows = timing(rank).windows
    n = len(windows)
    if not n:
        raise NotMeasured("no steps were traced")
    spans = rank.table("spans")
    name = spans["name"].cat.codes.to_numpy()
    if device.has_device(rank):
        work = kernels(rank)
        inside = _inside(windows, work["start_ns"].to_numpy())
        row = work.index.to_numpy()[inside]
        owner, ns = rank.once(owners)[row], work["dur_ns"].to_numpy(dtype=float)[inside]
        kinds = rank.once(kernel_kinds)[inside]
        took = {kind: np.where(kinds == kind, ns, 0.0) for kind in ("tensor", "tf32", "float32")}
    else:
        owner, ns = rank.once(own_times)
        row = owner
        took = dict.fromkeys(("tensor", "tf32", "float32"), np.zeros(len(ns)))
    if not len(row):
        raise NotMeasured("no operator's work was traced")
    known = owner >= 0
    # One number for what a row is grouped by; a kernel that no operator is known to have launched stands for itself.
    keys, groups = name[np.where(known, owner, row)].astype(np.int64), {}
    for column in ("dtype", "shape"):
        text = spans[column].cat
        groups[column] = ["", *text.categories.astype("str")]
        keys = keys * len(groups[column]) + np.where(known, text.codes.to_numpy()[owner] + 1, 0)
    found, of = np.unique(keys, return_inverse=True)
    sums = {
        "calls": np.bincount(of).astype(float),
        # Of operators: one may launch several kernels.
        "times": np.bincount(of, _first(owner)),
        "ns": np.bincount(of, ns),
        "tensor_ns": np.bincount(of, took["tensor"] + took["tf32"]),
        "tf32_ns": np.bincount(of, took["tf32"]),
        "float32_ns": np.bincount(of, took["float32"]),
    }
    said = {}
    for column in ("shape", "dtype"):
        said[column] = np.array(groups[column], dtype=object)[found % len(groups[column])]
        found = found // len(groups[column])
    said["operator"] = spans["name"].cat.categories.astype("str").to_numpy(dtype=object)[found]
    frame = pd.DataFrame({c: said[c] for c in ("operator", "dtype", "shape")} | {c: v / n for c, v in sums.items()})
    return frame.sort_values("ns", ascending=False, kind="stable", ignore_index=True)


def _first(owner: NDArray[np.int64]) -> NDArray[np.float64]:
    """Give 1 where an operator stands for the first time, else 0."""
    first = np.zeros(len(owner))
    first[np.unique(owner, return_index=True)[1]] = 1
    return first


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    names = [str(c) for c in frame.columns]
    return [dict(zip(names, row, strict=True)) for row in zip(*(frame[c].tolist() for c in frame.columns), strict=True)]


def kernels(rank: RankData) -> pd.DataFrame:
    """Give name and times of the device's kernels that compute, with their row in the spans as index."""
    return rank.once(_kernels)


def _kernels(rank: RankData) -> pd.DataFrame:
    work = device.device_work(rank)
    return work[["name", "start_ns", "dur_ns"]][host.is_kind(work, "kernel")]


def kernel_kinds(rank: RankData) -> NDArray[Any]:
    """Tell of each of `kernels`: "tensor", "tf32" (tensor cores on float32), "float32" (products without them), ""."""
    names = kernels(rank)["name"].cat
    kinds = np.asarray([_kind(str(name)) for name in names.categories] or [""], dtype=object)
    return kinds[names.codes]


@lru_cache(1 << 14)  # the ranks of a job run the same kernels
def _kind(name: str) -> str:
    if _TENSOR.search(name) and not _NO_TENSOR.search(name):
        return "tf32" if _TF32.search(name) else "tensor"
    return "float32" if _FLOAT32.search(name) else ""


def _inside(windows: NDArray[np.int64], start: NDArray[np.int64]) -> NDArray[np.bool_]:
    at = np.searchsorted(windows[:, 0], start, side="right") - 1
    inside: NDArray[np.bool_] = (at >= 0) & (start < windows[np.maximum(at, 0), 1])
    return inside


def owners(rank: RankData) -> NDArray[np.int64]:
    """Give for each span of the device the row of the innermost operator that launched it, -1: none is known."""
    spans = rank.table("spans")
    launch = spans["launch"].to_numpy()
    owner = np.full(len(spans), -1, dtype=np.int64)
    launches = host.is_kind(spans, "runtime") & (launch >= 0)
    called, by = [], []
    for rows, parent in _nested(rank, "op", "runtime"):
        calls = launches[rows]
        called.append(launch[rows][calls])
        by.append(np.where(parent[calls] >= 0, rows[np.maximum(parent[calls], 0)], -1))
    if not called:
        return owner
    ids, ops = np.concatenate(called), np.concatenate(by)
    order = np.argsort(ids, kind="stable")
    ids, ops = ids[order], ops[order]
    works = np.flatnonzero(host.is_on_device(rank) & (launch >= 0))
    at = np.minimum(np.searchsorted(ids, launch[works]), len(ids) - 1)
    owner[works] = np.where(ids[at] == launch[works], ops[at], -1) if len(ids) else -1
    return owner


def own_times(rank: RankData) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Give the operators within the steady traced steps, as rows of the spans, and the time each spends in no other."""
    spans = rank.table("spans")
    start, dur = spans["start_ns"].to_numpy(), spans["dur_ns"].to_numpy(dtype=float)
    rows, took = [], []
    for lane, parent in _nested(rank, "op"):
        own = dur[lane].copy()
        inner = parent >= 0
        np.subtract.at(own, parent[inner], dur[lane][inner])
        keep = _inside(timing(rank).windows, start[lane])
        rows.append(lane[keep])
        took.append(np.maximum(own[keep], 0.0))
    return (np.concatenate(rows), np.concatenate(took)) if rows else (np.empty(0, np.int64), np.empty(0))


def _nested(rank: RankData, *kinds: str) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Give for each thread the rows of its spans of some kinds, and the place among them of the one around each."""
    spans = rank.table("spans")
    chosen = np.flatnonzero(host.is_kind(spans, *kinds) & ~host.is_on_device(rank))
    lanes = spans["lane"].cat.codes.to_numpy()[chosen]
    start = spans["start_ns"].to_numpy()
    end = start + spans["dur_ns"].to_numpy()
    out = []
    for lane in np.unique(lanes):
        rows = chosen[lanes == lane]
        out.append((rows, parents(start[rows], end[rows])))
    return out


def parents(start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
    """Give of nested intervals, in order of start and the longer first, the one around each; -1: none is.

    One pass for each level of nesting: calls are a few levels deep, and there are many of them.
    """
    parent = np.full(len(start), -1, dtype=np.int64)
    todo = np.arange(len(start))
    while len(todo):
        begin = start[todo]
        reach = np.maximum.accumulate(end[todo])
        outer = np.concatenate(([True], begin[1:] >= reach[:-1]))
        around = todo[outer][np.cumsum(outer) - 1]
        todo, around = todo[~outer], around[~outer]
        parent[todo] = around
    return parent


def _with_counts(rank: RankData, frame: pd.DataFrame) -> pd.DataFrame:
    """Add FLOPs and bytes: by the shapes of the trace, or of the step that was counted."""
    told = rank.facts.get("flops") or {}
    met: dict[str, list[Mapping[str, Any]]] = {}
    for row in told.get("shapes") or []:
        met.setdefault(str(row.get("operator")), []).append(row)
    rows: list[dict[str, Any]] = []
    for row in _records(frame):
        if row["shape"]:
            flops, size = products(row["operator"], row["shape"], row["dtype"])
            rows.append({**row, "flops": flops * row["times"], "bytes": size * row["times"]})
            continue
        shapes = met.get(next((name for known, name in _COUNTED_AS if known.search(row["operator"])), row["operator"]))
        total = sum(float(s["flops"]) for s in shapes) if shapes else 0.0
        if not shapes or not total:
            rows.append({**row, "flops": math.nan, "bytes": math.nan})
            continue
        for shape in shapes:
            share = float(shape["flops"]) / total
            taken = {c: row[c] * share for c in ("ns", "tensor_ns", "tf32_ns", "float32_ns")}
            taken |= {"calls": float(shape["calls"]), "flops": float(shape["flops"]), "bytes": float(shape["bytes"])}
            rows.append({**row, **taken, "dtype": str(shape["dtype"]), "shape": str(shape["shape"])})
            rows[-1]["shared"] = len(shapes) > 1
    made = pd.DataFrame(
        [{"shared": False, **row} for row in rows], columns=[*frame.columns, "flops", "bytes", "shared"]
    )
    return made.sort_values("ns", ascending=False, kind="stable", ignore_index=True)


_WIDTH = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def sizes(shape: str) -> list[list[int]]:
    """Give the dimensions of the tensors that a shape's text tells."""
    return [[int(n) for n in tensor.split("x")] for tensor in shape.split()]


def products(operator: str, shape: str, dtype: str) -> tuple[float, float]:
    """Give FLOPs and bytes of one matrix product by the shapes of its operands; NaN for what they do not tell.

    Two operations a multiplication; each operand read once and the product written once. A convolution's output
    depends on its stride, which no trace tells.
    """
    name = operator.removeprefix("aten::")
    operands = sizes(shape)[-2:]
    if name not in ("mm", "addmm", "bmm", "baddbmm") or len(operands) < 2:
        return math.nan, math.nan
    a, b = operands
    if a[-1] != b[-2]:
        return math.nan, math.nan
    batch = math.prod(a[:-2])
    m, k, n = a[-2], a[-1], b[-1]
    return 2.0 * batch * m * k * n, float(batch * (m * k + k * n + m * n) * _WIDTH.get(dtype, math.nan))


# What travels of the kernels: those that take longest.
MOST_KERNELS = 40

# What a kernel's kind says of it.
UNITS = {"tensor": "tensor cores", "tf32": "tensor cores, TF32", "float32": "float32, no tensor cores"}


@per_rank
def kernel_times(rank: RankData) -> pd.DataFrame:
    """Give the kernels that take longest: name, kind, calls and ns of a mean steady traced step; of all of them
    total_ns, and kernels, how many names there are.

    Raises NotMeasured where the trace holds no kernel.
    """
    device.device_sets(rank)
    windows = timing(rank).windows
    work = kernels(rank)
    inside = _inside(windows, work["start_ns"].to_numpy())
    names = work["name"].cat
    codes = names.codes.to_numpy()[inside]
    dur = work["dur_ns"].to_numpy(dtype=float)[inside]
    if not len(codes):
        raise NotMeasured("no kernel ran in the traced steps")
    calls = np.bincount(codes, minlength=len(names.categories))
    ns = np.bincount(codes, weights=dur, minlength=len(names.categories))
    chosen = np.argsort(-ns, kind="stable")
    chosen = chosen[calls[chosen] > 0][:MOST_KERNELS]  # a kernel may take no time at all
    texts = names.categories[chosen].tolist()
    return pd.DataFrame(
        {
            "name": [short(text, 200) for text in texts],
            "kind": [_kind(text) for text in texts],
            "calls": calls[chosen] / len(windows),
            "ns": ns[chosen] / len(windows),
            "total_ns": float(dur.sum()) / len(windows),
            "kernels": int((calls > 0).sum()),
        }
    )


@per_rank
def tensor_cores(rank: RankData) -> pd.DataFrame:
    """Give one row, ns of a mean steady traced step: kernel_ns, tensor_ns (on tensor cores), tf32_ns (of these),
    float32_ns (products without them), and what the step would gain: fp32_saved_ns, were those in 16 bits,
    misaligned_ns and misaligned_saved_ns of 16-bit products with sizes off a multiple of 8 (NaN: peaks not known, or
    sizes), aligned (1: such sizes were looked at, 0: the run tells none), noise_ns of float32_ns and tensor_ns.

    Raises NotMeasured where the trace holds no work of a device.
    """
    device.device_sets(rank)
    windows = timing(rank).windows
    work = kernels(rank)
    start, dur = work["start_ns"].to_numpy(), work["dur_ns"].to_numpy(dtype=float)
    inside = _inside(windows, start)
    kinds = rank.once(kernel_kinds)
    n = len(windows)
    took = {k: float(dur[inside & (kinds == k)].sum()) / n for k in ("tensor", "tf32", "float32")}
    frame = rank.once(operators.function)
    _, peaks, bandwidth = device_peaks(rank.facts, rank.trace_facts)
    half = max((peaks.get(p, 0.0) for p in SIXTEEN_BITS), default=0.0) * TENSOR_SHARE
    saved = _saved(frame, half, bandwidth, peaks.get("float32", 0.0)) if half else math.nan
    odd, odd_saved, looked = _misaligned(frame, half, bandwidth)
    most = _most(rank, n)
    return pd.DataFrame(
        {
            "kernel_ns": [float(dur[inside].sum()) / n],
            "tensor_ns": [took["tensor"] + took["tf32"]],
            "tf32_ns": [took["tf32"]],
            "float32_ns": [took["float32"]],
            "fp32_saved_ns": [saved if math.isnan(saved) else min(saved, most)],
            "misaligned_ns": [odd],
            "misaligned_saved_ns": [odd_saved if math.isnan(odd_saved) else min(odd_saved, most)],
            "aligned": [int(looked)],
        }
    )


def _saved(frame: pd.DataFrame, half: float, bandwidth: float, single: float) -> float:
    """Give what the products in float32 take more than they would on tensor cores in 16 bits, ns.

    By their FLOPs and bytes where these are known; else as if they ran at the peak of float32 now.
    """
    saved = 0.0
    for row in _records(frame[frame["float32_ns"] > 0]):
        if math.isnan(row["flops"]):
            saved += row["float32_ns"] * max(0.0, 1 - single / half)
        else:
            bytes_ns = row["bytes"] / 2 / bandwidth * 1e9 if bandwidth and not math.isnan(row["bytes"]) else 0.0
            saved += max(0.0, row["float32_ns"] - max(row["flops"] / half * 1e9, bytes_ns))
    return saved


def _misaligned(frame: pd.DataFrame, half: float, bandwidth: float) -> tuple[float, float, bool]:
    """Give the ns of 16-bit products of sizes off a multiple of 8, what they take too long, and whether any was told.

    The sizes that count are those of features: what stands last in a product's second operand, and the channels of a
    convolution. The number of rows (batch × length) may be any.
    """
    rows = [r for r in _records(frame) if r["dtype"] in SIXTEEN_BITS and r["shape"]]
    odd = {size for row in rows for size in features(row["operator"], row["shape"]) if size % 8}
    wrong = [r for r in rows if odd & {d for tensor in sizes(r["shape"])[-2:] for d in tensor[-2:]}] if odd else []
    wrong = [r for r in wrong if r["operator"].endswith("mm") or odd & set(features(r["operator"], r["shape"]))]
    right = [r for r in rows if r not in wrong and r["flops"] > 0 and r["ns"] > 0]
    # What well-shaped products of this run reach is the best guess for the others, where each has its own time.
    right = [r for r in right if not r["shared"]]
    if sum(r["ns"] for r in right) > 0.2 * sum(r["ns"] for r in rows):
        half = max(half * 0.2, sum(r["flops"] for r in right) / sum(r["ns"] for r in right) * 1e9)
    took = sum(r["ns"] for r in wrong)
    if not half or any(math.isnan(r["flops"]) for r in wrong):
        return took, math.nan if wrong else 0.0, bool(rows)
    saved = 0.0
    for r in wrong:
        bytes_ns = r["bytes"] / bandwidth * 1e9 if bandwidth else 0.0
        saved += max(0.0, r["ns"] - max(r["flops"] / half * 1e9, bytes_ns, SMALL_NS / 2 * r["calls"]))
    return took, saved, bool(rows)


def features(operator: str, shape: str) -> list[int]:
    """Give the sizes of features in the shapes of a product: its columns, or a convolution's channels."""
    tensors = sizes(shape)
    if operator.endswith("mm"):
        return tensors[-1][-1:]
    # Pictures come with three channels, whatever one would like.
    return [c for t in tensors[-2:] for c in t[1:2] if c > 4]


def _most(rank: RankData, n: int) -> float:
    """Bound what shorter kernels can take off a step: the device may work no sooner than the host has launched.

    Each kernel begins when the one before has ended, as far apart as it was, and not before its launch. Where the host
    waits for its device, what follows is launched so much sooner.
    """
    work = device.device_work(rank)
    launched = device.launch_start(rank, work["launch"].to_numpy())
    windows = timing(rank).windows
    inside = _inside(windows, work["start_ns"].to_numpy())
    start = work["start_ns"].to_numpy()[inside]
    end = start + work["dur_ns"].to_numpy()[inside]
    launched = np.where(launched[inside] > start, start, launched[inside])
    if not len(start):
        return 0.0
    # With every kernel of no length at all, the device would be done when the last was launched.
    ahead = float(np.maximum(end - np.maximum.accumulate(launched), 0)[-1])
    return min(float((end - start).sum()) / n, ahead / n + _waits(rank, work) / n)


def _waits(rank: RankData, work: pd.DataFrame) -> float:
    """Add up what the host waits for its device in calls of the runtime, ns: all but the copying itself."""
    spans = rank.table("spans")
    dur = spans["dur_ns"].to_numpy()
    chosen = np.flatnonzero(host.is_kind(spans, "runtime") & (dur > _BLOCKED_NS) & host.is_named(spans, *_BLOCKING))
    chosen = chosen[_inside(timing(rank).windows, spans["start_ns"].to_numpy()[chosen])]
    copies = work[host.is_kind(work, "copy")]
    copied = copies.loc[np.isin(copies["launch"].to_numpy(), spans["launch"].to_numpy()[chosen]), "dur_ns"].sum()
    return max(0.0, float(dur[chosen].sum()) - float(copied))
