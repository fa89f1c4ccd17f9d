"""What each operator takes of a step, in which kernels, how much it computes and moves, and what bounds it.

An operator is the innermost one that launched a kernel; on a CPU an operator has the time that it spends in no other.
Shapes come from the trace where it tells them; else from the one step that was counted. On a device an operator's
longest calls are then taken to be those that compute most; else its time is shared out among its shapes by their FLOPs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis.compute.arithmetic import precision_of
from dlprof.analysis.compute.peaks import device_peaks
from dlprof.analysis.compute.products import products, records
from dlprof.analysis.engine import Maybe, RankFacts, per_rank, within_rank
from dlprof.analysis.host.gaps import SMALL_NS
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.steps import Timing
from dlprof.errors import NotMeasured

# Operators by the names under which a step's FLOPs are counted.
_LIBRARY = r"^aten::(?:cudnn|mkldnn|miopen|thnn|slow|_slow|_mps)\w*conv\w*"

_ATTENTION = "_scaled_dot_product_flash_attention"

_COUNTED_AS = (
    (re.compile(_LIBRARY + "backward"), "aten::convolution_backward"),
    (re.compile(_LIBRARY), "aten::convolution"),
    (re.compile(rf"^aten::_flash_attention_backward|^aten::{_ATTENTION}_backward"), f"aten::{_ATTENTION}_backward"),
    (re.compile(r"^aten::_flash_attention_forward"), f"aten::{_ATTENTION}"),
)

MOST_ROWS = 150


@per_rank
def operators(
    has_device: bool,
    kernels_within: Maybe[NDArray[np.int64]],
    kernels: Maybe[pd.DataFrame],
    owners: Maybe[NDArray[np.int64]],
    spans: Maybe[pd.DataFrame],
    timing: Timing,
    kernel_kinds: Maybe[NDArray[Any]],
    own_times: Maybe[tuple[NDArray[np.int64], NDArray[np.float64]]],
    rank: RankFacts,
) -> pd.DataFrame:
    """Return what each operator takes in a mean steady traced step, by dtype and shape, the heaviest first.

    Columns: operator, dtype and shape ("": not told), calls (kernels on a device), ns, tensor_ns and float32_ns (in
    kernels that multiply on tensor cores, and in float32 without), flops and bytes (NaN: not known), bound ("compute",
    "memory", "launch" or "": not known), best_ns: what compute and memory allow at the least (NaN: not known), and
    shared (the operator met several shapes, and its time was shared out among them by FLOPs).
    Raises NotMeasured where no operator's work was traced.
    """
    frame = _with_counts(
        has_device,
        kernels_within,
        kernels,
        owners,
        spans,
        rank,
        _traced(timing, spans, has_device, kernels, kernels_within, owners, kernel_kinds, own_times),
    )
    _, peaks, bandwidth = device_peaks(rank.facts, rank.trace_facts)
    compute, memory = [], []
    matmul = rank.facts.get("matmul") or {}
    for row in records(frame):
        in_tf32: dict[str, Any] = {"allow_tf32": row["tf32_ns"] > 0, "cudnn_allow_tf32": row["tf32_ns"] > 0}
        precision = precision_of(row, in_tf32 if has_device else matmul)
        peak = peaks.get(precision, math.nan)
        compute.append(row["flops"] / peak * 1e9)
        memory.append(row["bytes"] / bandwidth * 1e9 if bandwidth else math.nan)
    frame["best_ns"] = np.fmax(compute, memory)
    bound = np.where(np.array(compute) >= np.array(memory), "compute", "memory")
    bound = np.where(np.isnan(compute) | np.isnan(memory), "", bound)
    short = frame["ns"].to_numpy() < SMALL_NS * frame["calls"].to_numpy()
    frame["bound"] = np.where(has_device & short, "launch", bound)
    return frame.head(MOST_ROWS).drop(columns=["tf32_ns", "times"])


def _traced(
    timing: Timing,
    spans: Maybe[pd.DataFrame],
    has_device: bool,
    kernels: Maybe[pd.DataFrame],
    kernels_within: Maybe[NDArray[np.int64]],
    owners: Maybe[NDArray[np.int64]],
    kernel_kinds: Maybe[NDArray[Any]],
    own_times: Maybe[tuple[NDArray[np.int64], NDArray[np.float64]]],
) -> pd.DataFrame:
    windows = timing.windows
    n = len(windows)
    if not n:
        raise NotMeasured("no steps were traced")
    events = spans.get()
    name = events["name"].cat.codes.to_numpy()
    if has_device:
        work = kernels.get()
        inside = kernels_within.get() >= 0
        row = work.index.to_numpy()[inside]
        owner, ns = owners.get()[row], work["dur_ns"].to_numpy(dtype=float)[inside]
        kinds = kernel_kinds.get()[inside]
        took = {kind: np.where(kinds == kind, ns, 0.0) for kind in ("tensor", "tf32", "float32")}
    else:
        owner, ns = own_times.get()
        row = owner
        took = dict.fromkeys(("tensor", "tf32", "float32"), np.zeros(len(ns)))
    if not len(row):
        raise NotMeasured("no operator's work was traced")
    known = owner >= 0
    # One number for what a row is grouped by; a kernel that no operator is known to have launched stands for itself.
    keys, groups = name[np.where(known, owner, row)].astype(np.int64), {}
    for column in ("dtype", "shape"):
        text = events[column].cat
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
    said["operator"] = events["name"].cat.categories.astype("str").to_numpy(dtype=object)[found]
    frame = pd.DataFrame({c: said[c] for c in ("operator", "dtype", "shape")} | {c: v / n for c, v in sums.items()})
    return frame.sort_values("ns", ascending=False, kind="stable", ignore_index=True)


def _first(owner: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return 1 where an operator stands for the first time, else 0."""
    first = np.zeros(len(owner))
    first[np.unique(owner, return_index=True)[1]] = 1
    return first


