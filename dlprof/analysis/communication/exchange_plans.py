"""What a step would be if ranks exchanged otherwise: hidden, in other buckets, seldom, or with half the bytes.

Every plan is made of what this run shows of itself: the exposed transfer, the computation that hides nothing yet, and
what a collective takes to start and for each byte, which two classes of size tell. What nothing here tells is not
guessed: its plan says why.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis import settings
from dlprof.analysis.communication.bandwidth import CLASSES, size_classes
from dlprof.analysis.engine import Job, Maybe, RankFacts, across_ranks, per_rank
from dlprof.analysis.step.breakdown import part, part_noise
from dlprof.analysis.step.savings import saving
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import DeviceSets
from dlprof.analysis.timeline.steady import standard_error
from dlprof.analysis.timeline.steps import Timing
from dlprof.units import UNKNOWN, count, digits, duration, size

# Exchanges of gradients, which are made once a step; the others go with each pass.
GRADIENTS = ("all_reduce", "reduce_scatter")

# Bucket sizes that are tried, MB; 25 is DistributedDataParallel's own.
BUCKETS_MB = (1, 5, 10, 25, 50, 100, 200)

# What a bucket holds unless it is told otherwise; and how many buckets there should be at the least.
DDP_BUCKET = 25 << 20
FEWEST = 4

# Two classes of size tell starting from moving where one's collectives are so many times as large, and so many there.
APART = 4.0
ENOUGH = 3

# Gradients are exchanged for nothing where a batch after which the optimizer does not step exchanges so much of what
# one does after which it steps: a choice, well above what a metric takes.
FOR_NOTHING = 0.5

# Kernels that other threads than the training loop's launch are the backward pass, where they are so much of all.
BACKWARD_SHARE = 0.1


@per_rank
def accumulation(
    steps: Maybe[pd.DataFrame],
    light_steps: Maybe[pd.DataFrame],
    collectives: Maybe[pd.DataFrame],
    timing: Maybe[Timing],
) -> pd.DataFrame:
    """Return one row: batches for each step of the optimizer, and between.

    `between` is what a batch exchanges of gradients after which the optimizer does not step, as a share of what one
    does after which it steps: in bytes, or in time where those are not told. NaN: it was not recorded, or not both
    kinds of batches were traced.
    """
    batches, between = np.nan, np.nan
    if steps:
        marked = light_steps.get()
        marked = marked[marked["kind"] == "train"].drop_duplicates("step").set_index("step")
        updates = marked.index[marked["optimizer_steps"] > 0].to_numpy()
        batches = float(np.median(np.diff(updates))) if len(updates) > 1 else np.nan
        found = collectives.get()
        found = found[found["collective"].isin(GRADIENTS)]
        told = len(found) > 0 and bool((found["bytes"] > 0).all())
        much = found["bytes"] if told else found["end_ns"] - found["start_ns"]
        traced = pd.Index(timing.get().numbers).intersection(marked.index)
        each = much.groupby(found["step"]).sum().reindex(traced).fillna(0.0)
        stepped = marked["optimizer_steps"].reindex(traced) > 0
        if stepped.any() and not stepped.all() and each[stepped].any():
            between = float(each[~stepped].mean() / each[stepped].mean())
    return pd.DataFrame({"batches": [batches], "between": [between]})


# What a forward pass exchanges with a counterpart in the backward pass.
_BOTH_WAYS = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")


@per_rank
def in_forward(collectives: pd.DataFrame, host_phases: Maybe[dict[str, iv.Intervals]], rank: RankFacts) -> pd.DataFrame:
    """List what kinds of collectives the forward pass makes: collective, members, size (as in `bandwidth`), each once.

    And what the backward pass makes among the same ranks, as far as is known of the same size, where nothing wraps a
    model to exchange its gradients there: what is gathered forwards is reduced backwards. On a device a collective is
    made where it is launched. Empty where nothing tells the forward pass.
    """
    found = collectives
    if not rank.facts:  # only dlprof names the passes
        found = found.iloc[:0]
    made = found["made_ns"].to_numpy()
    phases = host_phases.get() if len(found) else {}
    kinds = found.assign(size=size_classes(found["bytes"]))
    inside = iv.holds(phases.get("forward", iv.EMPTY), made)
    if not any(model.get("ddp") or model.get("fsdp") for model in rank.facts.get("models") or ()):
        alike = pd.MultiIndex.from_frame(kinds[["members", "size"]])
        forward = alike[inside & kinds["collective"].isin(_BOTH_WAYS).to_numpy()]
        inside |= iv.holds(phases.get("backward", iv.EMPTY), made) & alike.isin(forward)
    kinds = kinds[inside]
    return kinds[["collective", "members", "size"]].drop_duplicates(ignore_index=True)


@per_rank
def overlap(
    timing: Timing,
    has_device: bool,
    device_sets: Maybe[DeviceSets],
    cpu_computation: Maybe[iv.Intervals],
    communication: iv.Intervals,
    spans: Maybe[pd.DataFrame],
    training_lane: Maybe[str],
    device_work: Maybe[pd.DataFrame],
    host_phases: Maybe[dict[str, iv.Intervals]],
) -> pd.DataFrame:
    """Return a rank's computation of the mean traced step: computation_ns, beside_ns, backward_ns, backward_beside_ns.

    `beside` is what of it runs beside communication. Of the backward pass alone NaN where nothing tells which it is.
    """
    windows = iv.merge(timing.windows)
    computed = device_sets.get().computation if has_device else cpu_computation.get()
    computed = iv.intersect(windows, computed)
    beside = iv.intersect(computed, communication)
    backward = (
        _backward(spans.get(), training_lane.get(), device_work.get())
        if has_device
        else host_phases.get().get("backward", iv.EMPTY)
    )
    known = len(backward) > 0
    n = max(len(timing.windows), 1)
    row = {"computation_ns": iv.total(computed) / n, "beside_ns": iv.total(beside) / n}
    row["backward_ns"] = iv.total(iv.intersect(computed, backward)) / n if known else np.nan
    row["backward_beside_ns"] = iv.total(iv.intersect(beside, backward)) / n if known else np.nan
    return pd.DataFrame([row])


def _backward(spans: pd.DataFrame, training_lane: str, device_work: pd.DataFrame) -> iv.Intervals:
    """Return when the device computes for the backward pass: autograd launches that from a thread of its own."""
    calls = host.is_kind(spans, "runtime") & (spans["launch"].to_numpy() >= 0)
    others = calls & ~host.is_one_of(spans["lane"], training_lane)
    ids = np.sort(spans["launch"].to_numpy()[others])
    if not len(ids):
        return iv.EMPTY
    kernels = host.is_kind(device_work, "kernel")
    launch = device_work["launch"].to_numpy()
    theirs = kernels & (ids[np.minimum(np.searchsorted(ids, launch), len(ids) - 1)] == launch)
    found = host.cover(device_work, theirs)
    enough = iv.total(found) >= BACKWARD_SHARE * iv.total(host.cover(device_work, kernels))
    return found if enough else iv.EMPTY


@across_ranks
def free_to_hide(overlap: pd.DataFrame, breakdown: pd.DataFrame, job: Job) -> dict[int, float]:
    """Return how much computation of the mean step hides nothing yet and could, ns a rank.

    Of the backward pass where that is told, for gradients are not there before it; all of it in a sharded model, whose
    parameters are gathered throughout.
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
def idle_cores(busy: Maybe[pd.DataFrame], mean_step_ns: Maybe[float], job: Job) -> float:
    """Return for how long of the mean step a CPU run's cores stand idle, ns; infinity where that is not known.

    What two ranks do beside each other still takes its CPU time: a step is no shorter than all of it on all cores. With
    several hosts, those of the busiest.
    """
    if not settings.on_cpu(job) or busy.lacking:
        return math.inf
    used = busy.get().groupby("rank")[["cpu_ns", "time_ns"]].sum()
    share = used["cpu_ns"] / used["time_ns"].clip(lower=1)
    there = pd.Series({r: settings.cores(job, r) for r in job.ranks}, dtype=float).reindex(share.index)
    hosts = pd.Series({r: settings.host(job, r) for r in job.ranks}).reindex(share.index)
    together = share.groupby(hosts).transform("sum")
    # Ranks that use more than one of them may have cores of their own.
    taken = (together.where(together <= there, share) / there).max()
    return max(0.0, 1.0 - float(taken)) * mean_step_ns.get() if math.isfinite(taken) else math.inf


