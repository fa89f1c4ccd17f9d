"""Where the mean steady step goes: exclusive parts that add up to it, per rank.

Two views are combined. Device work counts first: computation, then communication, then copies that nothing hides, over
the steps on the device's own clock. Where the device is idle, `timeline.idle` gives the reason: queued work waits, a
kernel is about to start, or the host is late. Only the last is split by what the training thread does: it waits for its
loader, it saves a checkpoint, Python's garbage collector stops it, it works in the optimizer, it launches or runs
Python. A wait of the host costs nothing while the device has queued work. On a run without a device the training
thread's own operators are the computation, and collectives with no operator at the same time are the communication;
stalls of that thread count before both. In a pipeline, waiting for the neighbouring stage is its bubble, and not
communication.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import RANK, Frame, Maybe, RankFacts, by_rank, maybe, needs, per_rank, within_rank
from dlprof.analysis.input.loader import in_steady, training_fetches
from dlprof.analysis.pipeline.chunks import outside_chunks_ns, pipeline
from dlprof.analysis.step.partition import BUBBLE, host_phases, partition
from dlprof.analysis.timeline.device import has_device
from dlprof.analysis.timeline.host import training_lane
from dlprof.analysis.timeline.stalls import KINDS, PERIODIC, Pattern, by_phase, patterns, periodic_phases, stall_means
from dlprof.analysis.timeline.steady import (
    ENOUGH,
    STRETCHES,
    device_type,
    error_in_turn,
    in_turn,
    light_steps,
    on_device_clock,
    standard_error,
    steady_steps,
    stretch_means,
)
from dlprof.analysis.timeline.steps import PHASES, Timing, timing
from dlprof.errors import NotMeasured
from dlprof.result import CATEGORIES


@within_rank
def steady_usage(loading: Frame = needs(schema.LOADING), light_steps: Frame = needs(light_steps)) -> pd.DataFrame:
    """Return the rows of `loading` of what a rank's process used of its cores within steady steps."""
    usage = loading[(loading["kind"] == "usage") & (loading["delay_ns"] >= 0)]
    begin, took = usage["start_ns"].to_numpy(), usage["dur_ns"].to_numpy()
    return usage[in_steady(light_steps, begin) & in_steady(light_steps, begin + took - 1)]


@within_rank
def alone_usage(steady_usage: Maybe[Frame] = maybe(steady_usage), rank: RankFacts = needs(RANK)) -> pd.DataFrame:
    """Return the same for a rank on which only the training thread computes; raise NotMeasured for any other.

    On other ranks, standing still may not mean waiting for ranks: the thread waits for its helper threads or for the
    GPU, and backends other than gloo keep it busy while they wait.
    """
    gloo = "gloo" in str(rank.facts.get("backend") or rank.trace_facts.get("backend"))
    alone = device_type(rank) == "cpu" and (rank.facts.get("cpu") or {}).get("torch_threads") == 1
    usage = steady_usage.get() if gloo and alone and steady_usage else None
    usage = None if usage is None else usage[usage["thread_ns"] >= 0]
    if usage is None or len(usage) < ENOUGH:
        raise NotMeasured("what the ranks' threads use of their cores was not recorded, or does not tell what they do")
    return usage


@within_rank
def blocked(
    alone_usage: Maybe[Frame] = maybe(alone_usage), timing: Timing = needs(timing)
) -> tuple[float, float] | None:
    """Return the time in which the training thread neither ran nor was ready to, and its standard error, ns a step.

    That it waits for another rank, its loader, or a disk. None: not known.
    """
    usage = alone_usage.or_none()
    if usage is None:
        return None
    idle = (usage["dur_ns"] - usage["thread_ns"] - usage["delay_ns"]).clip(lower=0)
    noise = standard_error((idle / usage["dur_ns"].clip(lower=1)).to_numpy(dtype=float))
    return float(idle.sum() / usage["dur_ns"].sum()) * timing.step_ns, noise * timing.step_ns


