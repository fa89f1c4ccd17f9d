"""Where the mean steady step goes: exclusive parts that add up to it, per rank.

Two views are crossed. What the device does claims time first: computation, then communication, then copies that nothing
hides, over the steps on the device's own clock. Where the device has nothing to do, `timeline.idle` tells why: queued
work waits, a kernel is about to start, or the host is late. Only the latter is split by what the training thread does:
it waits for its loader, it saves a checkpoint, Python's garbage collector holds it up, it works in the optimizer, it
launches or runs Python. A wait of the host behind which the device has work costs nothing. On a run without a device
the training thread's own operators are the computation, and collectives with no operator beside them are the
communication; what stalls that thread comes before them. Where a pipeline runs, waiting for the neighbouring stage is
its bubble, and no communication.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Maybe, RankFacts, by_rank, per_rank
from dlprof.analysis.step.partition import BUBBLE
from dlprof.analysis.step.stalls import KINDS
from dlprof.analysis.timeline.steady import standard_error
from dlprof.analysis.timeline.steps import PHASES, Timing, on_device_clock
from dlprof.errors import NotMeasured
from dlprof.result import CATEGORIES

# What a device does takes the same time whether or not a profiler slows its host.
_ON_DEVICE = ("computation", "communication", "copy", BUBBLE, "launch_latency", "queued_wait")

# Where a host runs ahead of its device, its waits for data come in bursts: means of so many stretches tell how sure
# their mean is.
STRETCHES = 10

# A wait for data of which less than this share counts is hidden in part.
_HIDDEN = 0.9


@per_rank
def breakdown(
    timing: Timing,
    partition: Maybe[dict[str, iv.Intervals]],
    has_device: bool,
    by_phase: Maybe[dict[tuple[str, str], float]],
    idle_ns: Maybe[float],
    host_phases: Maybe[dict[str, iv.Intervals]],
    light_steps: Maybe[pd.DataFrame],
    blocked: Maybe[tuple[float, float] | None],
    stall_means: Maybe[pd.DataFrame],
    pipeline: Maybe[pd.DataFrame],
    rank: RankFacts,
) -> pd.DataFrame:
    """Return the exclusive parts of the mean steady step, which add up to it: category, ns, noise_ns, least_ns.

    least_ns is the least of a part in any of the traced steps, 0 where one alone was traced.

    The trace tells the parts of its own few steps, which the profiler slowed. Where the light layer timed the steady
    steps without it, the parts are brought to those: device work keeps its time but for communication, and the rest of
    the step is divided as in the trace, each phase of the training thread (fetch, forward, backward, optimizer, rest)
    scaled to its length in the steps that were not traced. Stalls, which the few traced steps may hold by chance or
    miss, were recorded in all steps: theirs is the recorded time, as far as device work leaves room for it; the other
    parts share what is left. So is the bubble of a pipeline on the CPU. And where the kernel tells how long the
    training thread stood still in all steady steps, communication is no longer than that, and no shorter than what of
    it nothing else explains.
    """
    parts = (
        _traced(partition, has_device, by_phase, idle_ns, host_phases, light_steps, blocked, rank, timing)
        if len(timing.windows)
        else _light_only(by_phase, idle_ns, rank, timing)
    )
    parts = {c: parts[c] for c in CATEGORIES if parts.get(c, 0.0) > 0.0}
    noise = _noise(by_phase, stall_means, idle_ns, pipeline, light_steps, has_device, partition, rank, timing, parts)
    if timing.source == "steps" and (bounds := _communication_bounds(blocked, parts)):
        least, most, unsure = bounds
        noise["communication"] = min(noise.get("communication", np.inf), (most - least) / 2 + unsure)
    return pd.DataFrame(
        {
            "category": pd.Series(list(parts), dtype="str"),
            "ns": pd.Series(list(parts.values()), dtype=float),
            "noise_ns": pd.Series([noise.get(c, 0.0) for c in parts], dtype=float),
            "least_ns": pd.Series(_least(partition, timing, parts), dtype=float),
        }
    )


def _least(partition: Maybe[dict[str, iv.Intervals]], t: Timing, parts: Mapping[str, float]) -> list[float]:
    """Return the least of each part in any traced step, brought to its mean in the steady ones; 0: not known."""
    if len(t.windows) < 2:
        return [0.0] * len(parts)
    edges = np.append(t.windows[:, 0], t.windows[-1, 1])
    found = []
    for category, ns in parts.items():
        each = iv.per_slot(partition.get().get(category, iv.EMPTY), edges)
        found.append(float(each.min() / each.mean()) * ns if each.any() else 0.0)
    return found


def _noise(
    by_phase: Maybe[dict[tuple[str, str], float]],
    stall_means: Maybe[pd.DataFrame],
    idle_ns: Maybe[float],
    pipeline: Maybe[pd.DataFrame],
    light_steps: Maybe[pd.DataFrame],
    has_device: bool,
    partition: Maybe[dict[str, iv.Intervals]],
    rank: RankFacts,
    t: Timing,
    parts: Mapping[str, float],
) -> dict[str, float]:
    """Return the standard error of each part's mean over the steps that it was measured in."""
    known: dict[str, float] = {}
    if t.source == "steps" and by_phase.get():
        means = stall_means.get()
        known = dict(zip(means["kind"], means["noise_ns"], strict=True))
    if t.source == "steps" and (BUBBLE, "rest") in _recorded(by_phase.get(), idle_ns, rank):
        known[BUBBLE] = float(pipeline.get()["noise_ns"].iloc[0])
    if t.source == "steps":
        frame = light_steps.get()
        steady = frame[frame["steady"]]
        known["input_wait"] = standard_error(steady["fetch_ns"].to_numpy(dtype=float))
        if on_device_clock(steady):
            # A host that runs ahead waits for data now and then, and for longer: its device waits more evenly.
            known["input_wait"] = min(known["input_wait"], standard_error(steady["length_ns"].to_numpy()))
        elif has_device and len(steady) >= 2 * STRETCHES:
            # Of a wait that is hidden in part, only so much counts as the steps are longer for.
            hidden = parts.get("input_wait", 0.0) < _HIDDEN * t.phases.get("fetch", 0.0)
            stretches = np.array_split(steady["length_ns" if hidden else "fetch_ns"].to_numpy(dtype=float), STRETCHES)
            known["input_wait"] = min(known["input_wait"], standard_error(np.array([s.mean() for s in stretches])))
    if not len(t.windows):
        return known
    edges = np.append(t.windows[:, 0], t.windows[-1, 1])
    each = {c: iv.per_slot(p, edges).astype(float) for c, p in partition.get().items()}
    noise = {c: standard_error(ns) for c, ns in each.items()} | known
    return noise | _of_whole_steps(has_device, t, each, noise)