@dataclass(frozen=True)
class Fit:
    """What one collective takes: to start, ns, and for each byte, ns."""

    start_ns: float
    byte_ns: float


@across_ranks
def fitted(starting: pd.DataFrame) -> Fit | None:
    """Return what starting and moving take, as `starting` tells them; None where it does not."""
    return Fit(*starting.iloc[0].tolist()) if len(starting) else None


@across_ranks
def starting(transfers: pd.DataFrame) -> pd.DataFrame:
    """Tell starting from moving by the smallest and the largest class of all-reduces: start_ns, byte_ns (see Fit).

    One row; none where the classes are alike.
    """
    found = _fit(transfers)
    return pd.DataFrame([found] if found else [], columns=["start_ns", "byte_ns"])


def _fit(frame: pd.DataFrame) -> Fit | None:
    frame = frame[(frame["collective"] == "all_reduce") & (frame["bytes"] > 0) & (frame["transfer_ns"] > 0)]
    if not len(frame):
        return None
    frame = frame[frame["members"] == frame.groupby("members")["transfer_ns"].sum().idxmax()]
    by = frame.groupby("size").agg(bytes=("bytes", "median"), ns=("transfer_ns", "median"), n=("bytes", "size"))
    by = by[by["n"] >= ENOUGH].sort_values("bytes")
    if len(by) < 2 or by["bytes"].iloc[-1] < APART * by["bytes"].iloc[0]:
        return None
    byte = (by["ns"].iloc[-1] - by["ns"].iloc[0]) / (by["bytes"].iloc[-1] - by["bytes"].iloc[0])
    start = by["ns"].iloc[0] - byte * by["bytes"].iloc[0]
    return Fit(max(float(start), 0.0), float(byte)) if byte > 0 else None


