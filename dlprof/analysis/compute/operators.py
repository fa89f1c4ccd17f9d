"""What each operator takes of a step, in which kernels, how much it computes and moves, and what bounds it.

An operator is the innermost one that launched a kernel; on a CPU an operator has the time that it spends in no other.
Shapes come from the trace where it has them; else from the one step that was counted. On a device an operator's longest
calls are then taken to be those that compute most; else its time is shared out among its shapes by their FLOPs.

What kernels and operators take, by name: the longest of all ranks, and those of a run to compare with another.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.compute.kernels import in_float32, kernels, named, outer_operators, shorter_kernels
from dlprof.analysis.compute.peaks import device_peaks, precision_of
from dlprof.analysis.compute.products import (
    EMULATED,
    SIXTEEN_BITS,
    TENSOR_SHARE,
    TF32_REACHED,
    misaligned,
    products,
    reached,
    saved_in_16_bits,
)
from dlprof.analysis.engine import RANK, Frame, Maybe, RankFacts, across_ranks, maybe, needs, per_rank, within_rank
from dlprof.analysis.host.gaps import SMALL_NS
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import has_device
from dlprof.analysis.timeline.host import is_on_device, on_training_thread
from dlprof.analysis.timeline.steady import standard_error, standard_errors
from dlprof.analysis.timeline.steps import Timing, timing
from dlprof.errors import NotMeasured
from dlprof.result import MOST_WORK
from dlprof.units import short

# Operators by the names under which a step's FLOPs are counted.
_LIBRARY = r"^aten::(?:cudnn|mkldnn|miopen|thnn|slow|_slow|_mps)\w*conv\w*"
_ATTENTION = "_scaled_dot_product_flash_attention"
_COUNTED_AS = (
    (re.compile(_LIBRARY + "backward"), "aten::convolution_backward"),
    (re.compile(_LIBRARY), "aten::convolution"),
    (re.compile(rf"^aten::_flash_attention_backward|^aten::{_ATTENTION}_backward"), f"aten::{_ATTENTION}_backward"),
    (re.compile(r"^aten::_flash_attention_forward"), f"aten::{_ATTENTION}"),
    (re.compile(r"^aten::_efficient_attention_backward"), "aten::_scaled_dot_product_efficient_attention_backward"),
    (re.compile(r"^aten::_efficient_attention_forward"), "aten::_scaled_dot_product_efficient_attention"),
)

MOST_ROWS = 150

# The column of the spans that each key of an operator's row is read from.
_KEYS = {"operator": "name", "dtype": "dtype", "shape": "shape"}


@within_rank
def operator_work(
    has_device: bool = needs(has_device),
    spans: Frame = needs(schema.SPANS),
    is_on_device: NDArray[np.bool_] = needs(is_on_device),
    outer_operators: NDArray[np.int64] = needs(outer_operators),
    timing: Timing = needs(timing),
    kernels: Maybe[Frame] = maybe(kernels),
) -> pd.DataFrame:
    """Return what operators do in the steady traced steps: on a device the rows of `kernels` there, on a CPU a row an
    operator with the time that it spends in no other: dur_ns, step, unit ("") and owner (itself), as in `kernels`.

    Raises NotMeasured where no operator's work was traced.
    """
    if has_device:
        work = kernels.get()
    else:
        rows = np.flatnonzero(host.is_kind(spans, "op") & ~is_on_device)
        dur = spans["dur_ns"].to_numpy(dtype=float)
        outer = outer_operators[rows]
        inner_ns = np.bincount(outer[outer >= 0], dur[rows][outer >= 0], len(spans))
        start = spans["start_ns"].to_numpy()[rows]
        step = np.where(
            iv.holds(timing.windows, start), np.searchsorted(timing.windows[:, 0], start, side="right") - 1, -1
        )
        own_ns = np.maximum(dur - inner_ns, 0.0)[rows]
        work = pd.DataFrame({"dur_ns": own_ns, "step": step, "unit": "", "owner": rows}, index=rows)
    work = work[work["step"] >= 0]
    if work.empty:
        raise NotMeasured("no operator's work was traced")
    return work


@per_rank
def operators(
    operator_work: Frame = needs(operator_work),
    spans: Frame = needs(schema.SPANS),
    timing: Timing = needs(timing),
    has_device: bool = needs(has_device),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return what each operator takes in a mean steady traced step, by dtype and shape, the heaviest first.

    Columns: operator, dtype and shape ("": not known), calls (kernels on a device), ns, tensor_ns and float32_ns (in
    kernels that multiply on tensor cores, and in float32 without), flops and bytes (NaN: not known), bound ("compute",
    "memory", "launch" or "": not known), and shared (the operator met several shapes, and its time was
    shared out among them by FLOPs). Raises NotMeasured where no operator's work was traced.
    """
    traced = _traced(operator_work, spans, len(timing.windows))
    # What each call of an operator took a device, ns, the longest first, by its name; none on a CPU.
    took = operator_work[(operator_work["owner"] >= 0) & has_device].groupby("owner")["dur_ns"].sum()
    calls = took.set_axis(pd.CategoricalIndex(spans["name"].array[took.index])).sort_values(ascending=False)
    frame = _with_counts(traced, calls, rank)
    _, peaks, bandwidth = device_peaks(rank.facts, rank.trace_facts)
    matmul = rank.facts.get("matmul") or {}
    peak = []
    for operator, dtype, cut in zip(frame["operator"], frame["dtype"], frame["tf32_ns"] > 0, strict=True):
        allowed = dict.fromkeys(("allow_tf32", "cudnn_allow_tf32"), cut) if has_device else matmul
        peak.append(peaks.get(precision_of(operator, dtype, allowed), math.nan))
    compute, memory = frame["flops"] / peak * 1e9, frame["bytes"] / (bandwidth or math.nan) * 1e9
    short = has_device & (frame["ns"] < SMALL_NS * frame["calls"])
    frame["bound"] = np.select([short, compute >= memory, compute < memory], ["launch", "compute", "memory"], "")
    return frame.head(MOST_ROWS).drop(columns=["times"])


