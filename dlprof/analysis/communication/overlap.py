"""What of the communication is exposed, which of it is gradients, and what computation could still hide."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis import settings
from dlprof.analysis.communication.bandwidth import bandwidth, size_classes
from dlprof.analysis.communication.collectives import collectives
from dlprof.analysis.communication.matching import waits
from dlprof.analysis.engine import JOB, RANK, Frame, Job, Maybe, RankFacts, across_ranks, maybe, needs, per_rank
from dlprof.analysis.step.breakdown import breakdown, part, part_noise
from dlprof.analysis.step.partition import communication, cpu_computation, host_phases
from dlprof.analysis.step.savings import own_time
from dlprof.analysis.stragglers.own_time import busy
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import DeviceSets, device_sets, device_work, has_device
from dlprof.analysis.timeline.host import training_lane
from dlprof.analysis.timeline.steady import light_steps, standard_error
from dlprof.analysis.timeline.steps import Timing, mean_step_ns, timing

# Kernels that other threads than the training loop's launch are the backward pass, where they are so much of all.
BACKWARD_SHARE = 0.1

# Exchanges of gradients, which are made once a step; the others go with each pass.
GRADIENTS = ("all_reduce", "reduce_scatter")

# What a forward pass exchanges with a counterpart in the backward pass.
_BOTH_WAYS = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")


@per_rank
def overlap(
    timing: Timing = needs(timing),
    has_device: bool = needs(has_device),
    device_sets: Maybe[DeviceSets] = maybe(device_sets),
    cpu_computation: Maybe[iv.Intervals] = maybe(cpu_computation),
    communication: iv.Intervals = needs(communication),
    spans: Maybe[Frame] = maybe(schema.SPANS),
    training_lane: Maybe[str] = maybe(training_lane),
    device_work: Maybe[Frame] = maybe(device_work),
    host_phases: Maybe[dict[str, iv.Intervals]] = maybe(host_phases),
) -> pd.DataFrame:
    """Return a rank's computation of the mean traced step: computation_ns, beside_ns, backward_ns, backward_beside_ns.

    `beside` is the part that overlaps with communication. Of the backward pass NaN where nothing shows which it is.
    """
    if has_device:
        computed = device_sets.get().computation
        backward = _backward(spans.get(), training_lane.get(), device_work.get())
    else:
        computed = cpu_computation.get()
        backward = host_phases.get().get("backward", iv.EMPTY)
    computed = iv.intersect(iv.merge(timing.windows), computed)
    beside = iv.intersect(computed, communication)
    n = max(len(timing.windows), 1)
    known = n if len(backward) else math.nan
    return pd.DataFrame(
        {
            "computation_ns": [iv.total(computed) / n],
            "beside_ns": [iv.total(beside) / n],
            "backward_ns": [iv.total(iv.intersect(computed, backward)) / known],
            "backward_beside_ns": [iv.total(iv.intersect(beside, backward)) / known],
        }
    )


def _backward(spans: pd.DataFrame, training_lane: str, device_work: pd.DataFrame) -> iv.Intervals:
    """Return when the device computes for the backward pass: autograd launches that from a thread of its own."""
    calls = host.is_kind(spans, "runtime") & (spans["launch"].to_numpy() >= 0)
    others = spans["launch"].to_numpy()[calls & ~host.is_one_of(spans["lane"], training_lane)]
    kernels = host.is_kind(device_work, "kernel")
    found = host.cover(device_work, kernels & host.is_among(device_work["launch"].to_numpy(), others))
    enough = iv.total(found) >= BACKWARD_SHARE * iv.total(host.cover(device_work, kernels))
    return found if enough else iv.EMPTY


@across_ranks
def free_to_hide(
    overlap: Frame = needs(overlap), breakdown: Frame = needs(breakdown), job: Job = needs(JOB)
) -> dict[int, float]:
    """Return how much computation of the mean step hides nothing yet and could, ns a rank.

    Only the backward pass counts if it is known, as there are no gradients before it. In a sharded model, which gathers
    throughout the step, all computation counts.
    """
    frame = overlap.set_index("rank")
    free = frame["computation_ns"] - frame["beside_ns"]
    backward = frame["backward_ns"] - frame["backward_beside_ns"]
    if not settings.model(job).get("fsdp"):
        free = backward.where(backward.notna(), free)
    steady = pd.Series(part(breakdown, "computation"), dtype=float)
    scale = steady / frame["computation_ns"].replace(0.0, np.nan)
    return {int(str(r)): float(ns) for r, ns in (free * scale).fillna(0.0).clip(lower=0.0).items()}


@across_ranks
def idle_cores(
    busy: Maybe[Frame] = maybe(busy), mean_step_ns: Maybe[float] = maybe(mean_step_ns), job: Job = needs(JOB)
) -> float:
    """Return for how long of the mean step a CPU run's cores stand idle (the busiest host's), ns; infinity: unknown.

    Whatever two ranks do at the same time takes its CPU time: a step is no shorter than all of it on all cores.
    """
    if not settings.on_cpu(job) or busy.lacking:
        return math.inf
    used = busy.get().groupby("rank")[["cpu_ns", "time_ns"]].sum()
    share = used["cpu_ns"] / used["time_ns"].clip(lower=1)
    there = pd.Series({r: settings.cores(job, r) for r in job.ranks}, dtype=float).reindex(share.index)
    hosts = pd.Series({r: settings.host(job, r) for r in job.ranks}).reindex(share.index)
    on_host = share.groupby(hosts).transform("sum")
    # Ranks that use more than one of them may have cores of their own.
    taken = (on_host.where(on_host <= there, share) / there).max()
    return max(0.0, 1.0 - float(taken)) * mean_step_ns.get() if math.isfinite(taken) else math.inf


@across_ranks
def exposed_transfer(
    own_time: Frame = needs(own_time),
    breakdown: Frame = needs(breakdown),
    busy: Maybe[Frame] = maybe(busy),
    job: Job = needs(JOB),
) -> pd.Series[float]:
    """Return the exposed communication of each rank less its waiting for others, ns of the mean step.

    Where ranks are missing or were not traced, all exposed communication of the rank that has least counts as transfer.
    A rank on a CPU that was not traced has no more of it than nothing else is known to explain.
    """
    own = own_time.set_index("rank")
    bare = pd.Series(part(breakdown, "communication"), dtype=float).reindex(own.index).fillna(0.0)
    if own["known"].all():
        return (bare - own["wait_ns"]).clip(lower=0.0)
    if own["traced"].any():
        bare = bare.where(own["traced"])
        if settings.on_cpu(job):
            bare = bare.fillna(_unexplained(own, breakdown, busy))
    return pd.Series(float(bare.min()), index=own.index)


def _unexplained(own: pd.DataFrame, breakdown: pd.DataFrame, busy: Maybe[pd.DataFrame]) -> pd.Series[float]:
    """Return for how long of the mean step nothing is known of each rank on a CPU, ns.

    Where the use of its cores tells it, its training thread stood still then, and not to wait for data.
    """
    left = pd.Series(part(breakdown, "other"), dtype=float).reindex(own.index).fillna(0.0)
    if busy.lacking or not busy or not busy.get()["alone"].all():
        return left
    used = busy.get().groupby("rank")[["busy_ns", "time_ns"]].sum()
    still = (1 - used["busy_ns"] / used["time_ns"].clip(lower=1)).clip(lower=0.0).reindex(own.index) * own["step_ns"]
    fetched = pd.Series(part(breakdown, "input_wait"), dtype=float).reindex(own.index).fillna(0.0)
    return left.clip(upper=(still - fetched).clip(lower=0.0))


@across_ranks
def transfer_noise(
    own_time: Frame = needs(own_time), waits: Maybe[Frame] = maybe(waits), breakdown: Maybe[Frame] = maybe(breakdown)
) -> float:
    """Return how well the exposed transfer is known: the standard error of its mean over its mean.

    Waiting varies far more, for it is the difference of two ranks' jitter. A transfer is the same for all its ranks:
    their mean counts as one value a step. Where waiting is not known, all communication counts.
    """
    if own_time["known"].all():
        steps = waits.get()
        each = (
            (steps["exposed_ns"] - steps["wait_ns"]).clip(lower=0).groupby(steps["step"]).mean().to_numpy(dtype=float)
        )
        noise, mean = standard_error(each), each.mean() if len(each) else 0.0
    else:
        noise = part_noise(breakdown.get(), "communication")
        mean = max(part(breakdown.get(), "communication").values(), default=0.0)
    return float(noise / mean) if mean else 0.0


@per_rank
def accumulation(
    steps: Maybe[Frame] = maybe(schema.STEPS),
    light_steps: Maybe[Frame] = maybe(light_steps),
    collectives: Maybe[Frame] = maybe(collectives),
    timing: Maybe[Timing] = maybe(timing),
) -> pd.DataFrame:
    """Return one row: batches for each step of the optimizer, and between.

    `between` is what a batch without a step of the optimizer exchanges of gradients, over what one with such a step
    does: in bytes, or in time where those are not known. NaN: not recorded, or not both kinds of batches were traced.
    """
    batches, between = np.nan, np.nan
    if steps:
        marked = light_steps.get()
        marked = marked[marked["kind"] == "train"].drop_duplicates("step").set_index("step")
        updates = marked.index[marked["optimizer_steps"] > 0].to_numpy()
        batches = float(np.median(np.diff(updates))) if len(updates) > 1 else np.nan
        found = collectives.get()
        found = found[found["collective"].isin(GRADIENTS)]
        sized = len(found) > 0 and (found["bytes"] > 0).all()
        much = found["bytes"] if sized else found["end_ns"] - found["start_ns"]
        traced = pd.Index(timing.get().numbers).intersection(marked.index)
        each = much.groupby(found["step"]).sum().reindex(traced).fillna(0.0)
        stepped = marked["optimizer_steps"].reindex(traced) > 0
        if stepped.any() and not stepped.all() and each[stepped].any():
            between = float(each[~stepped].mean() / each[stepped].mean())
    return pd.DataFrame({"batches": [batches], "between": [between]})


@per_rank
def in_forward(
    collectives: Frame = needs(collectives),
    host_phases: Maybe[dict[str, iv.Intervals]] = maybe(host_phases),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """List what kinds of collectives the forward pass issues: collective, members, size (as in `bandwidth`), each once.

    Where no wrapper exchanges gradients in the backward pass, what that issues among the same ranks and of that size
    too: what is gathered forwards is reduced backwards. Empty where nothing shows the forward pass.
    """
    kinds = collectives.assign(size=size_classes(collectives["bytes"]))
    if not rank.facts:  # only dlprof names the passes
        kinds = kinds.iloc[:0]
    made = kinds["made_ns"].to_numpy()
    phases = host_phases.get() if len(kinds) else {}
    inside = iv.holds(phases.get("forward", iv.EMPTY), made)
    if not any(model.get("ddp") or model.get("fsdp") for model in rank.facts.get("models") or ()):
        alike = pd.MultiIndex.from_frame(kinds[["members", "size"]])
        forward = alike[inside & kinds["collective"].isin(_BOTH_WAYS).to_numpy()]
        inside |= iv.holds(phases.get("backward", iv.EMPTY), made) & alike.isin(forward)
    return kinds[inside][["collective", "members", "size"]].drop_duplicates(ignore_index=True)


@across_ranks
def gradients(
    bandwidth: Frame = needs(bandwidth), in_forward: Maybe[Frame] = maybe(in_forward), job: Job = needs(JOB)
) -> pd.DataFrame:
    """Return the rows of `bandwidth` that may be exchanges of gradients.

    What the forward pass reduces are activations, and so is what the backward pass reduces of the same kind. With
    DistributedDataParallel that takes sizes: without them its own exchanges are of the same kind.
    """
    reduced = bandwidth[bandwidth["collective"].isin(GRADIENTS)]
    if in_forward.lacking:
        return reduced
    forward = in_forward.get()
    if settings.model(job).get("ddp"):
        forward = forward[forward["size"] >= 0]
    return reduced[~among(reduced, forward)]


def among(frame: pd.DataFrame, kinds: pd.DataFrame) -> pd.Series[bool]:
    """Return which rows are of the same collective, members and class of size as a row of another frame."""
    key = ["collective", "members", "size"]
    found = pd.MultiIndex.from_frame(frame[key]).isin(pd.MultiIndex.from_frame(kinds[key]))
    return pd.Series(found, index=frame.index, dtype=bool)


@across_ranks
def activations(
    bandwidth: Frame = needs(bandwidth),
    gradients: Frame = needs(gradients),
    in_forward: Maybe[Frame] = maybe(in_forward),
    job: Job = needs(JOB),
) -> str:
    """Return the collective of the forward pass that makes up most of the exposed communication; else "".

    A sharded model gathers its parameters there, which may be gathered earlier.
    """
    if settings.model(job).get("fsdp") or in_forward.lacking:
        return ""
    theirs = among(bandwidth, in_forward.get()) & ~bandwidth.index.isin(gradients.index)
    of = bandwidth["exposed_ns"] * bandwidth["ranks"]
    by = of[theirs].groupby(bandwidth["collective"]).sum()
    return str(by.idxmax()) if by.sum() > of.sum() / 2 else ""
