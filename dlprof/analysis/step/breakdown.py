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
from dlprof.analysis.engine import Maybe, RankFacts, by_rank, per_rank, within_rank
from dlprof.analysis.step.stalls import KINDS, stalled
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import DeviceSets
from dlprof.analysis.timeline.idle import Idle
from dlprof.analysis.timeline.steps import PHASES, Timing, on_device_clock, standard_error
from dlprof.errors import NotMeasured
from dlprof.result import CATEGORIES

_BUBBLE = "pipeline_bubble"

# What a device does takes the same time whether or not a profiler slows its host.
_ON_DEVICE = ("computation", "communication", "copy", _BUBBLE, "launch_latency", "queued_wait")

# What the engine itself takes between two operators is tens of µs at most; waiting for a collective takes longer.
_LEAST_WAIT_NS = 100_000

# Where a host runs ahead of its device, its waits for data come in bursts: means of so many stretches tell how sure
# their mean is.
STRETCHES = 10

# A wait for data of which less than this share counts is hidden in part.
_HIDDEN = 0.9

# Collectives between two stages of a pipeline.
_POINT_TO_POINT = ("send", "recv", "send_recv")


@within_rank
def partition(
    timing: Timing,
    on_training_thread: pd.DataFrame,
    has_device: bool,
    spans: Maybe[pd.DataFrame],
    stalls: Maybe[pd.DataFrame],
    device_sets: Maybe[DeviceSets],
    idle: Maybe[Idle],
    pipeline_bubble: Maybe[iv.Intervals],
    cpu_computation: Maybe[iv.Intervals],
    communication: Maybe[iv.Intervals],
    rank: RankFacts,
) -> dict[str, iv.Intervals]:
    """Return the parts of the steady traced steps: category → time; disjoint, and together exactly those steps."""
    left = iv.merge(timing.windows)
    parts: dict[str, iv.Intervals] = {}
    for category, claim in _claims(
        on_training_thread,
        has_device,
        spans,
        stalls,
        device_sets,
        idle,
        pipeline_bubble,
        cpu_computation,
        communication,
        rank,
    ):
        got = iv.intersect(left, claim)
        parts[category] = iv.merge(parts[category], got) if category in parts else got
        left = iv.subtract(left, got)
    parts["other"] = iv.merge(parts.get("other", iv.EMPTY), left)
    return parts


def _claims(
    on_training_thread: pd.DataFrame,
    has_device: bool,
    spans: Maybe[pd.DataFrame],
    stalls: Maybe[pd.DataFrame],
    device_sets: Maybe[DeviceSets],
    idle: Maybe[Idle],
    pipeline_bubble: Maybe[iv.Intervals],
    cpu_computation: Maybe[iv.Intervals],
    communication: Maybe[iv.Intervals],
    rank: RankFacts,
) -> list[tuple[str, iv.Intervals]]:
    """List who claims time, first come first served; what nobody claims is "other"."""
    everything = np.array([[np.iinfo(np.int64).min, np.iinfo(np.int64).max]], dtype=np.int64)
    fetch = host.cover(on_training_thread, host.is_kind(on_training_thread, "fetch"))
    optimizer = host.cover(
        on_training_thread, host.is_named(on_training_thread, "Optimizer.step#", "dlprof::optimizer")
    )
    if not has_device and _belongs_to_a_device(spans, rank):
        raise NotMeasured(f"the job runs on a GPU, but the trace holds nothing of the GPU's work ({_why_none(rank)})")
    stops = [(kind, stalled(stalls, kind)) for kind in KINDS]
    if has_device:
        sets, why = device_sets.get(), idle.get()
        return [
            ("computation", sets.computation),
            ("communication", iv.subtract(sets.communication, pipeline_bubble.get())),
            ("copy", sets.copy),
            (_BUBBLE, pipeline_bubble.get()),
            ("queued_wait", why.queued),
            ("launch_latency", why.latency),
            # The host was late from here on.
            *stops,
            ("input_wait", fetch),
            ("optimizer_host", optimizer),
            ("host", why.late),
        ]
    return [
        *stops,
        # The loader's own operators (decoding, collating) are no computation of the model's.
        ("input_wait", fetch),
        ("computation", cpu_computation.get()),
        (_BUBBLE, pipeline_bubble.get()),
        ("communication", communication.get()),
        ("optimizer_host", optimizer),
        ("host", everything),
    ]


