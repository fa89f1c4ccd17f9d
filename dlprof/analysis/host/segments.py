"""The training thread's time between the phases of the step, and the loops over parameters or samples in it.

What the backward pass does besides its own: hooks that read values of gradients, and autograd's anomaly mode.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Frame, needs, within_rank
from dlprof.analysis.modules.frames import forward_rows
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import Launches, launches
from dlprof.analysis.timeline.host import is_on_device, on_training_thread
from dlprof.analysis.timeline.steps import Timing, timing
from dlprof.analysis.timeline.what_if import WhatIf, what_if
from dlprof.read.kineto.patterns import ENGINE

# An operator that is called so often between two phases of one step is called in a loop: a model has tens of
# parameters, and a loss or a metric is a few operators.
LEAST_TURNS = 16

_MODULE = "nn.Module: "

# Instead of a phase: operators around the functions of the backward pass.
HOOK = "hook"

# After these phases the called operators need gradients: those of the loss, or of the model's input.
IN_GRAPH = ("fetch", "forward")


@dataclass(frozen=True)
class Loop:
    """Operators that are called again and again between the same two phases: after which, which, and when."""

    after: str
    names: tuple[str, ...]  # the most frequent first
    inner: frozenset[str]  # these, and all that they call
    turns: float  # a step: how often most of them are called
    times: iv.Intervals
    behind: iv.Intervals  # when the functions of the backward pass run that they have made

    @property
    def whole(self) -> iv.Intervals:
        """All of the host's time that goes with the loop."""
        return iv.merge(self.times, self.behind)


@dataclass(frozen=True)
class Segments:
    """The training thread's time between the phases of the replayed steps, by the phase before it, and loops in it."""

    after: dict[str, iv.Intervals]
    loops: tuple[Loop, ...]

    @property
    def looping(self) -> iv.Intervals:
        """All time in loops."""
        return iv.merge(*(loop.whole for loop in self.loops))


@within_rank
def model_calls(what_if: WhatIf = needs(what_if), on_training_thread: Frame = needs(on_training_thread)) -> float:
    """Return how often one model is called for each backward pass of the replayed steps; 1 where that is not known."""
    thread, (first, last) = on_training_thread, what_if.replay.host
    named = [name for name in thread["name"].cat.categories if str(name).startswith(_MODULE)]
    start, code = thread["start_ns"].to_numpy(), thread["name"].cat.codes.to_numpy()
    inside = (start >= first) & (start < last)
    passes = start[inside & host.is_named(thread, "dlprof::forward")]
    back = np.count_nonzero(inside & host.is_named(thread, "dlprof::backward"))
    modules = np.flatnonzero(host.is_one_of(thread["name"], *named))
    # The outermost module of each pass is the first that begins in it.
    outer = np.searchsorted(start[modules], passes)
    outer = modules[outer[outer < len(modules)]]
    return float(np.bincount(code[outer]).max()) / back if len(outer) and back else 1.0


@within_rank
def segments(
    what_if: WhatIf = needs(what_if),
    on_training_thread: Frame = needs(on_training_thread),
    launches: Launches = needs(launches),
    spans: Frame = needs(schema.SPANS),
    is_on_device: NDArray[np.bool_] = needs(is_on_device),
) -> Segments:
    """Divide what lies between the phases of the replayed steps by the phase before it, and find the loops in it: those
    that launch work, as other ones are no shorter with one call for all.

    Where forward and backward are not marked (traces of others) nothing is known to lie between them.
    """
    if not what_if.marked:
        return Segments({}, ())
    phases = {p: times for p, times in what_if.phases.items() if p != "rest"}
    phases["fetch"] = what_if.host.fetch
    rest = what_if.phases["rest"]
    ends = np.concatenate([times[:, 1] for times in phases.values()])
    kinds = np.repeat(np.arange(len(phases)), [len(times) for times in phases.values()])
    order = np.argsort(ends, kind="stable")
    place = np.searchsorted(ends[order], rest[:, 0], side="right") - 1
    # The replayed steps begin where the step before them ended: with its optimizer, or with a loader that is fetched.
    before = np.where(place >= 0, kinds[order][np.maximum(place, 0)] if len(order) else 0, -1)
    names = [*phases]
    after = {name: rest[before == i] for i, name in enumerate(names)}
    first = "optimizer"
    after[first] = iv.merge(after.get(first, iv.EMPTY), rest[before == -1])
    steps, called = what_if.replay.steps, launches.called[what_if.replay.rows]
    loops = [
        loop
        for loop in _loops(on_training_thread, after, steps)
        if np.count_nonzero(iv.holds(loop.times, called)) >= loop.turns * steps / 2
    ]
    if any(loop.after in IN_GRAPH for loop in loops):
        loops = _with_backward(loops, spans, is_on_device)
    return Segments(after, tuple(loops))


def _with_backward(loops: list[Loop], spans: pd.DataFrame, is_on_device: NDArray[np.bool_]) -> list[Loop]:
    """Return loops with the functions of the backward pass that their operators have made."""
    named = [name for name in spans["name"].cat.categories if str(name).startswith(ENGINE)]
    rows = np.flatnonzero(host.is_one_of(spans["name"], *named) & ~is_on_device)
    made_by = forward_rows(spans, is_on_device, rows)
    start, known = spans["start_ns"].to_numpy(), made_by >= 0
    end = start + spans["dur_ns"].to_numpy()
    found = []
    for loop in loops:
        mine = rows[known][iv.holds(loop.times, start[made_by[known]])] if loop.after in IN_GRAPH else rows[:0]
        found.append(replace(loop, behind=iv.union(start[mine], end[mine])))
    return found


