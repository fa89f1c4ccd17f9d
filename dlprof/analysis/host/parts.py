"""What a host does while its device waits for it, divided by what the script does there; each part with its own gain.

A host that is too slow for its device has one total of lost time. Its parts are loops over parameters or modules
between the phases, waits for the device, the optimizer's step, what else the script does between the phases, and what
is left: the launches of the forward and backward pass. The traced steps are replayed without each of them, and without
all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Maybe, RankFacts, per_rank, within_rank
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.launches import Launches
from dlprof.analysis.timeline.replay import Kept
from dlprof.analysis.timeline.what_if import GRAPH_GAP_NS, WhatIf
from dlprof.errors import NotMeasured

# An operator that is called so often between two phases of one step is called in a loop: a model has tens of
# parameters, and a loss or a metric is a few operators.
LEAST_TURNS = 16

# What is left of a loop over parameters where one call takes them all: a foreach function launches a kernel for some
# tens of tensors, and its kernels move the same bytes without the start of each. An upper bound: of 180 norms, read one
# by one, on an H200 no more than this was left.
LOOP_LEFT = 0.05

LOOP, WAITS, OPTIMIZER, BETWEEN, LAUNCHES, ALL = "loop", "waits", "optimizer", "between", "launches", "all"

# The phases that a segment may follow.
_MARKS = {"fetch": "fetch", "forward": "forward", "backward": "backward", "optimizer": "optimizer"}
MOST_NAMES = 4


@dataclass(frozen=True)
class Loop:
    """Operators that are called again and again between the same two phases: after which, which, and when."""

    after: str
    names: tuple[str, ...]  # the most frequent first
    turns: float  # of the most frequent, a step
    times: iv.Intervals


@dataclass(frozen=True)
class Segments:
    """The training thread's time between the phases of the replayed steps, by the phase before it, and loops in it."""

    after: dict[str, iv.Intervals]
    loops: tuple[Loop, ...]

    @property
    def looping(self) -> iv.Intervals:
        """All time in loops."""
        return iv.merge(*(loop.times for loop in self.loops))


@within_rank
def segments(what_if: WhatIf, on_training_thread: pd.DataFrame) -> Segments:
    """Divide what lies between the phases of the replayed steps by the phase before it, and find the loops in it."""
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
    return Segments(after, tuple(_loops(on_training_thread, after, what_if.replay.steps)))


def _loops(thread: pd.DataFrame, after: dict[str, iv.Intervals], steps: int) -> list[Loop]:
    """Find the loops in the segments: stretches in which the same operators are called LEAST_TURNS times or more."""
    ops = host.outermost(thread[["name", "start_ns", "dur_ns"]][host.is_kind(thread, "op")])
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
            by_names.setdefault(tuple(names[c] for c in ordered["code"]), []).append((int(place), int(inside["n"].max())))
        for which, places in by_names.items():
            of_it = stretches[[place for place, _ in places]]
            found.append(Loop(phase, which, sum(n for _, n in places) / steps, of_it))
    return found


