"""What a step spends on gradients of parameters that no optimizer has.

The recorder names the modules whose parameters want gradients and are in no optimizer (`untrained`). Where every
parameter of the optimizers has state, they are also the modules that have gradients and no state. Without those:

- AccumulateGrad, and changes of type and layout between it and the function that computed the gradient, are gone.
- That function leaves out one of its two products (of a Linear both have the same FLOPs), a bias's sum, or the kernels
  for a norm's weight and bias. An embedding's is gone.
- What runs before all that is trained needs no backward pass: a call of a module up to the first one inside that is
  trained, if the call's input wants no gradient either. The first module with parameters shows that: nothing is before
  an embedding, and a Linear or a convolution whose input wants none has as many FLOPs backward as forward, not twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.compute.cpu_work import is_product
from dlprof.analysis.compute.operators import operator_work
from dlprof.analysis.engine import RANK, Frame, Maybe, RankFacts, maybe, needs, per_rank
from dlprof.analysis.modules.frames import Frames, forward_rows, module_frames, module_rows
from dlprof.analysis.modules.tree import with_parents
from dlprof.analysis.timeline.device import device_work, has_device
from dlprof.analysis.timeline.host import is_on_device
from dlprof.analysis.timeline.paths import folded
from dlprof.analysis.timeline.replay import Kept
from dlprof.analysis.timeline.steps import Timing, timing
from dlprof.analysis.timeline.what_if import PAUSE_NS, WhatIf, what_if
from dlprof.errors import NotMeasured
from dlprof.read.kineto.patterns import ENGINE

Flags = NDArray[np.bool_]

# What lies between AccumulateGrad and the function that computed the gradient: for it, or for other gradients.
_LEADING, _BETWEEN = ("TBackward0", "ToCopyBackward0", "TransposeBackward0"), ("ViewBackward0", "UnsafeViewBackward0")

# A backward pass with more FLOPs than this, in forward passes, also computes the gradient of its input.
_OF_INPUT = 1.5

# What a forward pass without a graph leaves of the host's time in it: 0.70 to 0.81 on a CPU, of small Linears,
# convolutions and transformer blocks.
_WITHOUT_GRAPH = 0.75

# The share of an operator that computes the parameter's gradient, where its function also computes the input's.
_HALVES = ("aten::mul", "aten::convolution_backward")


@per_rank
def idle_gradients(
    operator_work: Frame = needs(operator_work),
    module_rows: Frame = needs(module_rows),
    module_frames: Frames = needs(module_frames),
    spans: Frame = needs(schema.SPANS),
    is_on_device: Flags = needs(is_on_device),
    timing: Timing = needs(timing),
    has_device: bool = needs(has_device),
    device_work: Maybe[Frame] = maybe(device_work),
    what_if: Maybe[WhatIf] = maybe(what_if),
    modules: Maybe[Frame] = maybe(schema.MODULES),
    held: Maybe[Frame] = maybe(schema.HELD),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return what gradients that no optimizer uses take of a mean steady traced step, by module, the most first.

    Columns: module (folded path of the outermost one around it in which no parameter is trained), path (folded),
    gone_ns (of kernels, on a CPU of operators), and in all rows the same gain_ns: how much shorter the mean steady step
    would be, on a device by a replay of the traced steps without them. No row where all are used. Raises NotMeasured
    where the trace names no module, or which parameters are in an optimizer was not recorded.
    """
    frames, tree = module_frames, modules.or_none()
    idle, trained = _own(frames.paths, held.or_none(), tree, rank)
    busy, spare = (set(with_parents(itertools.compress(frames.paths, of.tolist()))) for of in (trained, idle))
    gone, gives = _of_chains(spans, frames, idle)
    before = iv.EMPTY
    if tree is not None and not (tree["forward_flops"] < 0).any():
        unused = np.array([path in spare - busy for path in frames.paths], dtype=bool)
        before = _before(frames, idle & _on_no_gradient(frames, tree), idle, trained, unused)
        made, before = _made_in(before, spans, is_on_device, frames)
        gone |= made
    frame = module_rows["frame"].to_numpy()[operator_work.index]
    share = np.where(frame >= 0, gone[frame], False).astype(float)
    partly = (frame >= 0) & gives[frame] & (share == 0)
    share[partly] = _of_parameters(operator_work[partly], frame[partly], spans, frames)
    steps = max(len(timing.windows), 1)
    ns = operator_work["dur_ns"].to_numpy() * share / steps
    gain = float(ns.sum())
    if has_device and gain:
        host = _on_host(frames, gone, before)
        gain = _replayed(what_if, device_work.get(), pd.Series(share, operator_work.index), host, gain)
    module = np.where(frame >= 0, frames.module[frame], -1)
    taken = pd.Series(ns, module)[(module >= 0) & (share > 0)].groupby(level=0).sum()
    names = folded(dict(zip(frames.paths, frames.classes, strict=True)))
    rows = []
    for at, one in taken.items():
        path = frames.paths[int(str(at))]
        outer = [above for above in with_parents([path]) if above in spare - busy and above in names]
        rows.append((names[(outer or [path])[-1]], names[path], one))
    found = pd.DataFrame(rows, columns=["module", "path", "gone_ns"]).astype({"gone_ns": float})
    found = found.groupby(["module", "path"], as_index=False)["gone_ns"].sum().assign(gain_ns=gain)
    ordered: pd.DataFrame = found.sort_values("gone_ns", ascending=False, kind="stable", ignore_index=True)
    return ordered


