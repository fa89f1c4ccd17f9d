"""What a host does while its device waits for it, divided by what the script does there; each part with its own gain.

A host that is too slow for its device has one total of lost time. Its parts are loops over parameters or modules
between the phases, waits for the device, the optimizer's step, what else the script does between the phases, and what
is left: the launches of the forward and backward pass. The traced steps are replayed without each of them, and without
all of them. On a CPU the script's lines between the phases and the host's Python there overlap, and count once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from msgspec import Struct
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis import settings
from dlprof.analysis.communication.collectives import waits
from dlprof.analysis.compute.optimizer import fused_gain_ns
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, across_ranks, by_rank, maybe, needs, per_rank
from dlprof.analysis.estimate import LEAST_SHARE
from dlprof.analysis.host.gaps import (
    ANOMALY,
    HOOK,
    HOST,
    Loop,
    Segments,
    check_launches,
    hook_loops,
    host_work,
    launch_means,
    model_calls,
    segments,
)
from dlprof.analysis.host.waiting import sync_waits
from dlprof.analysis.memory.copies import freeing_ns
from dlprof.analysis.source.line_shares import busiest, lines_between
from dlprof.analysis.source.patches import Call
from dlprof.analysis.step.breakdown import breakdown, part, part_least
from dlprof.analysis.step.partition import in_optimizer
from dlprof.analysis.step.savings import own_time, saving
from dlprof.analysis.timeline.device import LEAST_KERNEL_NS, Launches, launches
from dlprof.analysis.timeline.replay import Kept
from dlprof.analysis.timeline.steps import check_marked, mean_step_ns, step_means
from dlprof.analysis.timeline.what_if import GRAPH_GAP_NS, REPRODUCED, WhatIf, replayed_steps, what_if
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.result import Place
from dlprof.units import duration

# What is left on the host of a loop over parameters where one call takes them all: a foreach function launches a kernel
# for some tens of tensors. An upper bound: of 180 norms, read one by one, on an H200 no more than this was left.
LOOP_LEFT = 0.05

# What the host still does for captured passes: modules are called, inputs copied, two graphs launched (0.5 ms of a step
# on the slower host of an H100, for a small model).
_GRAPHS_NS = 300_000

# A model that is called so often for one backward pass might as well be called once.
MANY_CALLS = 4

# Columns of `stacks.hottest` that order callers before the functions they call: a caller is seen at least as often.
_CALLED = ["function", "file", "total", "alone"]

# Where so many of the stacks between the phases, and this share, are in one function, the loop is there.
_FEW, _MOSTLY = 3, 1 / 3

LOOP, WAITS, OPTIMIZER, BETWEEN, LAUNCHES, ALL = "loop", "waits", "optimizer", "between", "launches", "all"

MOST_NAMES = 4


@per_rank
def host_parts(
    what_if: WhatIf = needs(what_if),
    segments: Segments = needs(segments),
    hook_loops: list[Loop] = needs(hook_loops),
    model_calls: float = needs(model_calls),
    launches: Launches = needs(launches),
    in_optimizer: Maybe[iv.Intervals] = maybe(in_optimizer),
    fused_gain_ns: Maybe[float] = maybe(fused_gain_ns),
    sync_waits: Frame = needs(sync_waits),
    replayed_steps: Frame = needs(replayed_steps),
    freeing_ns: Maybe[tuple[float, float]] = maybe(freeing_ns),
) -> pd.DataFrame:
    """Return what the host does in a mean steady step, a row for each part.

    Columns: part, after, names, inner, turns, waits, kernels, host_ns, gain_ns, in_graph.

    `part`: one of LOOP, WAITS (outside of loops), OPTIMIZER, BETWEEN, LAUNCHES (of forward and backward), and ALL.
    `after`: the phase before a loop. `names`: its operators, and `inner`: these and all that they call. `turns`,
    `waits` and `kernels` a step. `in_graph`: 1 for a loop that the backward pass goes through again, which is then part
    of it. `host_ns`: how long the host is in it, its waits included, at the pace of the steps that were not traced.
    `gain_ns`: how much shorter the mean steady step would be without it (a loop: all at once; the optimizer:
    fused; LAUNCHES: as a captured graph, or, of a model that is called MANY_CALLS times or more, as those of one call;
    ALL: all of these). Raises NotMeasured where the trace cannot be replayed, or
    its replay is not as long as the untraced steps.
    """
    check = replayed_steps.iloc[0]
    if abs(check["off"]) > REPRODUCED:
        raise NotMeasured(
            f"the traced steps, replayed at the pace of the others, take {duration(check['replay_ns'])} instead of"
            f" {duration(check['step_ns'])}: what the host costs is not known"
        )
    replay = what_if.replay
    called = launches.called[replay.rows]
    begins = np.array([wait.begin for wait in replay.waits], dtype=np.int64)
    stepping, fused = in_optimizer.or_none(), fused_gain_ns.or_none() or 0.0
    optimizer = iv.EMPTY if stepping is None else iv.intersect(stepping, iv.merge(*what_if.phases.values()))
    looping = iv.merge(segments.looping, *(loop.times for loop in hook_loops))
    own = _waits_of_script(what_if, sync_waits, looping)
    python = iv.intersect(what_if.host.python, what_if.phases["rest"])
    if what_if.marked:
        in_calls = iv.intersect(iv.merge(what_if.phases["forward"], what_if.phases["backward"]), what_if.host.calls)
        after_loss = [times for phase, times in segments.after.items() if phase != "forward"]
        between = iv.merge(python, *(iv.intersect(times, what_if.host.calls) for times in after_loss))
    else:
        in_calls, between = iv.subtract(what_if.host.calls, optimizer), python
    in_calls = iv.subtract(in_calls, looping)
    # What an operator that copies a batch does there is the copy's.
    between = iv.subtract(iv.subtract(between, looping), _requested(sync_waits, copying=True))
    rows = []

    def at_once(times: iv.Intervals) -> NDArray[np.int64]:
        """Return the durations with kernels that move the same bytes without the start of each."""
        long = replay.durations > 2 * LEAST_KERNEL_NS
        left = np.where(long, replay.durations - LEAST_KERNEL_NS, -1)
        return np.where(iv.holds(times, called), left, replay.durations)

    def row(part: str, times: iv.Intervals, gain: float, loop: Loop | None = None) -> None:
        inside = float(what_if.host_ns(times))
        kernels, waits = np.count_nonzero(iv.holds(times, called)), np.count_nonzero(iv.holds(times, begins[own]))
        of = ("", "", "", 0.0)
        if loop:
            of = (loop.after, " ".join(loop.names[:MOST_NAMES]), " ".join(sorted(loop.inner)), loop.turns)
        in_graph = int(loop is not None and len(loop.behind) > 0)
        rows.append((part, *of, waits / replay.steps, kernels / replay.steps, inside, gain, in_graph))

    everything: list[Kept] = []
    for loop in (*segments.loops, *hook_loops):
        if ANOMALY[1] in loop.inner:  # of no line of the script's: see the rule anomaly_mode
            everything.append((loop.times, 0.0))
            continue
        free = np.flatnonzero(own & iv.holds(loop.whole, begins)).tolist()
        gain = what_if.gain_ns(durations=at_once(loop.whole), other=((loop.whole, LOOP_LEFT),), free=free)
        row(LOOP, loop.whole, gain, loop)
        everything.append((loop.whole, LOOP_LEFT))
    waiting = np.flatnonzero(own & ~iv.holds(looping, begins))
    spans = iv.union(begins[waiting], np.array([w.end for w in replay.waits], dtype=np.int64)[waiting])
    row(WAITS, spans, what_if.gain_ns(free=waiting.tolist()) if len(waiting) else 0.0)
    if len(between):
        # What frees the batches of other processes is no Python of the script's.
        stays = min((freeing_ns.or_none() or (0.0,))[0] * replay.steps / iv.total(between), 1.0)
        row(BETWEEN, between, what_if.gain_ns(other=((between, stays),)))
        everything.append((between, stays))
    if len(optimizer):
        row(OPTIMIZER, optimizer, fused)
        if fused:
            everything.append((iv.intersect(optimizer, what_if.host.calls), 0.0))
    if len(in_calls):
        if model_calls >= MANY_CALLS:
            # The kernels of one call have more to do, from a part in so many of the time up to all of it.
            passes = iv.subtract(iv.merge(what_if.phases["forward"], what_if.phases["backward"]), looping)
            mine = iv.holds(passes, called)
            of_one = np.where(mine & (np.cumsum(mine) % round(model_calls) > 0), -1, replay.durations)
            free = np.flatnonzero(iv.holds(passes, begins)).tolist()
            row(LAUNCHES, passes, what_if.gain_ns(durations=of_one, other=((passes, 1 / model_calls),), free=free))
        else:
            left = min(_GRAPHS_NS / max(what_if.host_ns(in_calls), 1.0), 1.0)
            row(LAUNCHES, in_calls, what_if.gain_ns(other=((in_calls, left),), gap_ns=GRAPH_GAP_NS))
        everything.append((in_calls, 0.0))
    total = what_if.gain_ns(
        durations=at_once(looping), other=everything, free=np.flatnonzero(own).tolist(), gap_ns=GRAPH_GAP_NS
    )
    row(ALL, iv.merge(what_if.host.calls, what_if.host.python), total)
    columns = ["part", "after", "names", "inner", "turns", "waits", "kernels", "host_ns", "gain_ns", "in_graph"]
    return pd.DataFrame(rows, columns=columns)


def gains_of(host_parts: pd.DataFrame, part: str, waits: Maybe[pd.DataFrame]) -> dict[int, float]:
    """Return what each rank gains without a part, ns of the mean steady step.

    Where all ranks' traces are here (`waits` is known), what all of them gain: one that has more makes the others wait,
    which is the business of `straggler`.
    """
    mine = host_parts[host_parts["part"] == part].groupby("rank")["gain_ns"].sum()
    gains = {int(rank): float(mine.get(rank, 0.0)) for rank in host_parts["rank"].unique()}
    return dict.fromkeys(gains, min(gains.values())) if gains and waits.or_none() is not None else gains


def places_of(
    row: Mapping[str, Any], facts: Mapping[str, Any], call_sites: Maybe[list[Call]], hottest: pd.DataFrame
) -> tuple[Place, ...]:
    """Return the lines of a loop: as recorded, of two functions the one that calls the other first; else the only line
    where values are read, if the loop does; else where the stacks (`stacks.hottest`, of its rank) mostly are.
    """
    between = hottest[(hottest["doing"] == "rest") & hottest["own"]]
    if found := busiest(facts, "", row["after"], row["inner"].split()):
        seen = {(str(f), str(path)): (-n, alone) for f, path, n, alone in between[_CALLED].itertuples(index=False)}
        return tuple(sorted(found, key=lambda place: seen.get((place.function, place.file), (0, 0))))
    sites = {(call.file, call.line): call for call in call_sites.or_none() or () if call.kind == "sync"}
    reads = list(sites.values())
    if row["after"] == HOOK:
        reads = sorted(reads, key=lambda call: -call.count)[:1]
    if row["waits"] >= row["turns"] / 2 and len(reads) == 1:
        (read,) = reads
        return (Place(read.file, read.line, read.function, what=read.source),)
    likely = between[between["alone"] >= (_MOSTLY * between["samples"]).clip(lower=_FEW)]
    # On a tie, prefer the function over the script's main part.
    likely = likely.sort_values(
        "alone", ascending=False, kind="stable", key=lambda n: n - (likely["function"] == "<module>")
    )
    return tuple(
        Place(str(one["file"]), int(one["line"]), str(one["function"]), share=float(one["alone"] / one["samples"]))
        for one in likely.head(1).to_dict("records")
    )


def _waits_of_script(what_if: WhatIf, sync_waits: pd.DataFrame, looping: iv.Intervals) -> NDArray[np.bool_]:
    """Return which of the replay's waits the script causes: those of the training thread, and any in a loop.

    Waits for a full launch queue and for batches copied to the device are left out: other rules report them.
    """
    waits = what_if.replay.waits
    begins = np.array([wait.begin for wait in waits], dtype=np.int64)
    full = np.array([wait.from_start for wait in waits], dtype=bool)
    requested = iv.merge(_requested(sync_waits, copying=False), looping)
    return ~full & iv.holds(requested, begins) & ~iv.holds(_requested(sync_waits, copying=True), begins)


def _requested(sync_waits: pd.DataFrame, *, copying: bool) -> iv.Intervals:
    """Return when the training thread waits, in operators that copy to the device or in others."""
    mine = sync_waits[(sync_waits["copied"] != "") == copying]
    return iv.union(mine["start_ns"].to_numpy(), mine["end_ns"].to_numpy())


# What a faster host is worth: on a CPU all of its time, on a device that of launches.
ON_CPU, ON_DEVICE = "cpu", "device"


@across_ranks
def host_gains(
    step_means: Frame = needs(step_means),
    launch_means: Maybe[Frame] = maybe(launch_means),
    host_parts: Maybe[Frame] = maybe(host_parts),
    waits: Maybe[Frame] = maybe(waits),
    own_time: Frame = needs(own_time),
    breakdown: Frame = needs(breakdown),
    job: Job = needs(JOB),
) -> dict[str, float]:
    """Return how much shorter the mean steady step would be with a faster host, ns: ON_CPU without its time, or
    ON_DEVICE with the launches of the forward and backward pass captured in a graph.

    Raises NotMeasured where steps are not marked, a device does not train, or its trace does not link launches.
    """
    check_marked(step_means)
    if settings.on_cpu(job):
        return {ON_CPU: saving(own_time, part(breakdown, *HOST))}
    check_launches(launch_means.get())
    return {ON_DEVICE: saving(own_time, gains_of(host_parts.get(), LAUNCHES, waits))}


@across_ranks
def between_twice(
    lines_between: Frame = needs(lines_between),
    host_work: Frame = needs(host_work),
    breakdown: Frame = needs(breakdown),
    mean_step_ns: float = needs(mean_step_ns),
    job: Job = needs(JOB),
) -> pd.DataFrame:
    """Return what of the mean steady step two rules see, a row a rank: rank, both_ns, and lines_first (0 or 1).

    The time between the phases in which nothing is computed may be that of notable lines there: both_ns, at the most.
    lines_first, the same in all rows: these lines take longer than all that the host holds up, and keep it. Raises
    DoesNotApply where the job trains on a device: its host computes nothing between the phases.
    """
    if not settings.on_cpu(job):
        raise DoesNotApply("the job trains on a device")
    notable = lines_between[lines_between["ns"] >= LEAST_SHARE * mean_step_ns].groupby("rank")["ns"].sum()
    late = pd.Series(part(breakdown, *HOST), dtype=float)
    whole = host_work.groupby("rank")["ns"].sum()
    outside = host_work[host_work["phase"] == ""].groupby("rank")["ns"].sum()
    share = (outside / whole).reindex(late.index).fillna(0.0)
    lines = notable.reindex(late.index).fillna(0.0)
    both = pd.concat([lines, late * share], axis=1).min(axis=1)
    first = int(lines.max() >= late.max())
    return pd.DataFrame({"rank": late.index, "both_ns": both.to_numpy(), "lines_first": first})


class HeldUp(Struct, frozen=True):
    """What the host holds up of the mean steady step, ns, and what a faster one would gain. `where`: of host_gains.

    `besides`: without the time of the lines between the phases, which keep it.
    """

    where: str
    gain_ns: float
    by_rank_ns: Mapping[int, float]
    least_ns: float  # in every measured step
    besides: bool = False


@across_ranks
def held_up(
    host_gains: Mapping[str, float] = needs(host_gains),
    breakdown: Frame = needs(breakdown),
    between_twice: Maybe[Frame] = maybe(between_twice),
    own_time: Frame = needs(own_time),
) -> HeldUp:
    """Return the larger of what a faster host would gain, and what it holds up on each rank."""
    ((where, gain),) = host_gains.items()
    late, least, shared = part(breakdown, *HOST), part_least(breakdown, *HOST), between_twice.or_none()
    if shared is None or not shared["lines_first"].any():
        return HeldUp(where, gain, late, least)
    both = by_rank(shared, "both_ns")
    left = {rank: max(ns - both.get(rank, 0.0), 0.0) for rank, ns in late.items()}
    return HeldUp(where, saving(own_time, left), left, max(least - max(both.values()), 0.0), besides=True)