@per_rank
def contention(
    alone_usage: Frame = needs(alone_usage),
    timing: Timing = needs(timing),
    loading: Frame = needs(schema.LOADING),
    training_fetches: Maybe[Frame] = maybe(training_fetches),
    steady_steps: Frame = needs(steady_steps),
) -> pd.DataFrame:
    """Return one row of what else than its training thread computes in a rank's mean steady step, ns.

    delay_ns: that thread is ready and has no core. others_ns: the CPU time of the process's other threads, which
    exchange, as there is one that computes. loader_ns: that of the training loader's workers.
    Raises NotMeasured where the kernel did not count it, or what the workers use was not recorded.
    """
    columns = ["delay_ns", "thread_ns", "cpu_ns"]
    delay, thread, cpu = (alone_usage[columns].sum() / alone_usage["dur_ns"].sum() * timing.step_ns).tolist()
    loader = 0.0
    if (loading["workers"].astype(str) != "").any():
        fetches = training_fetches.get()
        mine = fetches[(fetches["worker"] >= 0) & (fetches["cpu_ns"] >= 0)]
        if not len(mine):
            raise NotMeasured("what the loader's workers use of the cores was not recorded")
        loader = mine["cpu_ns"].sum() / mine["count"].sum() * steady_steps["fetches"].clip(lower=0).mean()
    return pd.DataFrame([{"delay_ns": delay, "others_ns": max(cpu - thread, 0.0), "loader_ns": loader}])


# Device work takes the same time whether or not a profiler slows its host.
_ON_DEVICE = ("computation", "communication", "copy", BUBBLE, "launch_latency", "queued_wait")

# If less than this share of a wait for data counts, the wait is hidden in part.
_HIDDEN = 0.9

# The categories of a rank's waiting for another; without a trace, the last one.
_WAITING = ("communication", BUBBLE, "other")

Parts = dict[str, float]  # category → ns


@within_rank
def recorded(
    by_phase: dict[tuple[str, str], float] = needs(by_phase),
    outside_chunks_ns: Maybe[float] = maybe(outside_chunks_ns),
    periodic_phases: Maybe[dict[str, float]] = maybe(periodic_phases),
    rank: RankFacts = needs(RANK),
) -> dict[tuple[str, str], float]:
    """Return the parts that were recorded in all steps, ns of the mean steady one: (category, phase) → ns."""
    bubble = outside_chunks_ns.get() if device_type(rank) == "cpu" else 0.0
    found = {**by_phase, (BUBBLE, "rest"): bubble} if bubble else dict(by_phase)
    for phase, ns in (periodic_phases.or_none() or {}).items():
        found[PERIODIC, phase] = ns
    return found


@within_rank
def step_parts(
    timing: Timing = needs(timing),
    partition: Maybe[dict[str, iv.Intervals]] = maybe(partition),
    has_device: bool = needs(has_device),
    recorded: Maybe[dict[tuple[str, str], float]] = maybe(recorded),
    host_phases: Maybe[dict[str, iv.Intervals]] = maybe(host_phases),
    steady_steps: Maybe[Frame] = maybe(steady_steps),
    blocked: tuple[float, float] | None = needs(blocked),
    training_lane: Maybe[str] = maybe(training_lane),
    rank: RankFacts = needs(RANK),
) -> Parts:
    """Return the parts of the mean steady step, ns, in the order of CATEGORIES.

    The trace shows the parts of its own few steps, which the profiler slowed. If the step log timed the steady steps
    without the profiler, the parts are scaled to those: device work except communication keeps its time, and the rest
    of the step is divided as in the trace, each phase of the training thread (fetch, forward, backward, optimizer,
    rest) scaled to its length in the untraced steps. The few traced steps may hold stalls by chance, or none. Stalls
    were recorded in all steps, so they get the recorded time, at most the time without device work; the other parts
    share the remainder. The same holds for the bubble of a pipeline on the CPU. If the kernel shows how long the
    training thread stood still in all steady steps, communication is at most that time, and at least the part of it
    that nothing else explains.
    """
    if not len(timing.windows):
        parts = _without_trace(timing, recorded, rank)
    elif timing.source == "trace":
        parts = {c: iv.total(p) / len(timing.windows) for c, p in partition.get().items()}
    else:
        on_device, phases = _ON_DEVICE if has_device else (), host_phases.get()
        parts = _untraced(timing, partition.get(), on_device, recorded.get(), phases, steady_steps.get(), blocked)
    if len(timing.windows) and not has_device and not training_lane.or_none():
        # The trace holds the ranks' exchanges and no thread of the job: what that did meanwhile is not known.
        parts["other"] = parts.get("other", 0.0) + parts.pop("host", 0.0)
    return {c: parts[c] for c in CATEGORIES if parts.get(c, 0.0) > 0.0}