def _own(
    paths: tuple[str, ...], held: pd.DataFrame | None, tree: pd.DataFrame | None, rank: RankFacts
) -> tuple[Flags, Flags]:
    """Return of which modules the own parameters are in no optimizer, and of which some may be in one."""
    told, own = rank.facts.get("untrained"), None
    known = set(told) if isinstance(told, list) else None
    if held is not None and len(held):
        wanted = held[(held["part"] == "parameter") & (held["trainable"] > 0)]
        kept, grown = (set(held.loc[held["part"] == part, "module"].astype(str)) for part in ("optimizer", "gradient"))
        own = set(wanted["module"].astype(str))
        trained = sum(int(one.get("parameters") or 0) for one in rank.facts.get("optimizers") or ())
        if kept and wanted.loc[wanted["module"].isin(kept), "tensors"].sum() == trained:
            known = (own & grown) - kept
    elif tree is not None:
        own = set(tree.loc[tree["parameters"] > 0, "path"].astype(str))
    if known is None:
        raise NotMeasured("which parameters are in an optimizer was not recorded")
    idle = np.array([not known.isdisjoint(with_parents([path])) for path in paths], dtype=bool)
    has = np.array([own is None or path in own for path in paths], dtype=bool)
    return idle & has, ~idle & has


def _has(of: Flags, module: NDArray[np.int64]) -> Flags:
    """Return of which modules something holds, by their places; of −1, none, it does not."""
    return (module >= 0) & of[module] if len(of) else np.zeros(len(module), dtype=bool)


def _of_chains(spans: pd.DataFrame, frames: Frames, idle: Flags) -> tuple[Flags, Flags]:
    """Return which functions of the backward pass only idle gradients need, and which computed one."""
    gone, gives = np.zeros(len(frames.row), dtype=bool), np.zeros(len(frames.row), dtype=bool)
    leads, between = (_named(spans, frames, *names) for names in (_LEADING, _BETWEEN))
    functions = np.flatnonzero(frames.functions)
    for place in np.flatnonzero(frames.accumulates[functions] & _has(idle, frames.module[functions])).tolist():
        at = functions[place]
        gone[at] = True
        for before in (int(functions[n]) for n in range(place - 1, -1, -1)):
            if frames.module[before] != frames.module[at]:
                break
            if not (leads[before] or between[before] or frames.accumulates[before]):
                gives[before] = True
                break
            gone[before] |= leads[before]
    return gone, gives


def _named(spans: pd.DataFrame, frames: Frames, *names: str) -> Flags:
    """Return which functions have one of these names."""
    of = spans["name"].cat
    chosen = np.array([str(name).removeprefix(ENGINE) in names for name in of.categories], dtype=bool)
    found: Flags = frames.functions & chosen[of.codes.to_numpy()[frames.row]]
    return found


def _on_no_gradient(frames: Frames, tree: pd.DataFrame) -> Flags:
    """Return whose input wants no gradient, as the step's FLOPs show."""
    flops = tree.assign(path=tree["path"].astype(str)).drop_duplicates("path").set_index("path").reindex(frames.paths)
    forward, backward = (flops[f"{part}_flops"].fillna(0.0).to_numpy() for part in ("forward", "backward"))
    looks_up = np.array([kind.startswith("Embedding") for kind in frames.classes], dtype=bool)
    return looks_up | ((forward > 0) & (backward <= _OF_INPUT * forward))