def _traced(work: pd.DataFrame, spans: pd.DataFrame, steps: int) -> pd.DataFrame:
    """Add up the work by operator, dtype and shape, a mean step; times: how often the operator ran."""
    known = work["owner"].to_numpy() >= 0
    # A kernel that no operator is known to have launched has a row of its own.
    rows = np.where(known, work["owner"], work.index)
    codes = {key: spans[column].cat.codes.to_numpy()[rows] for key, column in _KEYS.items()}
    ns = work["dur_ns"].to_numpy(dtype=float)
    on_tensor, cut, plain = ((work["unit"] == unit).to_numpy(dtype=bool) for unit in ("tensor", "tf32", "float32"))
    in_32 = named(work, in_float32) if "name" in work else plain
    texts = {key: np.array(["", *spans[column].cat.categories.tolist()], dtype=object) for key, column in _KEYS.items()}
    keys = [np.where(known | (key == "operator"), codes[key], -1) + 1 for key in _KEYS]
    alike, place = np.unique(np.ravel_multi_index(keys, [len(texts[key]) for key in _KEYS]), return_inverse=True)
    parts = {
        "calls": 1.0,
        "times": ~work["owner"].duplicated().to_numpy(),
        "ns": ns,
        "tensor_ns": np.where(on_tensor | cut, ns, 0.0),
        "tf32_ns": np.where(cut & ~in_32, ns, 0.0),
        "float32_ns": np.where(in_32, ns, 0.0),
        "emulated_ns": np.where(in_32 & cut, ns, 0.0),
    }
    named_keys = zip(_KEYS, np.unravel_index(alike, [len(texts[key]) for key in _KEYS]), strict=True)
    sums = {key: texts[key][at] for key, at in named_keys}
    sums |= {
        part: np.bincount(place, np.broadcast_to(np.asarray(each), len(place)), len(alike)) / steps
        for part, each in parts.items()
    }
    return pd.DataFrame(sums).sort_values("ns", ascending=False, kind="stable", ignore_index=True)