@within_rank
def parts_noise(
    timing: Timing = needs(timing),
    step_parts: Parts = needs(step_parts),
    partition: Maybe[dict[str, iv.Intervals]] = maybe(partition),
    has_device: bool = needs(has_device),
    recorded: Maybe[dict[tuple[str, str], float]] = maybe(recorded),
    stall_means: Maybe[Frame] = maybe(stall_means),
    pipeline: Maybe[Frame] = maybe(pipeline),
    steady_steps: Maybe[Frame] = maybe(steady_steps),
    blocked: tuple[float, float] | None = needs(blocked),
    patterns: Maybe[tuple[Pattern, ...]] = maybe(patterns),
    in_turn: Maybe[int] = maybe(in_turn),
) -> Parts:
    """Return the standard error of each part's mean over the steps that it was measured in, ns."""
    traced = {c: iv.per_slot(p, timing.edges).astype(float) for c, p in (partition.or_none() or {}).items()}
    if timing.usual.sum() > 1:
        traced = {c: ns[timing.usual] for c, ns in traced.items()}
    noise = {c: error_in_turn(ns, in_turn.or_none() or 1) for c, ns in traced.items()}
    if timing.source == "trace":
        return noise
    categories = {category for category, _ in recorded.get()}
    if categories.intersection(KINDS):
        noise |= dict(zip(stall_means.get()["kind"], stall_means.get()["noise_ns"], strict=True))
    if BUBBLE in categories:
        noise[BUBBLE] = float(pipeline.get()["noise_ns"].iloc[0])
    if PERIODIC in categories:
        noise[PERIODIC] = math.hypot(*(one.noise_ns for one in patterns.get() if not one.trains))
    noise["input_wait"] = _wait_noise(timing, step_parts.get("input_wait", 0.0), has_device, steady_steps.get())
    if traced:
        # A part of the host, in a device's step too, is the step less the device's work and the host's other parts. All
        # steps show the step, and the traced ones the others: one that was held up says nothing of the rest.
        on_device = [ns for c, ns in traced.items() if has_device and c in _ON_DEVICE]
        busy = standard_error(np.sum(on_device, axis=0)) if on_device else 0.0
        of_host = {c: noise[c] for c in traced if not has_device or c not in _ON_DEVICE}
        for c in of_host:
            others = (ns for other, ns in of_host.items() if other != c)
            noise[c] = min(of_host[c], math.hypot(timing.noise_ns, busy, *others))
    bounds = _communication_bounds(step_parts, blocked)
    if bounds and blocked:
        noise["communication"] = min(noise.get("communication", np.inf), (bounds[1] - bounds[0]) / 2 + blocked[1])
    return noise


@per_rank
def breakdown(
    timing: Timing = needs(timing),
    step_parts: Parts = needs(step_parts),
    parts_noise: Parts = needs(parts_noise),
    partition: Maybe[dict[str, iv.Intervals]] = maybe(partition),
) -> pd.DataFrame:
    """Return the exclusive parts of the mean steady step, which add up to it: category, ns, noise_ns, least_ns.

    noise_ns is the standard error of ns over the steps that it was measured in; least_ns the least of a part in any of
    the traced steps, 0 where one alone was traced.
    """
    least = dict.fromkeys(step_parts, 0.0)
    if len(timing.windows) > 1:
        each = {c: iv.per_slot(partition.get().get(c, iv.EMPTY), timing.edges) for c in step_parts}
        least = {
            c: float(each[c].min() / each[c].mean()) * ns if each[c].any() else 0.0 for c, ns in step_parts.items()
        }
    rows = [(c, ns, parts_noise.get(c, 0.0), least[c]) for c, ns in step_parts.items()]
    columns: dict[str, Any] = {"category": "str", "ns": float, "noise_ns": float, "least_ns": float}
    return pd.DataFrame(rows, columns=list(columns)).astype(columns)


def _without_trace(t: Timing, recorded: Maybe[dict[tuple[str, str], float]], rank: RankFacts) -> Parts:
    """Without a trace only what every step recorded is known, and only where no device could be busy meanwhile.

    What one rank alone spends in forward and backward passes counts as computation: what of it is Python between two
    operators only a trace tells. In a backward pass or an optimizer several ranks may wait for each other.
    """
    if device_type(rank) != "cpu":
        raise NotMeasured("without a trace it is not known what the device did while the training thread waited")
    stalled = _within(recorded.get(), t.step_ns)
    left = t.step_ns - sum(stalled.values())
    inside = {p: ns - sum(n for (_, at), n in recorded.get().items() if at == p) for p, ns in t.phases.items()}
    parts = {"input_wait": max(inside.get("fetch", 0.0), 0.0), "computation": max(inside.get("forward", 0.0), 0.0)}
    if (rank.facts.get("world_size") or 1) == 1:
        parts["computation"] += max(inside.get("backward", 0.0), 0.0)
        parts["optimizer_host"] = max(inside.get("optimizer", 0.0), 0.0)
    if sum(parts.values()) > left:
        parts = _to(left, parts)
    return {**stalled, **parts, "other": left - sum(parts.values())}