@across_ranks
def exchange_plans(
    exposed_transfer: pd.Series[float],
    free_to_hide: dict[int, float],
    overlap: Maybe[pd.DataFrame],
    idle_cores: float,
    bandwidth: pd.DataFrame,
    in_forward: Maybe[pd.DataFrame],
    activations: Maybe[str],
    own_time: Maybe[pd.DataFrame],
    fitted: Maybe[Fit | None],
    accumulation: Maybe[pd.DataFrame],
    transfers: pd.DataFrame,
    job: Job,
) -> pd.DataFrame:
    """Return what each change of the exchange would save: change, key, gain_ns (NaN: not known), why, bucket_cap_mb.

    key: hidden, bucket, once (for each step of the optimizer, where batches in between exchange too; else half as many,
    and a quarter), bytes (half as many), powersgd. bucket_cap_mb is what `bucket` sets it to, NaN for the others.
    `why` says what is taken for granted, or why it is not known. Where ranks are missing, all exposed communication of
    the one that has least counts as transfer.
    """
    rows: list[tuple[Any, ...]] = [
        _hidden(
            free_to_hide,
            overlap.get(),
            idle_cores,
            bandwidth,
            in_forward,
            activations,
            own_time.get(),
            job,
            exposed_transfer,
        )
    ]
    of = bandwidth["exposed_ns"] * bandwidth["ranks"]
    gradients = of[_of_gradients(in_forward, job, bandwidth)].sum() / of.sum() if of.sum() > 0 else 0.0
    if gradients > 0:
        grads = exposed_transfer * gradients
        rows += (
            [_bucket(bandwidth, fitted.get(), overlap, own_time, job, grads)] if settings.model(job).get("ddp") else []
        )
        rows += _once(accumulation.get(), own_time, job, grads) or [
            _seldom(own_time.get(), grads, "half", 2),
            _seldom(own_time.get(), grads, "quarter", 4),
        ]
        rows += _compressed(transfers, in_forward, fitted, own_time, job, grads)
    columns = ["change", "key", "gain_ns", "why", "bucket_cap_mb"]
    return pd.DataFrame([(*row, math.nan)[: len(columns)] for row in rows], columns=columns)