def _with_counts(frame: pd.DataFrame, calls: pd.Series[float], rank: RankFacts) -> pd.DataFrame:
    """Add FLOPs and bytes: by the shapes of the trace, or of the step that was counted, a row each."""
    met: dict[str, list[Mapping[str, Any]]] = {}
    for shape in (rank.facts.get("flops") or {}).get("shapes") or []:
        met.setdefault(str(shape.get("operator")), []).append(shape)
    rows: list[dict[Any, Any]] = []
    for row in frame.to_dict("records"):
        name = next((counted for known, counted in _COUNTED_AS if known.search(row["operator"])), row["operator"])
        shapes = met.get(name, [])
        total = sum(float(s["flops"]) for s in shapes)
        if row["shape"] or not total:
            flops, moved = products(row["operator"], row["shape"], row["dtype"])
            rows.append({**row, "flops": flops * row["times"], "bytes": moved * row["times"], "shared": False})
            continue
        shares = _shares(shapes, calls[calls.index == row["operator"]].to_numpy())
        for n, shape in enumerate(shapes):
            share = float(shape["flops"]) / total if shares is None else shares[n]
            taken = {c: row[c] * share for c in ("ns", "tensor_ns", "tf32_ns", "float32_ns", "emulated_ns")}
            taken |= {c: float(shape[c]) for c in ("calls", "flops", "bytes")}
            key = {c: str(shape[c]) for c in ("dtype", "shape")}
            rows.append({**row, **taken, **key, "shared": len(shapes) > 1 and shares is None})
    return pd.DataFrame(rows).sort_values("ns", ascending=False, kind="stable", ignore_index=True)