@within_rank
def owners(spans: pd.DataFrame, is_on_device: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return for each span of the device the row of the innermost operator that launched it, -1: none is known."""
    launch = spans["launch"].to_numpy()
    owner = np.full(len(spans), -1, dtype=np.int64)
    launches = host.is_kind(spans, "runtime") & (launch >= 0)
    called, by = [], []
    for rows, parent in nested(spans, is_on_device, "op", "runtime"):
        calls = launches[rows]
        called.append(launch[rows][calls])
        by.append(np.where(parent[calls] >= 0, rows[np.maximum(parent[calls], 0)], -1))
    if not called:
        return owner
    ids, ops = np.concatenate(called), np.concatenate(by)
    order = np.argsort(ids, kind="stable")
    ids, ops = ids[order], ops[order]
    works = np.flatnonzero(is_on_device & (launch >= 0))
    at = np.minimum(np.searchsorted(ids, launch[works]), len(ids) - 1)
    owner[works] = np.where(ids[at] == launch[works], ops[at], -1) if len(ids) else -1
    return owner


@within_rank
def own_times(
    spans: pd.DataFrame, timing: Timing, is_on_device: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return operators within the steady traced steps, as rows of the spans, and the time each spends in no other."""
    start, dur = spans["start_ns"].to_numpy(), spans["dur_ns"].to_numpy(dtype=float)
    rows, took = [], []
    windows = timing.host_windows
    for lane, parent in nested(spans, is_on_device, "op"):
        own = dur[lane].copy()
        inner = parent >= 0
        np.subtract.at(own, parent[inner], dur[lane][inner])
        keep = _inside(windows, start[lane])
        rows.append(lane[keep])
        took.append(np.maximum(own[keep], 0.0))
    return (np.concatenate(rows), np.concatenate(took)) if rows else (np.empty(0, np.int64), np.empty(0))


def nested(
    spans: pd.DataFrame, is_on_device: NDArray[np.bool_], *kinds: str
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Return for each thread the rows of its spans of some kinds, and the place among them of the one around each."""
    chosen = np.flatnonzero(host.is_kind(spans, *kinds) & ~is_on_device)
    lanes = spans["lane"].cat.codes.to_numpy()[chosen]
    start = spans["start_ns"].to_numpy()
    end = start + spans["dur_ns"].to_numpy()
    out = []
    for lane in np.unique(lanes):
        rows = chosen[lanes == lane]
        out.append((rows, host.parents(start[rows], end[rows])))
    return out


def _with_counts(
    has_device: bool,
    kernels_within: Maybe[NDArray[np.int64]],
    kernels: Maybe[pd.DataFrame],
    owners: Maybe[NDArray[np.int64]],
    spans: Maybe[pd.DataFrame],
    rank: RankFacts,
    frame: pd.DataFrame,
) -> pd.DataFrame:
    """Add FLOPs and bytes: by the shapes of the trace, or of the step that was counted."""
    told = rank.facts.get("flops") or {}
    met: dict[str, list[Mapping[str, Any]]] = {}
    for row in told.get("shapes") or []:
        met.setdefault(str(row.get("operator")), []).append(row)
    rows: list[dict[str, Any]] = []
    calls = _calls(has_device, kernels_within, kernels, owners, spans)
    for row in records(frame):
        if row["shape"]:
            flops, size = products(row["operator"], row["shape"], row["dtype"])
            rows.append({**row, "flops": flops * row["times"], "bytes": size * row["times"]})
            continue
        shapes = met.get(next((name for known, name in _COUNTED_AS if known.search(row["operator"])), row["operator"]))
        total = sum(float(s["flops"]) for s in shapes) if shapes else 0.0
        if not shapes or not total:
            rows.append({**row, "flops": math.nan, "bytes": math.nan})
            continue
        shares = _shares(shapes, calls.get(row["operator"], np.empty(0)))
        for n, shape in enumerate(shapes):
            share = float(shape["flops"]) / total if shares is None else shares[n]
            taken = {c: row[c] * share for c in ("ns", "tensor_ns", "tf32_ns", "float32_ns")}
            taken |= {"calls": float(shape["calls"]), "flops": float(shape["flops"]), "bytes": float(shape["bytes"])}
            rows.append({**row, **taken, "dtype": str(shape["dtype"]), "shape": str(shape["shape"])})
            rows[-1]["shared"] = len(shapes) > 1 and shares is None
    made = pd.DataFrame(
        [{"shared": False, **row} for row in rows], columns=[*frame.columns, "flops", "bytes", "shared"]
    )
    return made.sort_values("ns", ascending=False, kind="stable", ignore_index=True)


def _calls(
    has_device: bool,
    kernels_within: Maybe[NDArray[np.int64]],
    kernels: Maybe[pd.DataFrame],
    owners: Maybe[NDArray[np.int64]],
    spans: Maybe[pd.DataFrame],
) -> dict[str, NDArray[np.float64]]:
    """Return what each call of an operator took a device, ns, the longest first, by its name; none on a CPU."""
    if not has_device:
        return {}
    inside = kernels_within.get() >= 0
    work = kernels.get()[inside]
    owner = owners.get()[work.index.to_numpy()]
    known = owner >= 0
    calls, of = np.unique(owner[known], return_inverse=True)
    took = np.bincount(of, work["dur_ns"].to_numpy(dtype=float)[known])
    name = spans.get()["name"].array[calls]
    return {str(n): np.sort(took[name == n])[::-1] for n in pd.unique(name)}


def _shares(shapes: Sequence[Mapping[str, Any]], took: NDArray[np.float64]) -> list[float] | None:
    """Return which share of an operator's time its shapes have, where there are as many calls as were counted.

    What computes more takes longer, so the longest calls are of the shape with the most FLOPs.
    """
    counts = [int(shape["calls"]) for shape in shapes]
    steps, rest = divmod(len(took), max(sum(counts), 1))
    if rest or not steps or not took.sum():
        return None
    flops = [float(shape["flops"]) / max(n, 1) for shape, n in zip(shapes, counts, strict=True)]
    shares, at = [0.0] * len(shapes), 0
    for i in sorted(range(len(shapes)), key=lambda i: -flops[i]):
        shares[i] = float(took[at : at + counts[i] * steps].sum() / took.sum())
        at += counts[i] * steps
    return shares


def _inside(windows: NDArray[np.int64], start: NDArray[np.int64]) -> NDArray[np.bool_]:
    at = np.searchsorted(windows[:, 0], start, side="right") - 1
    inside: NDArray[np.bool_] = (at >= 0) & (start < windows[np.maximum(at, 0), 1])
    return inside