def _of_gradients(in_forward: Maybe[pd.DataFrame], job: Job, frame: pd.DataFrame) -> NDArray[np.bool_]:
    """Return for each row of collective, members and size whether it may be an exchange of gradients.

    What the forward pass reduces are activations, and of its kind what the backward pass does. With
    DistributedDataParallel that takes sizes: without them its own exchanges are of the same kind.
    """
    forward = set() if in_forward.lacking else set(_keys(in_forward.get()))
    if settings.model(job).get("ddp"):
        forward = {key for key in forward if key[-1] >= 0}
    reduced = frame["collective"].isin(GRADIENTS).to_numpy(dtype=bool)
    told: NDArray[np.bool_] = reduced & np.array([key not in forward for key in _keys(frame)], dtype=bool)
    return told


def _keys(frame: pd.DataFrame) -> list[tuple[str, str, int]]:
    return list(zip(frame["collective"], frame["members"], frame["size"], strict=True))


@across_ranks
def activations(bandwidth: pd.DataFrame, in_forward: Maybe[pd.DataFrame], job: Job) -> str:
    """Return collective of the forward pass, which cannot go on without it, that most of what is exposed is; else "".

    A sharded model gathers its parameters there, which may be gathered before.
    """
    if settings.model(job).get("fsdp") or in_forward.lacking:
        return ""
    forward = set(_keys(in_forward.get()))
    theirs = np.array([key in forward for key in _keys(bandwidth)], dtype=bool) & ~_of_gradients(
        in_forward, job, bandwidth
    )
    of = bandwidth["exposed_ns"] * bandwidth["ranks"]
    by = of[theirs].groupby(bandwidth["collective"]).sum()
    return str(by.idxmax()) if by.sum() > of.sum() / 2 else ""


@across_ranks
def exposed_transfer(own_time: pd.DataFrame, breakdown: pd.DataFrame) -> pd.Series[float]:
    """Return the exposed communication of each rank less its waiting for others, ns of the mean step."""
    own = own_time.set_index("rank")
    bare = pd.Series(part(breakdown, "communication"), dtype=float).reindex(own.index).fillna(0.0)
    if not own["known"].all():
        return bare * 0.0 + float(bare.min())
    return (bare - own["wait_ns"]).clip(lower=0.0)


@across_ranks
def transfer_noise(own_time: pd.DataFrame, waits: Maybe[pd.DataFrame], breakdown: Maybe[pd.DataFrame]) -> pd.DataFrame:
    """Return one row, how well the exposed transfer is known: share, the standard error of its mean over its mean.

    Waiting varies far more from step to step, for it is the difference of two ranks' jitter; a transfer is one for all
    its ranks, so that their mean counts as one value a step. Where waiting cannot be told, it is all communication's.
    """
    if own_time["known"].all():
        steps = waits.get()
        steps = steps.assign(ns=(steps["exposed_ns"] - steps["wait_ns"]).clip(lower=0))
        each = steps.groupby("step")["ns"].mean().to_numpy(dtype=float)
        share = standard_error(each) / each.mean() if len(each) and each.mean() else 0.0
    else:
        most = max(part(breakdown.get(), "communication").values(), default=0.0)
        share = part_noise(breakdown.get(), "communication") / most if most else 0.0
    return pd.DataFrame({"share": [share]})


def gain_noise(transfer_noise: pd.DataFrame, gain_ns: float) -> float:
    """Return the standard error of what is gained of the exposed transfer, ns."""
    return gain_ns * float(transfer_noise["share"].iloc[0])


