"""What of the communication is exposed, what computation could still hide of it, and the step if the ranks
exchanged differently.

Every plan follows from this run's figures: the exposed transfer, the computation that hides nothing yet, and the time
of a collective to start and for each byte, from two classes of size. If these are not known, the plan gives the reason
in the place of a figure. The changes depend on the collectives and on the wrapper of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from msgspec import Struct
from msgspec.structs import asdict

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis import settings
from dlprof.analysis.communication.bandwidth import CLASSES, bandwidth, size_classes, transfers
from dlprof.analysis.communication.collectives import NO_SIZES, SENT, collectives, waits
from dlprof.analysis.communication.wrappers import bucket_copies, buffer_copies, sharding
from dlprof.analysis.engine import (
    JOB,
    RANK,
    Frame,
    Job,
    Maybe,
    RankFacts,
    across_ranks,
    by_rank,
    maybe,
    needs,
    per_rank,
)
from dlprof.analysis.step.breakdown import breakdown, part, part_noise
from dlprof.analysis.step.partition import communication, cpu_computation, host_phases
from dlprof.analysis.step.savings import own_time, saving
from dlprof.analysis.stragglers.own_time import busy
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import DeviceSets, device_sets, device_work, has_device
from dlprof.analysis.timeline.host import training_lane
from dlprof.analysis.timeline.steady import light_steps, standard_error
from dlprof.analysis.timeline.steps import Timing, mean_step_ns, timing
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.result import Change, change
from dlprof.units import UNKNOWN, count, digits, duration, size

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
    light_steps: Maybe[Frame] = maybe(light_steps),
    collectives: Maybe[Frame] = maybe(collectives),
    timing: Maybe[Timing] = maybe(timing),
    host_phases: Maybe[dict[str, iv.Intervals]] = maybe(host_phases),
) -> pd.DataFrame:
    """Return one row: batches for each step of the optimizer, and between.

    `between` is what a backward pass before the last one of a step exchanges of gradients, over what the last one does:
    in bytes, or in time where those are not known. NaN: not recorded, or no step has several.
    """
    batches, between = np.nan, np.nan
    if light_steps:
        marked = light_steps.get()
        marked = marked[(marked["kind"] == "train") & (marked["optimizer_steps"] > 0)]
        batches = float(marked["backwards"].median()) if len(marked) else np.nan
    if batches > 1 and host_phases:
        found = collectives.get()
        found = found[found["collective"].isin(GRADIENTS)]
        sized = len(found) > 0 and (found["bytes"] > 0).all()
        much = (found["bytes"] if sized else found["end_ns"] - found["start_ns"]).to_numpy(dtype=float)
        made, passes = found["made_ns"].to_numpy(), host_phases.get()["backward"]
        shares = []
        for begin, end in timing.get().host_windows:  # a device may be steps behind
            begins = passes[(passes[:, 0] >= begin) & (passes[:, 0] < end), 0]
            inside = (made >= begin) & (made < end)
            of = np.searchsorted(begins, made[inside], side="right") - 1
            last = much[inside][of == len(begins) - 1].sum()
            if len(begins) > 1 and last > 0:
                shares.append(much[inside][(of >= 0) & (of < len(begins) - 1)].sum() / (len(begins) - 1) / last)
        between = float(np.mean(shares)) if shares else np.nan
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


# Bucket sizes that are tried, MB; 25 is DistributedDataParallel's default.
BUCKETS_MB = (1, 5, 10, 25, 50, 100, 200)

# The bytes of a bucket by default, and the fewest buckets that there should be.
DDP_BUCKET = 25 << 20
FEWEST = 4

# A class of size that ends at 64 KiB: even 10 Gbit/s carries that in 52 µs, about what starting a collective takes.
SMALL_BYTES = CLASSES[1]

# Two classes of size separate starting from moving if one is so many times as large and each has so many collectives.
APART = 4.0
ENOUGH = 3

# Gradients are exchanged needlessly if a batch without an optimizer step exchanges at least this share of the time of a
# batch with one. The value is a choice, well above the exchange of a metric.
FOR_NOTHING = 0.5

_KEPT_WHOLE = (
    "`set_requires_gradient_sync(False)` and `set_reshard_after_backward(False)` of the sharded model for all batches"
    " but the last one before the optimizer steps (`no_sync()` of `FullyShardedDataParallel`): gradients and parameters"
    " stay whole between them, which takes their memory; `reshard_after_forward=False` as well, else the backward"
    " passes gather again"
)
_NO_SYNC = (
    "`with model.no_sync():` around all batches but the last one before the optimizer steps, around the forward pass"
    " too: that decides whether the backward pass exchanges"
)

# Notable, high and severe are 5, 10 and 30 % with the analysis tools that grade exposed communication.
NOTABLE_SHARE = 0.05


class Fit(Struct, frozen=True):
    """The time of one collective: to start, ns, and for each byte, ns."""

    start_ns: float
    byte_ns: float


@across_ranks
def fitted(transfers: Frame = needs(transfers)) -> Fit | None:
    """Fit start and byte time to the smallest and largest class of all-reduces; None where their sizes are alike."""
    one = transfers.query("collective == 'all_reduce' and bytes > 0 and transfer_ns > 0")
    if not len(one):
        return None
    one = one[one["members"] == one.groupby("members")["transfer_ns"].sum().idxmax()]
    by = one.groupby("size").agg(bytes=("bytes", "median"), ns=("transfer_ns", "median"), n=("bytes", "size"))
    by = by[by["n"] >= ENOUGH].sort_values("bytes").astype(float)
    if len(by) < 2 or by["bytes"].iloc[-1] < APART * by["bytes"].iloc[0]:
        return None
    byte = (by["ns"].iloc[-1] - by["ns"].iloc[0]) / (by["bytes"].iloc[-1] - by["bytes"].iloc[0])
    return Fit(max(by["ns"].iloc[0] - byte * by["bytes"].iloc[0], 0.0), byte) if byte > 0 else None


@across_ranks
def sized_collectives(
    bandwidth: Frame = needs(bandwidth), fitted: Fit | None = needs(fitted), job: Job = needs(JOB)
) -> pd.DataFrame:
    """Return the rows of `bandwidth` without sends, with each_bytes (mean size), calls (a step and rank), limit_bytes.

    Below limit_bytes a collective is small. Sizes that the trace lacks are estimated from the model's parameters; NaN
    where those are not known either. Raises NotMeasured where no size is known.
    """
    frame = bandwidth[bandwidth["collective"] != SENT]
    if not len(frame):
        raise DoesNotApply("the ranks only send and receive: they run no collective")
    each = (frame["bytes"] / frame["count"]).fillna(_by_parameters(job, frame))
    if each.isna().all():
        raise NotMeasured(NO_SIZES)
    fit = None if settings.on_cpu(job) else fitted
    limit = SMALL_BYTES if fit is None else max(SMALL_BYTES, fit.start_ns / fit.byte_ns)
    # Groups of different ranks exchange at the same time.
    calls = frame["count"] * frame["ranks"] / job.world_size
    return frame.assign(each_bytes=each, calls=calls, limit_bytes=limit)


def _by_parameters(job: Job, frame: pd.DataFrame) -> pd.Series[float]:
    """Return the mean size of the reductions of a DistributedDataParallel or FSDP2 model, and of FSDP2's gathers; else
    NaN.

    Each bucket or unit is reduced once a step. (gloo's reduce-scatter is an all-reduce.)
    """
    model = settings.model(job)
    held = model.get("parameter_bytes") if model.get("ddp") or model.get("fsdp") else None
    unsized = frame["bytes"].isna()
    reduces = frame["collective"].isin(("all_reduce", "reduce_scatter")) & unsized
    gathers = (frame["collective"] == "all_gather") & unsized & bool(model.get("fsdp"))
    times = float(frame["count"][reduces].sum())
    known = pd.Series(math.nan, index=frame.index)
    return known.mask(reduces | gathers, held / times) if isinstance(held, int) and times else known


class Plan(Struct, frozen=True):
    """A change of how the ranks exchange, and what it gains; NaN: unknown."""

    change: str
    key: str
    gain_ns: float
    why: str
    bucket_cap_mb: float = math.nan


Transfer: TypeAlias = "pd.Series[float]"  # of gradients, exposed, by rank, ns

# How much shorter the job's step is if each rank's own time is shorter by so much, ns.
Saves = Callable[[Transfer], float]


@across_ranks
def exchange_plans(
    exposed_transfer: pd.Series[float] = needs(exposed_transfer),
    free_to_hide: dict[int, float] = needs(free_to_hide),
    overlap: Frame = needs(overlap),
    idle_cores: float = needs(idle_cores),
    bandwidth: Frame = needs(bandwidth),
    gradients: Frame = needs(gradients),
    activations: str = needs(activations),
    accumulation: Frame = needs(accumulation),
    transfers: Frame = needs(transfers),
    fitted: Fit | None = needs(fitted),
    buffer_copies: Maybe[Frame] = maybe(buffer_copies),
    bucket_copies: Maybe[Frame] = maybe(bucket_copies),
    sharding: Maybe[Frame] = maybe(sharding),
    own_time: Frame = needs(own_time),
    job: Job = needs(JOB),
) -> pd.DataFrame:
    """Predict what each change of the exchange gains: change, key, gain_ns (NaN: unknown), why, bucket_cap_mb.

    Keys: hidden, buffers (not broadcast any more), bucket, once (for each step of the optimizer), half and quarter (as
    many exchanges), bytes (half as many), powersgd. bucket_cap_mb is the value for the key `bucket`, NaN for the
    others. `why` says what is assumed, or why the gain is not known.
    """
    saves, model = partial(saving, own_time), settings.model(job)
    of = "its backward pass" if overlap["backward_ns"].notna().all() and not model.get("fsdp") else "computation"
    free = pd.Series(free_to_hide, dtype=float)
    if not own_time["traced"].all():  # it is not known for ranks without a trace
        free = free.reindex(exposed_transfer.index, fill_value=float(free.min()))
    free = free.reindex(exposed_transfer.index).fillna(0.0)
    least = float(free.min())
    why = f"{duration(least)} of {of} hides nothing yet" if least > 0 else f"nothing of {of} is free to hide it"
    last = 0.0 if activations else _last_bucket(gradients, job)
    gain = saves((exposed_transfer * (1 - last)).clip(upper=free))
    if last:
        held = size(last * float(gradients["bytes"].sum()))
        why += f"; the last bucket of gradients, {held}, comes when nothing is left to compute"
    if activations:
        why = "what the forward pass exchanges is needed at once: another part of the batch must compute meanwhile"
    if idle_cores < gain:
        why = f"sending takes cores as well, and they stand idle for {duration(idle_cores)} of the step"
    plans = [Plan("hidden behind computation", "hidden", min(gain, idle_cores), why)]
    copies = by_rank(buffers, "ns") if (buffers := buffer_copies.or_none()) is not None else {}
    plans += _without_buffers(bandwidth, activations, model, exposed_transfer, copies, saves)
    exposed, grads = ((frame["exposed_ns"] * frame["ranks"]).sum() for frame in (bandwidth, gradients))
    if not grads > 0:
        return pd.DataFrame(map(asdict, plans))
    transfer, ddp = exposed_transfer * (grads / exposed), model.get("ddp")
    if ddp:
        plans.append(_rebucketed(bandwidth, fitted, overlap, ddp.get("bucket_cap_mb"), transfer, saves))
    elif not model.get("fsdp") and not (gradients["bytes"] > 0).any() and gradients["count"].sum() >= _FEW:
        many = count(round(float(gradients["count"].sum())), "exchange")
        why = f"{many} become a few, in buckets: what starting each takes is not known, as their sizes are not"
        plans[0] = Plan("in buckets, hidden behind computation", "hidden", saves(transfer), why)
    batches, between = float(accumulation["batches"].mean()), float(accumulation["between"].min(skipna=False))
    if model.get("fsdp") and batches > 1 and between >= FOR_NOTHING:
        what = "exchange once for each step of the optimizer (`set_requires_gradient_sync`)"
        why = (
            f"the optimizer steps once for {digits(batches)} batches, and each of them gathers parameters and exchanges"
            " gradients: kept whole between them, once is the same"
        )
        around = by_rank(sharding.get(), "around_ns") if settings.on_cpu(job) and sharding.or_none() is not None else {}
        plans.append(Plan(what, "once", saves(_needless(exposed_transfer, around, batches)), why))
    elif ddp and batches > 1 and between >= FOR_NOTHING:
        what, more = "exchange once for each step of the optimizer (`no_sync()`)", (batches - 1) * between
        why = (
            f"the optimizer steps once for {digits(batches)} batches, and each of them exchanges gradients: one"
            " exchange of their sum is the same"
        )
        filled = by_rank(bucket_copies.get(), "ns") if bucket_copies.or_none() is not None else {}
        plans.append(Plan(what, "once", saves(_needless(transfer, filled, batches, more / (more + 1))), why))
    else:
        why = "the optimizer then steps once for so many batches"
        for key, n in (("half", 2), ("quarter", 4)):
            plans.append(Plan(f"exchange every {n} batches", key, saves(transfer * (1 - 1 / n)), why))
    plans += _compressed(transfers[among(transfers, gradients)], fitted, model, transfer, saves)
    return pd.DataFrame(map(asdict, plans))


def _needless(
    transfer: pd.Series[float], work: Mapping[int, float], batches: float, share: float | None = None
) -> pd.Series[float]:
    """Return what each rank need not do where so many batches exchange and one would do, ns: of the transfer (`share`
    of it, where that is known better), and of the wrapper's own work.
    """
    part = (batches - 1) / batches
    own = pd.Series(work, dtype=float).reindex(transfer.index).fillna(0.0)
    return transfer * (part if share is None else share) + own * part


@across_ranks
def best_plan(
    exchange_plans: Frame = needs(exchange_plans),
    exposed_transfer: pd.Series[float] = needs(exposed_transfer),
    own_time: Frame = needs(own_time),
    mean_step_ns: float = needs(mean_step_ns),
) -> pd.Series[Any]:
    """Return the plan to propose: notable needless exchanges first, else the plan with the largest gain.

    Exchanging half as often changes the training. If nothing else is notable, an upper bound is preferred (`at_most`):
    all time that may be waiting for a late rank (waits), or half of the time for half the bytes if the gain is unknown.
    """
    plans = exchange_plans[exchange_plans["key"] != "quarter"].assign(at_most=False)
    notable = plans[plans["gain_ns"] >= NOTABLE_SHARE * mean_step_ns]
    half, notable = notable[notable["key"] == "half"], notable[notable["key"] != "half"]
    gone = notable[notable["key"].isin(["once", "buffers"])]
    wide = plans[(plans["key"] == "bytes") & plans["gain_ns"].isna()]
    if not len(notable) and len(half) and not own_time["known"].all():
        return half.assign(key="waits", gain_ns=saving(own_time, exposed_transfer), at_most=True).iloc[0]
    if not len(notable) and len(half) and len(wide):
        return wide.assign(gain_ns=half["gain_ns"].iloc[0], at_most=True).iloc[0]
    left = notable if len(notable) else plans
    return (gone if len(gone) else left.sort_values("gain_ns", na_position="first")).iloc[-1]


def _without_buffers(
    bandwidth: pd.DataFrame,
    activations: str,
    model: settings.Settings,
    transfer: Transfer,
    copies: Mapping[int, float],
    saves: Saves,
) -> list[Plan]:
    """Return the plan without DistributedDataParallel's broadcast of buffers, if the forward pass sends mostly that.

    `copies`: what copying them into what is sent, and back, takes of each rank's step.
    """
    if activations != "broadcast" or not settings.broadcasts_buffers(model):
        return []
    of = bandwidth["exposed_ns"] * bandwidth["ranks"]
    share = float(of[bandwidth["collective"] == "broadcast"].sum() / of.sum())
    why = "each rank then keeps its own buffers, as the statistics of batch norm"
    copied = pd.Series(copies, dtype=float).reindex(transfer.index).fillna(0.0)
    return [Plan("no broadcast of buffers before the forward pass", "buffers", saves(transfer * share + copied), why)]


def _last_bucket(gradients: pd.DataFrame, job: Job) -> float:
    """Return the share of the gradients that DistributedDataParallel's last bucket (would) hold on GPUs; 0: unknown.

    Buckets are filled from the model's end. The last one holds the first layers, with an embedding if there is one, and
    nothing hides its exchange. Fewer bytes than one bucket's are assumed to be spread over FEWEST.
    """
    total, model = float(gradients["bytes"].sum(skipna=False)), settings.model(job)
    if settings.on_cpu(job) or model.get("fsdp") or not total > 0:
        return 0.0
    if model.get("ddp"):
        return 1 / max(float(gradients["count"].sum()), 1.0)
    if total <= DDP_BUCKET:
        return 1 / FEWEST
    last, whole = model.get("last_bucket_bytes"), model.get("parameter_bytes")
    # Gradients may be exchanged in another type than the parameters'.
    return min(last / whole if last and whole else DDP_BUCKET / total, 1.0)


def _rebucketed(
    bandwidth: pd.DataFrame, fit: Fit | None, overlap: pd.DataFrame, now: float | None, transfer: Transfer, saves: Saves
) -> Plan:
    """Try other bucket sizes: fewer buckets start less often, but the last one, which nothing hides, grows."""
    is_now, computes = digits(now) if now else UNKNOWN, float(overlap["backward_ns"].mean())
    if fit is None or not math.isfinite(computes):
        why = "the trace does not show the backward pass, which would hide them"
        if fit is None:
            why = "what starting an exchange takes is not known: their sizes are alike"
        return Plan(f"other buckets than `bucket_cap_mb={is_now}`", "bucket", math.nan, why)
    mine = bandwidth[bandwidth["collective"] == "all_reduce"]  # not empty: the fit uses them
    mine = mine[mine["members"] == mine.groupby("members")["transfer_ns"].sum().idxmax()]
    n, total = max(float(mine["count"].sum()), 1.0), float(mine["bytes"].sum())

    def exposed_ns(exchanges: float) -> float:
        all_of_it = exchanges * fit.start_ns + total * fit.byte_ns
        return max(all_of_it / exchanges, all_of_it - computes * (1 - 1 / exchanges))

    sizes = {mb: max(1.0, math.ceil(total / (mb << 20))) for mb in BUCKETS_MB}
    best = min(sizes, key=lambda mb: exposed_ns(sizes[mb]))
    less = max(exposed_ns(n) - exposed_ns(sizes[best]), 0.0)
    starts, moves = duration(fit.start_ns), duration(total * fit.byte_ns)
    fewer = f"{count(round(n), 'exchange')} become {sizes[best]:.0f}"
    why = f"{fewer}; starting one takes {starts}, moving {size(total)} {moves}"
    return Plan(f"`bucket_cap_mb={best}` (is {is_now})", "bucket", saves(transfer.clip(upper=less)), why, float(best))


def _compressed(
    transfers: pd.DataFrame, fit: Fit | None, model: settings.Settings, transfer: Transfer, saves: Saves
) -> list[Plan]:
    """Return the plans for gradients in 16 bits, if they are in float32, and for low-rank gradients."""
    sized = transfers.loc[transfers["bytes"] > 0, "bytes"]
    wide = set(transfers["dtype"]) - {""} or set(model.get("dtypes") or ())
    plans, gain = [], math.nan
    if wide <= {"float32"}:
        why = "the trace does not record how large its exchanges are (--shapes)"
        if not wide:
            why = "the trace does not record in which type gradients are exchanged"
        elif fit is not None and len(sized):
            moving = float(sized.sum()) * fit.byte_ns
            part = moving / (moving + len(sized) * fit.start_ns)
            gain = saves(transfer * part / 2)
            why = f"moving it is {100 * part:.0f} % of a transfer, starting it the rest; converting it takes no time"
        elif len(sized) and sized.median() >= CLASSES[2]:
            gain = saves(transfer / 2)
            why = f"exchanges of {size(float(sized.median()))} take half as long for half the bytes"
        elif len(sized):
            why = "exchanges are too small, or too alike, to show what their bytes take"
        plans.append(Plan("gradients in 16 bits", "bytes", gain, why))
    if model.get("ddp"):
        why = "what compressing takes, and the shapes of the gradients, are not recorded"
        plans.append(Plan("gradients of low rank (`powerSGD_hook`)", "powersgd", math.nan, why))
    return plans


# The start dominates collectives below a tenth of DDP's buckets. A few of them are hardly worth a change.
_OF_BUCKET = 2_500_000

_FEW = 8

# Changes for collectives in the forward pass, by kind; experts: all-to-alls of their tokens; "": any other.
_AT_ONCE = {
    "all_to_all": (
        change(
            "the forward pass waits for its all-to-all: exchange the next batch's ids and rows while this one computes,"
            " as TorchRec's pipelines do"
        ),
        change("half the bytes: exchange the rows in 16 bits", numerics=True),
    ),
    "experts": (
        change(
            "the forward pass waits for its tokens: compute another half of the batch, or experts that all tokens pass,"
            " while they travel; more experts on each host's ranks, and fewer between hosts"
        ),
        change("half the bytes: send tokens in 16 or 8 bits", numerics=True),
    ),
    "broadcast": (change("the forward pass waits for a broadcast: make it before the step that needs it, or seldom"),),
    "": (
        change(
            "the forward pass waits for what it exchanges: pair `ColwiseParallel` with `RowwiseParallel` layers, which"
            " exchange once a pair, with `SequenceParallel` between pairs; let fewer ranks share a layer"
        ),
        change(
            "on GPUs asynchronous tensor parallelism, under `torch.compile`: products are cut up and sent piece by"
            " piece"
        ),
    ),
}

_HALF = change(
    "exchange half as often: add up the gradients of two batches before the optimizer steps",
    numerics=True,
    training=True,
)

# What to change where nothing of the job is known but its trace, by the best plan.
_UNKNOWN_JOB = {
    "broadcast": change(
        "`DistributedDataParallel(..., forward_sync_buffers=False)` (before torch 2.13 `broadcast_buffers=False`) if"
        " that makes them: before each forward pass it sends rank 0's buffers, as batch norm's statistics, to all"
        " ranks; else send ahead of the step, or seldom",
        numerics=True,
    ),
    "bytes": change("exchange gradients in 16 bits: half as many bytes", numerics=True),
    "": change(
        "overlap the exchange with computation: gradients during the backward pass, all else before it is needed"
    ),
}


def advice(
    job: Job, best: pd.Series[Any], accumulates: bool, activations: str, collectives: pd.DataFrame, per_step: float
) -> tuple[Change, ...]:
    """Return what to change, first what the best plan changes, where a setting makes it.

    `accumulates`: exchanges are made for nothing. `collectives`: those of one rank; `per_step`: how many in a step.
    """
    if best["key"] == "half":
        return (_HALF,)
    model = settings.model(job)
    ddp, fsdp, cap = model.get("ddp") or {}, model.get("fsdp"), new_bucket(job, best)
    now, sized = ddp.get("bucket_cap_mb"), collectives.loc[collectives["bytes"] > 0]
    median, half = float(sized["bytes"].median()), (None, "torch.bfloat16")
    many = not activations and cap is None and per_step > _FEW and median < _OF_BUCKET
    what = f"{per_step:.0f} collectives of {size(median)} (median) a step"
    wrap = "exchange gradients in large buckets during the backward pass (`DistributedDataParallel`)"
    larger = f"larger buckets: {what}; `bucket_cap_mb=25` or more (is {now})"
    hide = "smaller buckets (`bucket_cap_mb`): their exchange begins earlier in the backward pass"
    nccl = "`init_process_group('nccl')` (is gloo): gloo sends GPU tensors through the host"
    keep = "`fully_shard(..., reshard_after_forward=False)` where memory allows: no second all-gather"
    mixed = "half the bytes: `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)`"
    hook = "half the bytes: `model.register_comm_hook(None, fp16_compress_hook)`"
    late = "record the traces of all ranks, which show whether this is waiting for a late one"
    offered: tuple[tuple[Any, Change], ...] = (
        (best["key"] == "waits", Change(late, informs=True)),
        (accumulates, change(_KEPT_WHOLE if fsdp else _NO_SYNC)),
        (cap is not None, change(best["change"], bucket_cap_mb=(now, cap))),
        *((activations, needed) for needed in _at_once(job, activations, model)),
        (many and ddp, change(larger, bucket_cap_mb=(now, 25.0))),
        (many and fsdp, change(f"larger shards: {what}; `fully_shard` whole blocks, not single layers")),
        (many and not ddp and not fsdp, change(f"{what}: {wrap}")),
        (model and not (many or activations or ddp or fsdp), _wrapped(sized)),
        (ddp and best["key"] == "hidden" and not many and not activations, change(hide)),
        (settings.through_host(job), change(nccl, backend=("gloo", "nccl"))),
        (fsdp, change(keep, reshard_after_forward=(None, False))),
        (fsdp, change(mixed, numerics=True, param_dtype=half, reduce_dtype=half)),
        (ddp, change(hook, numerics=True)),
        (ddp and not accumulates, _HALF),
    )
    fitting = tuple(one for applies, one in offered if applies)
    return fitting or (_UNKNOWN_JOB.get(activations or best["key"], _UNKNOWN_JOB[""]),)


def unbroadcast(job: Job) -> Change:
    """Return the change that ends that, by the name that the job's torch has for it."""
    name = settings.buffers_argument(settings.torch_version(job, job.ranks[0]))
    start = "" if name == "broadcast_buffers" else "; as the model is wrapped they are sent all the same"
    text = (
        f"`DistributedDataParallel(..., {name}=False)` (is True): before each forward pass it sends rank 0's buffers,"
        f" as batch norm's statistics, to all ranks; each then keeps its own{start}"
    )
    return change(text, numerics=True, broadcast_buffers=(True, False))


def _at_once(job: Job, collective: str, model: settings.Settings) -> tuple[Change, ...]:
    """Return what to change where the forward pass waits for a collective."""
    if collective == "broadcast" and settings.broadcasts_buffers(model):
        return (unbroadcast(job),)
    if collective in _AT_ONCE or not model.get("ddp"):
        return _AT_ONCE.get(collective, _AT_ONCE[""])
    # A layer that ranks share, and DistributedDataParallel replicates, is nothing that a plain script has.
    own = f"the forward pass waits for an {collective.replace('_', '-')} of its own"
    return (change(f"{own}, as `SyncBatchNorm` layers and metrics make them: fewer of them, or several in one"),)


def fewer_collectives(job: Job, small: pd.DataFrame, n: float, fewer: int) -> tuple[Change, ...]:
    """Return the changes that make the most frequent kind of small collectives fewer."""
    model, metrics = settings.model(job), change("reduce metrics and flags in one tensor, and not in every step")
    kind = str(small.groupby("collective")["calls"].sum().idxmax())
    if model.get("fsdp"):
        return (change("`fully_shard` whole blocks and not single layers: one all-gather a block"),)
    if not model.get("ddp"):
        words = (
            "exchange gradients together: `DistributedDataParallel` does, in buckets of 25 MB during the backward pass"
        )
        return (change(words), metrics)
    if kind == "broadcast" and settings.broadcasts_buffers(model):
        return (unbroadcast(job),)
    cap = model["ddp"].get("bucket_cap_mb")
    if kind in GRADIENTS and not (isinstance(cap, (int, float)) and cap >= DDP_BUCKET / 2**20):
        now = digits(cap) if isinstance(cap, (int, float)) else cap
        text = f"`bucket_cap_mb=25` (is {now}): {count(fewer, 'exchange')} a step, not {n:.0f}"
        return (change(text, bucket_cap_mb=(cap, DDP_BUCKET / 2**20)),)
    # Full buckets are not small: these are the script's own.
    return (metrics, change(f"most of them are of kind {kind}, which the script calls: call it for several at once"))


def new_bucket(job: Job, best: pd.Series[Any]) -> float | None:
    """Return the bucket_cap_mb that the best plan sets; None where it sets none, or what there is."""
    cap, now = float(best["bucket_cap_mb"]), (settings.model(job).get("ddp") or {}).get("bucket_cap_mb")
    return None if math.isnan(cap) or cap == now else cap


def _wrapped(sized: pd.DataFrame) -> Change:
    """Return what wraps a model, and how large its buckets should be where all gradients would fit into one."""
    text = "`DistributedDataParallel{}` or FSDP2 (`fully_shard`): they exchange during the backward pass"
    total = float(sized.groupby("step")["bytes"].sum().mean())
    if not FEWEST << 20 <= total <= DDP_BUCKET:
        return change(text.format(""))
    cap = round(total / FEWEST / 2**20)
    return change(text.format(f"(..., bucket_cap_mb={cap})"), bucket_cap_mb=(None, float(cap)))