def _loops(thread: pd.DataFrame, after: dict[str, iv.Intervals], steps: int) -> list[Loop]:
    """Find the loops in the segments: stretches in which the same operators are called LEAST_TURNS times or more."""
    is_op = host.is_kind(thread, "op")
    ops = host.outermost(thread[["name", "start_ns", "dur_ns"]][is_op])
    start = ops["start_ns"].to_numpy()
    end = start + ops["dur_ns"].to_numpy()
    code = ops["name"].cat.codes.to_numpy()
    names = ops["name"].cat.categories
    found: list[Loop] = []
    for phase, times in after.items():
        mine = iv.holds(times, start)
        segment = np.searchsorted(times[:, 0], start[mine], side="right")
        calls = pd.DataFrame({"segment": segment, "code": code[mine], "start": start[mine], "end": end[mine]})
        each = calls.groupby(["segment", "code"]).agg(n=("start", "size"), start=("start", "min"), end=("end", "max"))
        often = each[each["n"] >= LEAST_TURNS].reset_index()
        stretches = iv.union(often["start"].to_numpy(), often["end"].to_numpy())
        at = np.searchsorted(stretches[:, 0], often["start"].to_numpy(), side="right") - 1
        by_names: dict[tuple[str, ...], list[tuple[int, int]]] = {}
        for place, inside in often.groupby(at):
            ordered = inside.sort_values(["n", "start"], ascending=[False, True])
            by_names.setdefault(tuple(names[c] for c in ordered["code"]), []).append(
                (int(str(place)), int(inside["n"].median()))
            )
        for which, places in by_names.items():
            of_it = stretches[[place for place, _ in places]]
            inner = frozenset(thread["name"][is_op & iv.holds(of_it, thread["start_ns"].to_numpy())].unique())
            found.append(Loop(phase, which, inner, sum(n for _, n in places) / steps, of_it, iv.EMPTY))
    return found


# What anomaly mode asks of every result of the backward pass (`evaluate_function` in torch/csrc/autograd/engine.cpp);
# nothing else in torch calls the second one.
ANOMALY = ("aten::isnan", "aten::_is_any_true")


_READS = ("aten::item", "aten::is_nonzero")


# How the engine sums gradients of one tensor.
_SUMS = ("aten::add", "aten::add_")


@within_rank
def hook_loops(
    timing: Timing = needs(timing),
    spans: Frame = needs(schema.SPANS),
    is_on_device: NDArray[np.bool_] = needs(is_on_device),
) -> list[Loop]:
    """Return the operators that are called around the functions of the backward pass, where each turn reads a value:
    those of anomaly mode, and of the script's hooks.
    """
    steps = iv.merge(timing.host_windows)
    ours = ~is_on_device & host.is_kind(spans, "op") & iv.holds(steps, spans["start_ns"].to_numpy())
    engine = ours & host.is_named(spans, ENGINE)
    lanes = spans["lane"].cat.codes.to_numpy()
    found = []
    for lane in np.unique(lanes[engine]).tolist():
        columns = ["name", "start_ns", "dur_ns"]
        functions = host.outermost(spans.loc[engine & (lanes == lane), columns])
        calls = host.outermost(spans.loc[ours & ~engine & (lanes == lane), columns])
        begins = functions["start_ns"].to_numpy()
        ends = begins + functions["dur_ns"].to_numpy()
        at = np.searchsorted(begins, calls["start_ns"].to_numpy(), side="right") - 1
        besides = host.is_named(calls, "aten::") & ~host.is_one_of(calls["name"], *_SUMS)
        besides &= (at >= 0) & (calls["start_ns"].to_numpy() < ends[np.maximum(at, 0)])
        found.append(calls[besides].assign(turn=at[besides], lane=lane))
    if not found:
        return []
    calls = pd.concat(found, ignore_index=True)
    calls["end_ns"] = calls["start_ns"] + calls["dur_ns"]
    calls["checks"], calls["reads"] = host.is_one_of(calls["name"], ANOMALY[1]), host.is_one_of(calls["name"], *_READS)
    turns = calls.groupby(["lane", "turn"]).agg(
        start=("start_ns", "min"), end=("end_ns", "max"), checks=("checks", "any"), reads=("reads", "any")
    )
    loops = []
    for mine in (turns[turns["checks"]], turns[turns["reads"] & ~turns["checks"]]):
        count = len(mine) / max(len(timing.windows), 1)
        if count >= LEAST_TURNS:
            inside = pd.MultiIndex.from_frame(calls[["lane", "turn"]]).isin(mine.index)
            names = tuple(str(name) for name in calls["name"][inside].astype(str).value_counts().index)
            times = iv.union(mine["start"].to_numpy(), mine["end"].to_numpy())
            loops.append(Loop(HOOK, names, frozenset(names), count, times, iv.EMPTY))
    return loops