def _of_whole_steps(
    has_device: bool, t: Timing, each: Mapping[str, NDArray[np.float64]], noise: Mapping[str, float]
) -> dict[str, float]:
    """Return the standard error of what the host takes of a device's step where all steps tell it better.

    It is the step without the device's work and without the host's other parts: all steps tell the first, and the
    traced ones the second, which hardly varies.
    """
    if t.source != "steps" or not has_device:
        return {}
    busy = standard_error(np.sum([ns for c, ns in each.items() if c in _ON_DEVICE], axis=0))
    host_parts = [c for c in each if c not in _ON_DEVICE]
    rest = {c: math.hypot(t.noise_ns, busy, *(noise[o] for o in host_parts if o != c)) for c in host_parts}
    return {c: min(noise[c], ns) for c, ns in rest.items()}


def _recorded(
    by_phase: dict[tuple[str, str], float], idle_ns: Maybe[float], rank: RankFacts
) -> dict[tuple[str, str], float]:
    """Return what was recorded in all steps, ns of the mean steady one: (category, phase) → ns."""
    on_cpu = (rank.facts.get("device") or {}).get("type") == "cpu"
    bubble = idle_ns.get() if on_cpu else 0.0
    return {**by_phase, (BUBBLE, "rest"): bubble} if bubble else by_phase


def _of_every_step(by_phase: dict[tuple[str, str], float], idle_ns: Maybe[float], rank: RankFacts) -> tuple[str, ...]:
    """Name the categories that are taken from all steps and not from the traced ones."""
    return (*KINDS, *(c for c, _ in _recorded(by_phase, idle_ns, rank) if c == BUBBLE))