def _hidden(
    free_to_hide: dict[int, float],
    overlap: pd.DataFrame,
    idle_cores: float,
    bandwidth: pd.DataFrame,
    in_forward: Maybe[pd.DataFrame],
    activations: Maybe[str],
    own_time: pd.DataFrame,
    job: Job,
    transfer: pd.Series[float],
) -> tuple[str, str, float, str]:
    free = pd.Series(free_to_hide, dtype=float).reindex(transfer.index).fillna(0.0)
    of = "its backward pass" if _backward_told(overlap, job) else "computation"
    least, idle = float(free.min()), idle_cores
    why = f"{duration(least)} of {of} hides nothing yet" if least > 0 else f"nothing of {of} is free to hide it"
    last = _last_bucket(bandwidth, in_forward, activations, job)
    if last:
        held = size(last * _gradient_bytes(bandwidth, in_forward, job))
        why += f"; the last bucket of gradients, {held}, comes when nothing is left to compute"
    gain = saving(own_time, (transfer * (1 - last)).clip(upper=free))
    if activations.get():
        why = "what the forward pass exchanges is needed at once: another part of the batch must compute meanwhile"
    if idle < gain:
        why = f"sending takes cores as well, and they stand idle for {duration(idle)} of the step"
    return "hidden behind computation", "hidden", min(gain, idle), why


def _last_bucket(bandwidth: pd.DataFrame, in_forward: Maybe[pd.DataFrame], activations: Maybe[str], job: Job) -> float:
    """Return the share of the gradients that DistributedDataParallel's last bucket (would) hold on GPUs; 0: unknown.

    Its buckets are full from the model's end on. The last one holds the first layers, and whatever is large there (an
    embedding), and nothing hides its exchange. Fewer bytes than one bucket's are taken to be shared out over FEWEST.
    """
    total, told = _gradient_bytes(bandwidth, in_forward, job), settings.model(job)
    if settings.on_cpu(job) or told.get("fsdp") or not total > 0 or activations.get():
        return 0.0
    if told.get("ddp"):
        frame = bandwidth
        return 1 / max(float(frame["count"][_of_gradients(in_forward, job, frame)].sum()), 1.0)
    if total <= DDP_BUCKET:
        return 1 / FEWEST
    last, whole = told.get("last_bucket_bytes"), told.get("parameter_bytes")
    # Gradients may be exchanged in another type than the parameters'.
    return min(last / whole if last and whole else DDP_BUCKET / total, 1.0)


def _gradient_bytes(bandwidth: pd.DataFrame, in_forward: Maybe[pd.DataFrame], job: Job) -> float:
    """Return how many bytes of gradients the mean step exchanges; NaN: not told."""
    return float(bandwidth["bytes"][_of_gradients(in_forward, job, bandwidth)].sum(skipna=False))


def _backward_told(overlap: pd.DataFrame, job: Job) -> bool:
    return bool(overlap["backward_ns"].notna().all()) and not settings.model(job).get("fsdp")


def _bucket(
    bandwidth: pd.DataFrame,
    fitted: Fit | None,
    overlap: Maybe[pd.DataFrame],
    own_time: Maybe[pd.DataFrame],
    job: Job,
    grads: pd.Series[float],
) -> tuple[str, str, float, str, float]:
    """Try other buckets: fewer start less often, but the last one, which only the end of the pass fills, grows."""
    now = settings.model(job)["ddp"].get("bucket_cap_mb")
    mine = bandwidth[bandwidth["collective"] == "all_reduce"]
    mine = mine[mine["members"] == mine.groupby("members")["transfer_ns"].sum().idxmax()]
    n, total = float(mine["count"].sum()), float(mine["bytes"].sum())
    fit = fitted
    unknown = (f"other buckets than `bucket_cap_mb={digits(now) if now else UNKNOWN}`", "bucket", math.nan)
    if fit is None:
        return *unknown, "its exchanges do not tell what starting one takes: their sizes are alike", math.nan
    computes = float(overlap.get()["backward_ns"].mean())
    if not math.isfinite(computes):
        return *unknown, "the trace does not tell the backward pass, which would hide them", math.nan

    def open_ns(exchanges: float) -> float:
        all_of_it = exchanges * fit.start_ns + total * fit.byte_ns
        return max(all_of_it / exchanges, all_of_it - computes * (1 - 1 / exchanges))

    sizes = {mb: max(1.0, math.ceil(total / (mb << 20))) for mb in BUCKETS_MB}
    best = min(sizes, key=lambda mb: open_ns(sizes[mb]))
    less = max(open_ns(max(n, 1.0)) - open_ns(sizes[best]), 0.0)
    told = (
        f"{count(round(n), 'exchange')} become {sizes[best]:.0f}; starting one takes {duration(fit.start_ns)}, moving"
        f" {size(total)} {duration(total * fit.byte_ns)}"
    )
    change, gain = f"`bucket_cap_mb={best}` (is {digits(now)})", saving(own_time.get(), grads.clip(upper=less))
    return change, "bucket", gain, told, float(best)