def _untraced(
    t: Timing,
    partition: Mapping[str, iv.Intervals],
    on_device: Iterable[str],
    recorded: Mapping[tuple[str, str], float],
    host_phases: Mapping[str, iv.Intervals],
    steady_steps: pd.DataFrame,
    blocked: tuple[float, float] | None,
) -> Parts:
    """Bring the parts of the traced steps to the steps that were not traced."""
    means = {c: iv.total(p) / len(t.windows) for c, p in partition.items()}
    busy = {c: ns for c, ns in means.items() if c in on_device}
    # Collectives last as long as the ranks wait for each other in them, which differs between steps.
    exchanging = busy.pop("communication", 0.0)
    stalled = _within(recorded, max(t.step_ns - sum(busy.values()), 0.0))
    left = t.step_ns - sum(stalled.values())
    rest = _scaled(t, partition, on_device, recorded, host_phases)
    if on_device:
        # Waits for data that the few traced steps do not hold, as far as the others are longer and have them.
        seen = sum(busy.values()) + sum(rest.values()) + exchanging
        waited = min(left - seen, _longer_wait(host_phases, steady_steps, t, seen))
        if waited > 0:
            rest["input_wait"] = rest.get("input_wait", 0.0) + waited
        if exchanging:
            rest["communication"] = exchanging
        elif left > sum(busy.values()) + sum(rest.values()):
            # What makes the others longer was not traced.
            rest["other"] = left - sum(busy.values()) - sum(rest.values())
    if sum(busy.values()) > left or not sum(rest.values()):
        return {**_to(left, busy or {c: means[c] for c in rest}), **stalled}
    return _within_bounds({**busy, **_to(left - sum(busy.values()), rest), **stalled}, blocked)


def _longer_wait(
    host_phases: Mapping[str, iv.Intervals], steady_steps: pd.DataFrame, t: Timing, traced_ns: float
) -> float:
    """Return how much longer the steady steps wait for data than the traced ones, each of `traced_ns`; ns of the mean.

    On the device's clock it counts only in steps that are longer themselves: work that comes late for want of a batch
    makes its own step longer, however far the host is ahead.
    """
    traced = iv.total(host_phases["fetch"]) / len(t.windows)
    if not on_device_clock(steady_steps):
        return t.phases.get("fetch", 0.0) - traced
    longer = (steady_steps["length_ns"] - traced_ns).clip(lower=0.0)
    waits = (steady_steps["fetch_ns"] - traced).clip(lower=0.0)
    return float(np.minimum(longer, waits).mean())


def _within_bounds(parts: Parts, blocked: tuple[float, float] | None) -> Parts:
    """Bring communication to within its bounds; computation and the host share the difference.

    The profiler takes memory, which costs one rank's step and then another's: the traced steps wait more than others.
    """
    bounds = _communication_bounds(parts, blocked)
    if bounds is None:
        return parts
    sharing: Parts = {c: parts[c] for c in ("computation", "host") if c in parts} or {"host": 0.0}
    most = parts["communication"] + sum(sharing.values())
    communication = min(float(np.clip(parts["communication"], bounds[0], bounds[1])), most)
    return {**parts, "communication": communication, **_to(most - communication, sharing)}


def _communication_bounds(
    parts: Mapping[str, float], blocked: tuple[float, float] | None
) -> tuple[float, float] | None:
    """Return the least and the most that communication can be of the mean steady step, ns; None: not known.

    The thread stands still in a collective, and possibly in what is neither communication nor computation.
    """
    if blocked is None or not parts.get("communication") or parts.get(BUBBLE):
        return None
    others = sum(ns for c, ns in parts.items() if c not in ("communication", "computation"))
    return max(blocked[0] - others, 0.0), blocked[0]


def _within(recorded: Mapping[tuple[str, str], float], most: float) -> Parts:
    """Add up the recorded ns by category, scaled down to a sum of `most` if it is more."""
    found: Parts = {}
    for (category, _), ns in recorded.items():
        found[category] = found.get(category, 0.0) + ns
    return _to(most, found) if sum(found.values()) > most else found