def _traced(
    partition: Maybe[dict[str, iv.Intervals]],
    has_device: bool,
    by_phase: Maybe[dict[tuple[str, str], float]],
    idle_ns: Maybe[float],
    host_phases: Maybe[dict[str, iv.Intervals]],
    light_steps: Maybe[pd.DataFrame],
    blocked: Maybe[tuple[float, float] | None],
    rank: RankFacts,
    t: Timing,
) -> dict[str, float]:
    parts = partition.get()
    n = len(t.windows)
    means = {c: iv.total(p) / n for c, p in parts.items()}
    if t.source == "trace":
        return means
    works = _ON_DEVICE if has_device else ()
    busy = {c: ns for c, ns in means.items() if c in works}
    # Collectives last as long as the ranks wait for each other in them, which differs between steps.
    exchanging = busy.pop("communication", 0.0)
    stalled = _within(_recorded(by_phase.get(), idle_ns, rank), max(t.step_ns - sum(busy.values()), 0.0))
    left = t.step_ns - sum(stalled.values())
    others = {
        c: p for c, p in parts.items() if c not in works and c not in _of_every_step(by_phase.get(), idle_ns, rank)
    }
    rest = _scaled(partition, by_phase.get(), idle_ns, host_phases.get(), rank, t, others)
    if works:
        # Waits for data that the few traced steps do not hold, as far as the others are longer and have them.
        seen = sum(busy.values()) + sum(rest.values()) + exchanging
        waited = min(left - seen, _longer_wait(host_phases.get(), light_steps.get(), t, seen))
        if waited > 0:
            rest["input_wait"] = rest.get("input_wait", 0.0) + waited
        if exchanging:
            rest["communication"] = exchanging
        elif left > sum(busy.values()) + sum(rest.values()):
            # What makes the others longer was not traced.
            rest["other"] = left - sum(busy.values()) - sum(rest.values())
    if sum(busy.values()) > left or not sum(rest.values()):
        if not busy:
            busy = {c: means[c] for c in others}
        return {**_to(left, {**busy, **dict.fromkeys(rest.keys() - busy.keys(), 0.0)}), **stalled}
    return _with_blocked(blocked, {**busy, **_to(left - sum(busy.values()), rest), **stalled})


def _longer_wait(host_phases: dict[str, iv.Intervals], light_steps: pd.DataFrame, t: Timing, traced_ns: float) -> float:
    """Return how much longer the steady steps wait for data than the traced ones, each of `traced_ns`; ns of the mean.

    On the device's clock it counts only in steps that are longer themselves: work that comes late for want of a batch
    makes its own step longer, however far the host is ahead.
    """
    traced = iv.total(host_phases["fetch"]) / len(t.windows)
    steady = light_steps[light_steps["steady"]]
    if not on_device_clock(steady):
        return t.phases.get("fetch", 0.0) - traced
    longer = steady["length_ns"].to_numpy() - traced_ns
    waits = steady["fetch_ns"].to_numpy() - traced
    return float(np.minimum(longer.clip(min=0.0), waits.clip(min=0.0)).mean())


def _with_blocked(blocked: Maybe[tuple[float, float] | None], parts: dict[str, float]) -> dict[str, float]:
    """Bring communication to within its bounds; computation and the host share the difference.

    The profiler takes memory, which costs one rank's step and then another's: the traced steps wait more than others.
    """
    bounds = _communication_bounds(blocked, parts)
    if bounds is None:
        return parts
    sharing: dict[str, float] = {c: parts[c] for c in ("computation", "host") if c in parts} or {"host": 0.0}
    room = parts["communication"] + sum(sharing.values())
    communication = min(float(np.clip(parts["communication"], bounds[0], bounds[1])), room)
    return {**parts, "communication": communication, **_to(room - communication, sharing)}


def _communication_bounds(
    blocked: Maybe[tuple[float, float] | None], parts: Mapping[str, float]
) -> tuple[float, float, float] | None:
    """Return the least and the most that communication can be of the mean steady step, and their standard error, ns.

    Whoever waits for a collective stands still; so may what is neither communication nor computation. None: not told.
    """
    known = blocked.get() if parts.get("communication") and not parts.get(BUBBLE) else None
    if known is None:
        return None
    others = sum(ns for c, ns in parts.items() if c not in ("communication", "computation"))
    return max(known[0] - others, 0.0), known[0], known[1]