def _once(
    accumulation: pd.DataFrame, own_time: Maybe[pd.DataFrame], job: Job, grads: pd.Series[float]
) -> list[tuple[str, str, float, str]]:
    """Return one exchange for each of the optimizer's steps, where DistributedDataParallel makes more; else nothing."""
    batches, between = float(accumulation["batches"].mean()), float(accumulation["between"].min(skipna=False))
    if not settings.model(job).get("ddp") or not (batches > 1 and between >= FOR_NOTHING):
        return []
    removed = (batches - 1) * between / ((batches - 1) * between + 1)
    why = (
        f"the optimizer steps once for {digits(batches)} batches, and each of them exchanges gradients: one exchange of"
        " their sum is the same"
    )
    change = "exchange once for each step of the optimizer (`no_sync()`)"
    return [(change, "once", saving(own_time.get(), grads * removed), why)]


def _seldom(own_time: pd.DataFrame, grads: pd.Series[float], key: str, batches: int) -> tuple[str, str, float, str]:
    why = "the optimizer then steps once for so many batches"
    return f"exchange every {batches} batches", key, saving(own_time, grads * (1 - 1 / batches)), why


def _compressed(
    transfers: pd.DataFrame,
    in_forward: Maybe[pd.DataFrame],
    fitted: Maybe[Fit | None],
    own_time: Maybe[pd.DataFrame],
    job: Job,
    grads: pd.Series[float],
) -> list[tuple[str, str, float, str]]:
    """Return half the bytes, where they are of four bytes each, and low-rank gradients."""
    frame = transfers
    frame = frame[_of_gradients(in_forward, job, frame)]
    sized = frame[frame["bytes"] > 0]
    wide = set(frame["dtype"]) - {""} or set(settings.model(job).get("dtypes") or ())
    rows = []
    change = "gradients in 16 bits"
    if wide and wide <= {"float32"}:
        fit, moved = fitted.get(), float(sized["bytes"].sum())
        if fit is not None:
            moving = moved * fit.byte_ns
            part = moving / (moving + len(sized) * fit.start_ns)
            why = f"moving is {part:.0%} of a transfer, starting the rest; turning them into 16 bits costs nothing"
            rows.append((change, "bytes", saving(own_time.get(), grads * part / 2), why.replace("%", " %")))
        elif len(sized) and sized["bytes"].median() >= CLASSES[2]:
            why = f"exchanges of {size(float(sized['bytes'].median()))} take half as long for half the bytes"
            rows.append((change, "bytes", saving(own_time.get(), grads / 2), why))
        else:
            why = "exchanges are too small, or too alike, to tell what their bytes take" if len(sized) else _UNSIZED
            rows.append((change, "bytes", math.nan, why))
    if settings.model(job).get("ddp"):
        why = "what compressing takes, and the shapes of the gradients, are not recorded"
        rows.append(("gradients of low rank (`powerSGD_hook`)", "powersgd", math.nan, why))
    return rows


_UNSIZED = "the trace does not tell how large its exchanges are (--shapes)"