def _scaled(
    t: Timing,
    partition: Mapping[str, iv.Intervals],
    on_device: Iterable[str],
    recorded: Mapping[tuple[str, str], float],
    host_phases: Mapping[str, iv.Intervals],
) -> Parts:
    """Return the parts that are neither on the device nor recorded in every step, scaled to the untraced phases, ns.

    The recorded parts are left out of both lengths of a phase. An optimizer that waits for other ranks within its step
    (Horovod's, ZeRO's) computes the same in every step: if it takes longer in the untraced steps than in those that the
    profiler slowed, it waits for longer.
    """
    n = len(t.windows)
    known = {*KINDS, *(category for category, _ in recorded)}
    elsewhere = iv.merge(*(partition.get(category, iv.EMPTY) for category in known))
    untraced = {p: t.phases.get(p, 0.0) for p in PHASES}
    untraced["rest"] = max(t.step_ns - sum(untraced.values()), 0.0)
    for (_, phase), ns in recorded.items():
        at = phase if phase in untraced else "rest"
        untraced[at] = max(untraced[at] - ns, 0.0)
    scaled = {category: 0.0 for category in partition if category not in known.union(on_device)}
    for phase, during in host_phases.items():
        during = iv.subtract(during, elsewhere)
        traced = iv.total(during) / n
        if traced <= 0:
            continue
        took = {category: iv.total(iv.intersect(partition[category], during)) / n for category in scaled}
        longer = untraced[phase] - traced
        if phase == "optimizer" and longer > 0 and took.get("communication"):
            took["communication"] += longer
        else:
            took = {category: ns * untraced[phase] / traced for category, ns in took.items()}
        scaled = {category: ns + took[category] for category, ns in scaled.items()}
    return scaled


def _to(total: float, parts: Mapping[str, float]) -> Parts:
    """Scale parts so that they add up to a total."""
    have = sum(parts.values())
    return {c: ns * total / have for c, ns in parts.items()} if have else {"other": total}


def _wait_noise(t: Timing, counted_ns: float, has_device: bool, steady_steps: pd.DataFrame) -> float:
    """Return the standard error of the mean wait for data, ns; `counted_ns`: the part of the wait that counts."""
    waits, lengths = (steady_steps[c].to_numpy(dtype=float) for c in ("fetch_ns", "length_ns"))
    noise = standard_error(waits)
    if on_device_clock(steady_steps):
        # A host that runs ahead has fewer, longer waits for data. Its device waits more evenly.
        noise = min(noise, standard_error(lengths))
    elif has_device and len(waits) >= 2 * STRETCHES:
        # The waits come in bursts. If a wait is hidden in part, only the increase of the step's length counts.
        hidden = counted_ns < _HIDDEN * t.phases.get("fetch", 0.0)
        noise = min(noise, standard_error(stretch_means(lengths if hidden else waits)))
    return noise


def part(breakdown: pd.DataFrame, *categories: str) -> dict[int, float]:
    """Return the ns of the mean steady step that go to some categories: rank → ns, 0 where a rank has none of it."""
    return by_rank(breakdown.assign(ns=breakdown["ns"].where(breakdown["category"].isin(categories), 0.0)), "ns")


def part_least(breakdown: pd.DataFrame, *categories: str) -> float:
    """Return the least of such a part in any traced step, ns, on the rank with the largest part."""
    frame = breakdown[breakdown["category"].isin(categories)]
    by = frame.groupby("rank")[["ns", "least_ns"]].sum().sort_values("ns")
    return float(by["least_ns"].iloc[-1]) if len(by) else 0.0


def part_noise(breakdown: pd.DataFrame, *categories: str) -> float:
    """Return the standard error of such a part, in ns: the largest of all ranks'."""
    noise = breakdown.loc[breakdown["category"].isin(categories), "noise_ns"]
    return float(noise.max()) if len(noise) else 0.0


def most_saved_ns(breakdown: pd.DataFrame, categories: Iterable[str]) -> float:
    """Return the most that the mean steady step can shrink if some categories disappear, ns.

    That is the largest over the ranks of a rank's own time in these categories, plus its waiting, up to the other
    ranks' time in them: a rank waits while another one stands still. Raises NotMeasured where the step is not divided.
    """
    chosen = frozenset(categories)
    own, waits = part(breakdown, *chosen), part(breakdown, *(c for c in _WAITING if c not in chosen))
    total = sum(own.values())
    return float(max(own[r] + min(waits[r], total - own[r]) for r in own))