@within_rank
def pipeline_bubble(
    has_pipeline: bool,
    spans: Maybe[pd.DataFrame],
    is_on_device: Maybe[NDArray[np.bool_]],
    has_device: bool,
    outside_chunks: Maybe[iv.Intervals],
) -> iv.Intervals:
    """Return the time in which a stage may have nothing to work on; what is computed meanwhile claims it first.

    On a device that is where it only sends to and receives from the neighbours; else what schedule.step() spends
    outside its chunks and outside collectives of other kinds. Empty where no pipeline is known.
    """
    if not has_pipeline:
        return iv.EMPTY
    events = spans.get()
    sent = host.is_kind(events, "communication") & (is_on_device.get() == has_device)
    between = host.is_one_of(events["collective"], *_POINT_TO_POINT)
    others = host.cover(events, sent & ~between)
    waits = host.cover(events, sent & between) if has_device else outside_chunks.get()
    return iv.subtract(waits, others)


def _belongs_to_a_device(spans: Maybe[pd.DataFrame], rank: RankFacts) -> bool:
    """Return whether the job trains on a device, as far as its record, its backend or its runtime calls show."""
    recorded = (rank.facts.get("device") or {}).get("type")
    if recorded:
        return bool(recorded != "cpu")
    events = spans.get()
    shows = host.is_kind(events, "runtime") | host.is_named(events, "nccl:")
    return rank.trace_facts.get("backend") == "nccl" or bool(shows.any())


def _why_none(rank: RankFacts) -> str:
    """Say why a trace holds nothing of a GPU: what the profiler complained of, or that it was not asked."""
    errors = (rank.facts.get("window") or {}).get("errors") or rank.trace_facts.get("errors")
    if errors:
        return f"the profiler said: {errors[0]}"
    return "`dlprof doctor` tells what is in the way" if rank.facts else "record ProfilerActivity.CUDA"


@within_rank
def cpu_computation(on_training_thread: pd.DataFrame, communication: iv.Intervals) -> iv.Intervals:
    """Return the time in which the training thread runs an operator, or code that torch.compile made.

    Hooks and autograd functions in Python wait for collectives inside what the profiler shows as an operator (FSDP's
    do): where nothing else runs in it while a collective is in flight, that is no computation.
    """
    works = host.is_kind(on_training_thread, "op") | (
        host.is_kind(on_training_thread, "annotation") & host.is_named(on_training_thread, *host.COMPILED)
    )
    fetch = host.cover(on_training_thread, host.is_kind(on_training_thread, "fetch"))
    # A call that blocks in a collective is an operator to the profiler, and may lie inside one.
    blocked = host.cover(
        on_training_thread,
        host.is_kind(on_training_thread, "communication") & host.is_named(on_training_thread, "c10d", "_c10d"),
    )
    frames = works & host.is_frame(on_training_thread)
    between = iv.subtract(host.cover(on_training_thread, frames), host.cover(on_training_thread, works & ~frames))
    waits = iv.intersect(between[between[:, 1] - between[:, 0] >= _LEAST_WAIT_NS], communication)
    return iv.subtract(iv.subtract(iv.subtract(host.cover(on_training_thread, works), fetch), blocked), waits)


@within_rank
def communication(has_device: bool, device_sets: Maybe[DeviceSets], spans: Maybe[pd.DataFrame]) -> iv.Intervals:
    """Return the time in which a collective is in flight: on the device where there is one, else on the host."""
    if has_device:
        return device_sets.get().communication
    events = spans.get()
    return host.cover(events, host.is_kind(events, "communication"))


@within_rank
def exposed_communication(partition: dict[str, iv.Intervals]) -> iv.Intervals:
    """Return the time of the steady traced steps in which a collective is in flight and nothing is computed."""
    return partition.get("communication", iv.EMPTY)


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
    if t.source == "steps" and (_BUBBLE, "rest") in _recorded(by_phase.get(), idle_ns, rank):
        known[_BUBBLE] = float(pipeline.get()["noise_ns"].iloc[0])
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
    return {**by_phase, (_BUBBLE, "rest"): bubble} if bubble else by_phase


def _of_every_step(by_phase: dict[tuple[str, str], float], idle_ns: Maybe[float], rank: RankFacts) -> tuple[str, ...]:
    """Name the categories that are taken from all steps and not from the traced ones."""
    return (*KINDS, *(c for c, _ in _recorded(by_phase, idle_ns, rank) if c == _BUBBLE))


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
    known = blocked.get() if parts.get("communication") and not parts.get(_BUBBLE) else None
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


@within_rank
def host_phases(on_training_thread: pd.DataFrame, timing: Timing) -> dict[str, iv.Intervals]:
    """Return the training thread's phases within the steady traced steps, on the host's clock.

    Disjoint; "rest" is what remains.
    """
    left = iv.merge(timing.host_windows)
    found = {}
    for phase in PHASES:
        of = (
            host.is_kind(on_training_thread, "fetch")
            if phase == "fetch"
            else host.is_named(on_training_thread, f"dlprof::{phase}")
        )
        during = host.cover(on_training_thread, of)
        found[phase] = iv.intersect(left, during)
        left = iv.subtract(left, during)
    found["rest"] = left
    return found


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
