"""What the host did while its device had nothing to do, and what cheaper launching would give.

The training thread's time between the phases of the step, and the loops over parameters or samples in it. What the
backward pass does besides its own: hooks that read values of gradients, and autograd's anomaly mode.
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Frame, Maybe, maybe, needs, per_rank, within_rank
from dlprof.analysis.modules.frames import forward_rows
from dlprof.analysis.step.partition import partition
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import NOT_IN_STEPS, Launches, device_work, launches
from dlprof.analysis.timeline.host import in_calls, is_on_device, on_training_thread
from dlprof.analysis.timeline.steps import Timing, launched_within, timing
from dlprof.analysis.timeline.what_if import PAUSE_NS, WhatIf, what_if
from dlprof.errors import NotMeasured
from dlprof.read.kineto.patterns import ENGINE
from dlprof.units import digits

# An operator that is called so often between two phases of one step is called in a loop: a model has tens of
# parameters, and a loss or a metric is a few operators.
LEAST_TURNS = 16

_MODULE = "nn.Module: "

# Instead of a phase: operators around the functions of the backward pass.
HOOK = "hook"

# After these phases the called operators need gradients: those of the loss, or of the model's input.
IN_GRAPH = ("fetch", "forward")


class Loop(Struct, frozen=True):
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


class Segments(Struct, frozen=True):
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
    if not (calls["checks"] | calls["reads"]).any():
        return []
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


# Launching an operator from Python takes a host some 10 µs: a shorter kernel cannot hide the next one's launch.
SMALL_NS = 10_000

# A forward, a backward and an optimizer's step are some ten kernels in the smallest of models.
FEWEST_KERNELS = 8

# What ends so shortly before a time of silence ends with what called it.
_SAME_END_NS = 200_000

MOST_ROWS = 10
MOST_WORK = 12
PYTHON = "Python, between operators"

# Frames of Python in a trace with stacks that are not the script's: installed packages, Python's own library, builtins.
_NOT_OWN = re.compile(r"site-packages|dist-packages|/lib/python\d|^<|^torch/|^nn\.Module:|^(?:threading|runpy)\.py")

_PHASES = {
    "forward": ("dlprof::forward", "DistributedDataParallel.forward"),
    "backward": ("dlprof::backward",),
    "optimizer": ("dlprof::optimizer", "Optimizer.step#", "Optimizer.zero_grad#"),
}

# The categories of the step in which the host is late; and what is shorter with a host that is not: it waits for its
# data while the device works.
HOST = ("host", "optimizer_host")

SAVES_FROM = ("input_wait", *HOST, "launch_latency")


@within_rank
def host_gaps(partition: dict[str, iv.Intervals] = needs(partition)) -> iv.Intervals:
    """Return when, in the steady traced steps, nothing is computed because the host is late."""
    return iv.merge(*(partition.get(category, iv.EMPTY) for category in HOST))


@within_rank
def python_gaps(
    host_gaps: iv.Intervals = needs(host_gaps),
    in_calls: iv.Intervals = needs(in_calls),
    spans: Frame = needs(schema.SPANS),
) -> iv.Intervals:
    """Return when the host is late and no thread is in an operator or a runtime call for longer than PAUSE_NS."""
    start = spans["start_ns"].to_numpy()
    whole = np.array([[start[0], (start + spans["dur_ns"].to_numpy()).max()]], dtype=np.int64)
    pauses = iv.subtract(whole, in_calls)
    return iv.intersect(host_gaps, pauses[pauses[:, 1] - pauses[:, 0] > PAUSE_NS])


@per_rank
def host_work(
    on_training_thread: Frame = needs(on_training_thread),
    timing: Timing = needs(timing),
    host_gaps: iv.Intervals = needs(host_gaps),
) -> pd.DataFrame:
    """Split the host's part of the steady traced steps by what ran on the training thread: name, phase, ns a step.

    `name` is the outermost operator or runtime call, or PYTHON where none ran; `phase` the range around it (forward,
    backward, optimizer), "" for none. Longest first.
    """
    calls = on_training_thread[["name", "start_ns", "dur_ns"]]
    calls = host.outermost(calls[host.is_kind(on_training_thread, "op", "runtime", "communication")])
    start = calls["start_ns"].to_numpy()
    end = start + calls["dur_ns"].to_numpy()
    code, names = calls["name"].cat.codes.to_numpy(), [*calls["name"].cat.categories, PYTHON]
    frames, left = [], host_gaps
    thread = on_training_thread
    closures = host.cover(thread, host.is_named(thread, host.CLOSURE))
    for phase in (*_PHASES, ""):
        when = iv.intersect(left, host.cover(thread, host.is_named(thread, *_PHASES[phase]))) if phase else left
        when = iv.subtract(when, closures) if phase == "optimizer" else when
        left = iv.subtract(left, when)
        # The outermost calls do not overlap, so what each has of the idle time adds up.
        took = np.bincount(code, weights=iv.within(when, start, end), minlength=len(names))
        took[-1] = iv.total(when) - took.sum()
        frames.append(pd.DataFrame({"name": names, "phase": phase, "ns": took / max(len(timing.windows), 1)}))
    work = pd.concat(frames, ignore_index=True)
    work = work[work["ns"] > 0].sort_values("ns", ascending=False, kind="stable", ignore_index=True)
    return work.head(MOST_WORK).astype({"name": "str", "phase": "str"})


@per_rank
def own_python(
    on_training_thread: Frame = needs(on_training_thread),
    python_gaps: iv.Intervals = needs(python_gaps),
    timing: Timing = needs(timing),
) -> pd.DataFrame:
    """List the script's own functions that the device waited for, where the trace has Python's stacks: function, ns.

    `ns` is the time a steady traced step in which the host was late, in no operator, and in this function or in a
    library that it had called. The longest first; empty where the trace has no stacks.
    """
    frames = on_training_thread[["name", "start_ns", "dur_ns"]][host.is_kind(on_training_thread, "python")]
    frames = frames.assign(name=frames["name"].cat.remove_unused_categories())
    names = frames["name"].cat.categories.tolist()
    own = np.array([".py(" in name and not _NOT_OWN.search(name) for name in names], dtype=bool)
    frames = frames[own[frames["name"].cat.codes.to_numpy()]]
    start = frames["start_ns"].to_numpy()
    end = start + frames["dur_ns"].to_numpy()
    inside = iv.within(python_gaps, start, end).astype(float)
    around = host.parents(start, end)
    within = around >= 0
    np.subtract.at(inside, around[within], inside[within])
    took = np.bincount(frames["name"].cat.codes.to_numpy(), np.maximum(inside, 0.0), len(names))
    functions = pd.DataFrame({"function": names, "ns": took / max(len(timing.windows), 1)})
    functions = functions[functions["ns"] > 0].sort_values("ns", ascending=False, kind="stable", ignore_index=True)
    return functions.head(MOST_ROWS).astype({"function": "str"})


@per_rank
def longest_silence(
    on_training_thread: Frame = needs(on_training_thread),
    timing: Timing = needs(timing),
    steps: Maybe[Frame] = maybe(schema.STEPS),
) -> pd.DataFrame:
    """Return the longest time of a step in which the training thread calls nothing: one row, ns, after, before, loader.

    `ns`: of the mean traced step, at the place where most such times are: `after` and `before` are what ends and begins
    around it, numbers as #. `loader`: whether the trace shows what fetches batches, which is then not what waits there.
    Without rows where no step has such a time, or the step log says what each is made of.
    """
    empty = pd.DataFrame({"ns": [], "after": [], "before": [], "loader": []})
    shown = on_training_thread[~host.is_kind(on_training_thread, "python")]
    called = host.cover(shown, ~host.is_kind(shown, "annotation"))
    silent = iv.intersect(iv.subtract(timing.host_windows, called), iv.merge(timing.host_windows))
    if steps or timing.unit != "step" or not len(silent) or not len(called):
        return empty
    took, step = silent[:, 1] - silent[:, 0], np.searchsorted(timing.host_windows[:, 0], silent[:, 0], side="right") - 1
    order = np.lexsort((-took, step))
    longest = order[np.diff(step[order], prepend=-1) != 0]
    start = shown["start_ns"].to_numpy()
    names = host.written(shown["name"])
    before = np.minimum(np.searchsorted(start, silent[longest, 1]), len(shown) - 1)
    marks = np.flatnonzero(host.is_kind(shown, "annotation"))
    marks = marks[np.argsort((start + shown["dur_ns"].to_numpy())[marks], kind="stable")]
    ends = (start + shown["dur_ns"].to_numpy())[marks]
    places = []
    for (begin, until), following in zip(silent[longest].tolist(), before.tolist(), strict=True):
        # Of the ranges that end there, the outermost, which began first.
        ended = marks[np.searchsorted(ends, begin - _SAME_END_NS) : np.searchsorted(ends, until)]
        ended = ended[start[ended] < begin]
        ahead = names[ended[np.argmin(start[ended])]] if len(ended) else ""
        places.append((re.sub(r"\d+", "#", str(ahead)), re.sub(r"\d+", "#", str(names[following]))))
    by_place = pd.DataFrame(places, columns=["after", "before"]).assign(ns=took[longest] / len(timing.host_windows))
    summed: pd.DataFrame = by_place.groupby(["after", "before"])[["ns"]].sum().sort_values("ns", ascending=False)
    fetched = bool(host.is_kind(shown, "fetch").any())
    found: pd.DataFrame = summed.head(1).reset_index().assign(loader=fetched)[list(empty)]
    return found


@per_rank
def launch_means(
    device_work: Frame = needs(device_work),
    launched_within: Maybe[NDArray[np.int64]] = maybe(launched_within),
    timing: Timing = needs(timing),
) -> pd.DataFrame:
    """Count the device's kernels in a steady traced step (one row): kernels, mean kernel_ns."""
    kernels = host.is_kind(device_work, "kernel")
    dur = device_work["dur_ns"].to_numpy()[kernels]
    inside = np.count_nonzero(kernels & (launched_within.get() >= 0)) if len(device_work) else 0
    count = inside / max(len(timing.windows), 1)
    return pd.DataFrame({"kernels": [count], "kernel_ns": [float(dur.mean()) if len(dur) else 0.0]})


def check_launches(launch_means: pd.DataFrame) -> None:
    """Raise NotMeasured where the device has so little to do that no step of training is to be seen.

    So it is while something compiles or starts up, or in a part of a trace: that the device idles is true then, and
    what a step without that would be is not known.
    """
    kernels = float(launch_means["kernels"].max())
    if not kernels and launch_means["kernel_ns"].any():
        raise NotMeasured(NOT_IN_STEPS)
    if not kernels:
        raise NotMeasured("the trace holds no kernels (record ProfilerActivity.CUDA; with nsys, --trace=cuda)")
    if kernels < FEWEST_KERNELS:
        few = f"{digits(kernels)} kernel{'' if kernels == 1 else 's'} a step"
        raise NotMeasured(f"the device ran {few}: that is no training, but compiling, starting up or a part of a trace")