def _before(frames: Frames, starts: Flags, idle: Flags, trained: Flags, unused: Flags) -> iv.Intervals:
    """Return the time in calls whose first parameters are those of one of `starts`, up to the first that is trained."""
    own = np.flatnonzero(frames.calls & _has(idle | trained, frames.module))
    around = np.where(frames.parent >= 0, frames.module[frames.parent], -1)
    outermost = frames.calls & ((frames.parent < 0) | (_has(unused, frames.module) & ~_has(unused, around)))
    found = []
    for call in np.flatnonzero(outermost).tolist():
        first, inner, end = int(np.searchsorted(own, call)), call, frames.end[call]
        for at in own[first:]:  # down to the first one that has no other inside
            if frames.lane[at] != frames.lane[call] or frames.start[at] >= frames.end[inner]:
                break
            inner = at
        if not _has(starts, frames.module[[inner]])[0]:
            continue
        for at in own[first:]:
            if frames.lane[at] != frames.lane[call] or frames.start[at] >= end:
                break
            if trained[frames.module[at]]:
                end = frames.start[at]
        found.append((frames.start[call], end))
    return iv.merge(np.array(found, dtype=np.int64).reshape(-1, 2))


def _made_in(
    times: iv.Intervals, spans: pd.DataFrame, is_on_device: Flags, frames: Frames
) -> tuple[Flags, iv.Intervals]:
    """Return the functions of the backward pass whose operators ran in some time of the host, and their times."""
    found = np.zeros(len(frames.row), dtype=bool)
    functions = np.flatnonzero(frames.functions & ~frames.accumulates)
    made_by = forward_rows(spans, is_on_device, frames.row[functions])
    start = spans["start_ns"].to_numpy()[made_by]
    found[functions] = (made_by >= 0) & iv.holds(times, start)
    at = np.searchsorted(times[:, 0], start[found[functions]], side="right") - 1
    return found, times[np.unique(at)]


def _on_host(frames: Frames, gone: Flags, before: iv.Intervals) -> tuple[Kept, ...]:
    """Return the host's time in functions that are gone, and between two of them, and in calls without a graph."""
    functions = np.flatnonzero(frames.functions)
    start, end, mine = frames.start[functions], frames.end[functions].copy(), gone[functions]
    between = mine[:-1] & mine[1:] & (np.diff(frames.lane[functions]) == 0) & (start[1:] - end[:-1] < PAUSE_NS)
    end[:-1][between] = start[1:][between]
    cut = iv.union(start[mine], end[mine])
    return (cut, 0.0), (iv.subtract(before, cut), _WITHOUT_GRAPH)


def _of_parameters(
    work: pd.DataFrame, frame: NDArray[np.int64], spans: pd.DataFrame, frames: Frames
) -> NDArray[np.float64]:
    """Return the share of work for the gradients of parameters in functions that also compute those of their input."""
    owner = work["owner"].to_numpy()
    operators = np.where(owner >= 0, spans["name"].astype(object).to_numpy()[owner], "")
    products = np.array([is_product(name) for name in operators], dtype=bool)
    calls = pd.Series(owner[products]).groupby(frame[products]).nunique().reindex(frame).fillna(0).to_numpy()
    halves = (products & (calls > 1)) | np.isin(operators, _HALVES)
    whole = (products & (calls == 1) & ~halves) | (operators == "aten::sum")
    whole |= _named(spans, frames, "EmbeddingBackward0")[frame]
    if "name" in work:
        whole |= work["name"].astype(str).str.contains("GammaBeta").to_numpy()
    return np.where(whole, 1.0, np.where(halves, 0.5, 0.0))


def _replayed(
    what_if: Maybe[WhatIf], device_work: pd.DataFrame, share: pd.Series[float], host: Sequence[Kept], gain: float
) -> float:
    """Return the gain with these shares of kernels gone, and of the host's time left; `gain` if nothing is replayed."""
    try:
        whatif = what_if.get()
    except NotMeasured:
        return gain
    gone = share.reindex(device_work.index[whatif.replay.rows], fill_value=0.0).to_numpy()
    durations = np.where(gone == 1, -1, whatif.replay.durations * (1 - gone)).astype(np.int64)
    return whatif.gain_ns(durations=durations, other=host)