def _within(recorded: Mapping[tuple[str, str], float], room: float) -> dict[str, float]:
    """Add up the recorded ns by category; together no more than there is room for."""
    found: dict[str, float] = {}
    for (kind, _), ns in recorded.items():
        found[kind] = found.get(kind, 0.0) + ns
    total = sum(found.values())
    return {kind: ns * room / total for kind, ns in found.items()} if total > room else found


def _scaled(
    partition: Maybe[dict[str, iv.Intervals]],
    by_phase: dict[tuple[str, str], float],
    idle_ns: Maybe[float],
    host_phases: dict[str, iv.Intervals],
    rank: RankFacts,
    t: Timing,
    parts: Mapping[str, iv.Intervals],
) -> dict[str, float]:
    """Return the parts' mean ns a step, each phase of the training thread stretched to its untraced length.

    `parts` are without what was recorded in every step, and so are both lengths of a phase. An optimizer that waits for
    other ranks within its step (Horovod's, ZeRO's) computes the same in each: where it takes longer in the other steps
    than in those that the profiler slowed, it waits for longer.
    """
    n = len(t.windows)
    recorded = iv.merge(
        np.concatenate([partition.get().get(kind, iv.EMPTY) for kind in _of_every_step(by_phase, idle_ns, rank)])
    )
    during_phase = {p: iv.subtract(s, recorded) for p, s in host_phases.items()}
    traced = {p: iv.total(s) / n for p, s in during_phase.items()}
    untraced = {p: t.phases.get(p, 0.0) for p in PHASES}
    untraced["rest"] = max(t.step_ns - sum(untraced.values()), 0.0)
    for (_, phase), ns in _recorded(by_phase, idle_ns, rank).items():
        at = phase if phase in untraced else "rest"
        untraced[at] = max(untraced[at] - ns, 0.0)
    scaled = dict.fromkeys(parts, 0.0)
    for phase, during in during_phase.items():
        if traced[phase] <= 0:
            continue
        took = {category: iv.total(iv.intersect(part, during)) / n for category, part in parts.items()}
        longer = untraced[phase] - traced[phase]
        if phase == "optimizer" and longer > 0 and took.get("communication"):
            took["communication"] += longer
        else:
            took = {category: ns * untraced[phase] / traced[phase] for category, ns in took.items()}
        scaled = {category: ns + took[category] for category, ns in scaled.items()}
    return scaled


def _to(total: float, parts: Mapping[str, float]) -> dict[str, float]:
    """Scale parts so that they add up to a total."""
    have = sum(parts.values())
    return {c: ns * total / have for c, ns in parts.items()} if have else {"other": total}


def _light_only(
    by_phase: Maybe[dict[tuple[str, str], float]], idle_ns: Maybe[float], rank: RankFacts, t: Timing
) -> dict[str, float]:
    """Without a trace only what every step recorded is known, and only where no device could be busy meanwhile."""
    if t.source != "steps":
        raise NotMeasured("no steps were traced")
    if (rank.facts.get("device") or {}).get("type") != "cpu":
        raise NotMeasured("without a trace nobody knows what the device did while the training thread waited")
    stalled = _within(_recorded(by_phase.get(), idle_ns, rank), t.step_ns)
    left = t.step_ns - sum(stalled.values())
    fetched = sum(ns for (_, phase), ns in by_phase.get().items() if phase == "fetch")
    wait = min(max(t.phases.get("fetch", 0.0) - fetched, 0.0), left)
    return {**stalled, "input_wait": wait, "other": left - wait}


def part(breakdown: pd.DataFrame, *categories: str) -> dict[int, float]:
    """Return the ns of the mean steady step that go to some categories: rank → ns, 0 where a rank has none of it."""
    return by_rank(breakdown.assign(ns=breakdown["ns"].where(breakdown["category"].isin(categories), 0.0)), "ns")


def part_least(breakdown: pd.DataFrame, *categories: str) -> float:
    """Return the least of such a part in any traced step, ns, on the rank that has most of it."""
    frame = breakdown
    frame = frame[frame["category"].isin(categories)]
    by = frame.groupby("rank")[["ns", "least_ns"]].sum().sort_values("ns")
    return float(by["least_ns"].iloc[-1]) if len(by) else 0.0


def part_noise(breakdown: pd.DataFrame, *categories: str) -> float:
    """Return the standard error of such a part, in ns: the largest of all ranks'."""
    noise = breakdown.loc[breakdown["category"].isin(categories), "noise_ns"]
    return float(noise.max()) if len(noise) else 0.0