@per_rank
def host_parts(
    what_if: WhatIf,
    segments: Segments,
    device_work: pd.DataFrame,
    launches: Launches,
    in_optimizer: Maybe[iv.Intervals],
    fused_gain_ns: Maybe[float],
    sync_waits: pd.DataFrame,
    rank: RankFacts,
) -> pd.DataFrame:
    """Return what the host does in a mean steady step, a row for each part: part, after, names, turns, waits, kernels,
    host_ns, gain_ns, file, line, function, source.

    `part`: one of LOOP, WAITS (outside of loops), OPTIMIZER, BETWEEN, LAUNCHES (of forward and backward), and ALL.
    `after`: the phase before a loop. `names`: its operators. `turns`, `waits` and `kernels` a step. `host_ns`: how long
    the host is in it, its waits included, at the pace of the steps that were not traced. `gain_ns`: how much shorter
    the mean steady step would be without it (a loop: with LOOP_LEFT of it; the optimizer: fused; LAUNCHES: as a captured
    graph; ALL: all of these). `line` and what is beside it: of the script, where it was recorded (0: not). Raises
    NotMeasured where the trace cannot be replayed.
    """
    replay = what_if.replay
    called = launches.called[replay.rows]
    begins = np.array([wait.begin for wait in replay.waits], dtype=np.int64)
    own = _waits_of_script(what_if, sync_waits)
    optimizer = iv.intersect(in_optimizer.or_none() if in_optimizer else iv.EMPTY, what_if.phases["optimizer"])
    looping = segments.looping
    phases = iv.merge(what_if.phases["forward"], what_if.phases["backward"])
    in_calls = iv.intersect(phases, what_if.host.calls)
    after_loss = [times for phase, times in segments.after.items() if phase != "forward"]
    python = iv.intersect(what_if.host.python, what_if.phases["rest"])
    between = iv.subtract(iv.merge(python, *(iv.intersect(t, what_if.host.calls) for t in after_loss)), looping)
    rows = []

    def without(times: iv.Intervals) -> NDArray[np.int64]:
        return np.where(iv.holds(times, called), -1, replay.durations)

    def row(part: str, times: iv.Intervals, gain: float, loop: Loop | None = None) -> None:
        inside = float(what_if.host_ns(times))
        kernels, waits = np.count_nonzero(iv.holds(times, called)), np.count_nonzero(iv.holds(times, begins[own]))
        of = (loop.after, " ".join(loop.names[:MOST_NAMES]), loop.turns) if loop else ("", "", 0.0)
        line = _line_of(rank, loop) if loop else _NO_LINE
        rows.append((part, *of, waits / replay.steps, kernels / replay.steps, inside, gain, *line))

    everything: list[Kept] = []
    for loop in segments.loops:
        free = np.flatnonzero(own & iv.holds(loop.times, begins)).tolist()
        gain = what_if.gain_ns(durations=without(loop.times), other=((loop.times, LOOP_LEFT),), free=free)
        row(LOOP, loop.times, gain, loop)
        everything.append((loop.times, LOOP_LEFT))
    waiting = np.flatnonzero(own & ~iv.holds(looping, begins))
    spans = iv.union(begins[waiting], np.array([w.end for w in replay.waits], dtype=np.int64)[waiting])
    row(WAITS, spans, what_if.gain_ns(free=waiting.tolist()) if len(waiting) else 0.0)
    if len(between):
        row(BETWEEN, between, what_if.gain_ns(other=((between, 0.0),)))
        everything.append((between, 0.0))
    if len(optimizer):
        gain = fused_gain_ns.or_none()
        row(OPTIMIZER, optimizer, gain or 0.0)
    if len(in_calls):
        row(LAUNCHES, in_calls, what_if.gain_ns(other=((in_calls, 0.0),), gap_ns=GRAPH_GAP_NS))
        everything.append((in_calls, 0.0))
    if len(optimizer) and (gain := fused_gain_ns.or_none()):
        everything.append((iv.intersect(optimizer, what_if.host.calls), 0.0))
    total = what_if.gain_ns(
        durations=without(looping), other=everything, free=np.flatnonzero(own).tolist(), gap_ns=GRAPH_GAP_NS
    )
    row(ALL, iv.merge(what_if.host.calls, what_if.host.python), total)
    columns = ["part", "after", "names", "turns", "waits", "kernels", "host_ns", "gain_ns", *_LINE]
    return pd.DataFrame(rows, columns=columns)


_LINE = ("file", "line", "function", "source")
_NO_LINE = ("", 0, "", "")


def _waits_of_script(what_if: WhatIf, sync_waits: pd.DataFrame) -> NDArray[np.bool_]:
    """Return which of the replay's waits the script asks for: not those for room in the queue, nor for batches that are
    copied to the device, which have rules of their own.
    """
    waits = what_if.replay.waits
    begins = np.array([wait.begin for wait in waits], dtype=np.int64)
    copying = sync_waits[sync_waits["copied"] != ""]
    of_copies = iv.union(copying["start_ns"].to_numpy(), copying["end_ns"].to_numpy())
    full = np.array([wait.from_start for wait in waits], dtype=bool)
    return ~full & ~iv.holds(of_copies, begins)


def _line_of(rank: RankFacts, loop: Loop) -> tuple[str, int, str, str]:
    """Return the recorded line of the script that calls the operators of a loop most often."""
    lines = (rank.facts.get("flops") or {}).get("lines") or []
    names = {name for name in loop.names}
    best, most = _NO_LINE, 0
    for one in lines:
        if one.get("after") != loop.after:
            continue
        calls = sum(n for name, n in (one.get("operators") or {}).items() if name in names)
        if calls > most:
            best, most = tuple(one.get(key, default) for key, default in zip(_LINE, _NO_LINE, strict=True)), calls
    return best  # type: ignore[return-value]