def _shares(shapes: Sequence[Mapping[str, Any]], took: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Return which share of an operator's time its shapes have, where there are as many calls as were counted.

    What computes more takes longer, so the longest calls are of the shape with the most FLOPs.
    """
    counts = np.array([int(shape["calls"]) for shape in shapes])
    steps, rest = divmod(len(took), max(counts.sum(), 1))
    if rest or not steps or not took.sum():
        return None
    flops = np.array([float(shape["flops"]) for shape in shapes]) / np.maximum(counts, 1)
    heaviest = np.argsort(-flops, kind="stable")
    ends = np.cumsum(counts[heaviest]) * steps
    shares = np.zeros(len(shapes))
    shares[heaviest] = np.diff(np.append(0.0, np.cumsum(took))[ends], prepend=0.0) / took.sum()
    return shares


@per_rank
def tensor_cores(
    kernels: Frame = needs(kernels),
    timing: Timing = needs(timing),
    operators: Frame = needs(operators),
    shorter_kernels: Callable[[NDArray[np.bool_], float], float] = needs(shorter_kernels),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return one row, ns of a mean steady traced step: kernel_ns, tensor_ns (on tensor cores), tf32_ns (of these),
    float32_ns (products without them), unknown_ns (products on units that no name shows), and what the step would
    gain: fp32_saved_ns, were those in float32 in 16 bits, and tf32_saved_ns, were those in TF32; misaligned_ns and
    misaligned_saved_ns of products whose sizes do not suit tensor cores (NaN: peaks or sizes not known); aligned (1:
    sizes were looked at, 0: no shape is known).

    Only the names of kernels show these units, so tensor_ns is the least that it can be.
    Raises NotMeasured where the trace holds no work of a device.
    """
    took = kernels[kernels["step"] >= 0].groupby("unit", observed=False)["dur_ns"].sum() / len(timing.windows)
    _, peaks, bandwidth = device_peaks(rank.facts, rank.trace_facts)
    half = max((peaks.get(p, 0.0) for p in SIXTEEN_BITS), default=0.0)
    single, cut = peaks.get("float32", 0.0), peaks.get("tf32", 0.0)
    saved = saved_cut = math.nan
    if half:
        alone = operators.assign(float32_ns=operators["float32_ns"] - operators["emulated_ns"])
        saved = saved_in_16_bits(alone, half * reached(half, single), bandwidth, single)
        now = (cut * EMULATED, "emulated_ns"), (cut * TF32_REACHED, "tf32_ns")
        three, saved_cut = (saved_in_16_bits(operators, half * TENSOR_SHARE, bandwidth, *of) for of in now)
        saved += three
    steady, in_32, in_tf32 = kernels["step"].to_numpy() >= 0, named(kernels, in_float32), kernels["unit"] == "tf32"
    # Some kernels make float32 of three products in TF32.
    emulated = float(kernels["dur_ns"][steady & in_32 & in_tf32].sum()) / len(timing.windows)
    odd, odd_saved, looked = misaligned(operators, peaks, bandwidth)

    def gain(saved_ns: float, chosen: NDArray[np.bool_]) -> float:
        all_ns = float(kernels["dur_ns"][chosen & steady].sum()) / len(timing.windows)
        if math.isnan(saved_ns) or not all_ns:
            return saved_ns
        return shorter_kernels(chosen, max(0.0, 1 - saved_ns / all_ns))

    return pd.DataFrame(
        [
            {
                "kernel_ns": took.sum(),
                "tensor_ns": took["tensor"] + took["tf32"],
                "tf32_ns": took["tf32"] - emulated,
                "float32_ns": took["float32"] + emulated,
                "unknown_ns": took["unknown"],
                "fp32_saved_ns": gain(saved, in_32),
                "tf32_saved_ns": gain(saved_cut, in_tf32.to_numpy() & ~in_32),
                "misaligned_ns": odd,
                "misaligned_saved_ns": gain(odd_saved, host.is_one_of(kernels["unit"], "tensor", "unknown")),
                "aligned": int(looked),
            }
        ]
    )


MOST_KERNELS, MOST_OPERATORS = 40, 30

# Names of kernels that templates made can be thousands of letters long; a table shows less of them.
LONGEST_NAME, _LONGEST_SHOWN = 300, 200


@per_rank
def work(
    operator_work: Frame = needs(operator_work),
    spans: Frame = needs(schema.SPANS),
    has_device: bool = needs(has_device),
    timing: Timing = needs(timing),
) -> pd.DataFrame:
    """Return what operators and kernels take of a mean steady traced step: kind, name, calls, ns, noise_ns.

    And of a kernel its unit, what it multiplies on; of all that are of its kind total_ns, and how many names there are.
    On a device an operator has the kernels that it launched, each counts as a call; on a CPU the time that it spends in
    no other. noise_ns is the standard error over the traced steps, 0 of a single one. The heaviest first, MOST_WORK of
    each kind. Raises NotMeasured where no operator's work was traced.
    """
    launched = operator_work[operator_work["owner"] >= 0]
    found = [_by_name("operator", spans["name"].array[launched["owner"]], launched, len(timing.windows))]
    if has_device:
        found.append(_by_name("kernel", spans["name"].array[operator_work.index], operator_work, len(timing.windows)))
    return pd.concat(found, ignore_index=True)


@across_ranks
def heaviest_kernels(work: Frame = needs(work)) -> pd.DataFrame:
    """Return the kernels that take longest, the longest first: name, kind, calls and ns (a step, mean of the ranks),
    call_ns (of one), share (of the time in all kernels), most_on (a rank), most_ns (there), and known, how many there
    are on a rank. Raises NotMeasured where the trace holds no kernel.
    """
    kernels = work[work["kind"] == "kernel"]
    if kernels.empty:
        raise NotMeasured("no kernel ran in the traced steps")
    total = float(kernels.drop_duplicates("rank")["total_ns"].sum()) / kernels["rank"].nunique()
    heaviest = kernels.groupby("rank").head(MOST_KERNELS)
    heaviest = heaviest.assign(kind=heaviest["unit"], name=[short(name, _LONGEST_SHOWN) for name in heaviest["name"]])
    frame = _means(heaviest, ["name"], "kind", ["calls", "ns"]).head(MOST_KERNELS)
    call_ns, share = frame["ns"] / frame["calls"], frame["ns"] / total if total else 0.0
    return frame.assign(call_ns=call_ns, share=share, known=int(kernels["names"].max()))


@across_ranks
def heaviest_operators(operators: Frame = needs(operators)) -> pd.DataFrame:
    """Return the operators that take longest, by dtype and shape, the longest first.

    Columns: operator, dtype, shape ("": of several, among which its time was only shared out, or not known), shapes
    (how many), calls and ns (a step, mean of the ranks), flops and bytes (likewise; NaN: not known), rate (FLOP/s),
    bound ("": not known, or not the same everywhere), most_on (a rank), most_ns (there).
    """
    keys = ["operator", "dtype", "shape"]
    frame = operators.assign(shape=operators["shape"].mask(operators["shared"], ""), own_shape=operators["shape"])
    means = _means(frame, keys, "bound", ["calls", "ns", "flops", "bytes"]).head(MOST_OPERATORS)
    shapes = frame.groupby(keys)["own_shape"].nunique().rename("shapes")
    return means.merge(shapes, on=keys).assign(rate=means["flops"] / means["ns"].replace(0.0, np.nan) * 1e9)


def _means(frame: pd.DataFrame, keys: list[str], kind: str, numbers: list[str]) -> pd.DataFrame:
    """Return the rows of one key as the mean of the ranks, the longest first, with most_on and most_ns; NaN where it is
    not known of one of them, and of `kind` "" where it is not the same in all.
    """
    groups = frame.groupby(keys, sort=False)
    complete = groups[numbers].count().eq(groups.size(), axis=0)
    means = groups[numbers].sum().where(complete) / frame["rank"].nunique()
    means[kind] = groups[kind].first().where(groups[kind].nunique() == 1, "")
    by_rank = frame.groupby([*keys, "rank"], sort=False)["ns"].sum().reset_index("rank")
    most = by_rank.sort_values("ns", ascending=False, kind="stable")
    most = most[~most.index.duplicated()].rename(columns={"rank": "most_on", "ns": "most_ns"})
    return means.join(most).sort_values("ns", ascending=False, kind="stable").reset_index()


def of_ranks(ranks: Sequence[int]) -> tuple[str, dict[str, str]]:
    """Return in words which ranks a table is of, and its columns of the rank with most, where there are several."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}", {}
    return f"mean of {len(ranks)} ranks", {"most_on": "most on rank", "most_ns": "there_ns"}


def _by_name(kind: str, names: pd.Categorical, work: pd.DataFrame, n: int) -> pd.DataFrame:
    """Add up the work of n steps by name."""
    place, found = pd.factorize(names)
    ns = np.bincount(place * n + work["step"].to_numpy(), work["dur_ns"], len(found) * n).reshape(-1, n)
    heaviest = np.argsort(-ns.sum(axis=1), kind="stable")[:MOST_WORK]
    first = np.unique(place, return_index=True)[1][heaviest]
    return pd.DataFrame(
        {
            "kind": kind,
            "name": pd.Series([short(str(name), LONGEST_NAME) for name in found[heaviest]], dtype=object),
            "calls": np.bincount(place, minlength=len(found))[heaviest] / n,
            "ns": ns[heaviest].mean(axis=1),
            "noise_ns": standard_errors(ns[heaviest]),
            "unit": work["unit"].astype("str").to_numpy()[first],
            "total_ns": ns.sum() / n,
            "names": len(found),
        }
    )


# Steps and modules have figures of their own.
_NO_RANGES = ("ProfilerStep#", "dlprof::step ", "nn.Module: ")


@per_rank
def named_ranges(on_training_thread: Frame = needs(on_training_thread), timing: Timing = needs(timing)) -> pd.DataFrame:
    """Return what ranges of the training thread take of a mean steady traced step, by name.

    Columns: kind, name, calls, ns, noise_ns. With what lies in them; numbers in names are #. The heaviest first,
    MOST_WORK at most.
    """
    marks = on_training_thread[host.is_kind(on_training_thread, "annotation")]
    marks = marks[~host.is_named(marks, *_NO_RANGES)]
    texts = pd.Series(host.written(marks["name"])).str.replace(r"\d+", "#", regex=True).str.removeprefix("dlprof::")
    begin, end = timing.host_windows[:, 0], timing.host_windows[:, 1]
    rows = []
    for name, places in texts.groupby(texts, sort=False).indices.items():
        mine = marks.iloc[places]
        each = iv.within(host.cover(mine), begin, end).astype(float)
        calls = np.count_nonzero(iv.holds(iv.merge(timing.host_windows), mine["start_ns"].to_numpy()))
        if each.any():
            noise = standard_error(each)
            rows.append(("range", short(str(name), LONGEST_NAME), calls / max(len(each), 1), float(each.mean()), noise))
    frame = pd.DataFrame(rows, columns=["kind", "name", "calls", "ns", "noise_ns"])
    return frame.sort_values("ns", ascending=False, kind="stable", ignore_index=True).head(MOST_WORK)


@across_ranks
def work_means(work: Frame = needs(work), named_ranges: Maybe[Frame] = maybe(named_ranges)) -> pd.DataFrame:
    """Return the rows of `work` as the mean of the ranks, the heaviest first, MOST_WORK of each kind.

    What a rank does not have is nothing there. The noise is the mean of the ranks': what holds one of them up holds up
    all.
    """
    ranks, ranges = work["rank"].nunique(), named_ranges.or_none()
    work = work if ranges is None or ranges.empty else pd.concat([work, ranges], ignore_index=True)
    means = work.groupby(["kind", "name"])[["calls", "ns", "noise_ns"]].sum() / ranks
    means = means.reset_index().sort_values(["ns", "name"], ascending=[False, True], kind="stable")
    return means[means.groupby("kind").cumcount() < MOST_WORK].reset_index(drop=True)
