"""Many small collectives: each takes longer to start than to move its bytes.

A collective has a price that does not depend on its size: a launch, a handshake of all ranks, a first hop over every
link. Below some tens of kilobytes that is all of its time. The same bytes in few large collectives pay it few times.

Needs a trace with collectives and their sizes; where sizes are not told, those of a DistributedDataParallel or FSDP2
model follow from its parameters and the number of its exchanges.

Saving: what is exposed of their transfer, but for what is left: as many as are needed, each open for as long as one
takes now, as the last of the backward pass has nothing to hide behind. Their bytes are taken to cost nothing, and what
computation hides is not counted. Where two classes of size tell what an all-reduce on GPUs takes to start and for each
byte, small are those that take longer to start than to move, and their bytes do count. On a CPU FSDP2's own work on
each of its units counts as well, and fewer units are those that the modules right above them would be. There, the
threads that exchange take cores from those that compute: with gloo and one computing thread the kernel tells for how
long that thread stands ready without one. Of that it saves what neither the loader's workers nor the exchanges that are
left could cause, were each ms of theirs to hold it up for one. Each collective is a meeting as well, and ranks that are
late in turn wait at each: delays that are independent of each other grow with the root of the time that they add up in,
and so what all ranks wait shrinks with the root of how often they meet. Waiting for one late rank is `straggler`'s.

What to change: larger buckets (`bucket_cap_mb`), `fully_shard` on whole blocks, gradients exchanged once a step and not
one by one, metrics reduced in one tensor.
"""

from __future__ import annotations

import math
from contextlib import suppress

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.communication.bandwidth import CLASSES
from dlprof.analysis.communication.exchange_plans import Fit, gain_noise
from dlprof.analysis.communication.matching import SENT
from dlprof.analysis.engine import Job, Maybe
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.step.savings import saving
from dlprof.errors import NotMeasured
from dlprof.result import Change, Panel
from dlprof.units import count, digits, duration, size

# A class of size that ends at 64 KiB: even 10 Gbit/s carries that in 52 µs, about what starting a collective takes.
SMALL_BYTES = CLASSES[1]

# What a bucket of DistributedDataParallel holds unless told otherwise, and what its first one does, which is to be
# ready early (torch.distributed._DEFAULT_FIRST_BUCKET_BYTES).
BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20

# So few a step are nobody's buckets: a loss, a gradient norm, a flag.
FEW = 8


def check(
    bandwidth: pd.DataFrame,
    fitted: Maybe[Fit | None],
    sharding: Maybe[pd.DataFrame],
    exposed_transfer: Maybe[pd.Series[float]],
    own_time: Maybe[pd.DataFrame],
    contention: Maybe[pd.DataFrame],
    transfer_noise: Maybe[pd.DataFrame],
    mean_step_ns: float,
    job: Job,
) -> Estimate:
    """Estimate what fewer collectives save of those below SMALL_BYTES."""
    frame = bandwidth
    frame = frame[frame["collective"] != SENT].assign(calls=frame["count"] * frame["ranks"])
    if not len(frame):
        raise NotMeasured("no collectives in the traced steps, but sends and receives")
    each = (frame["bytes"] / frame["count"]).fillna(_by_parameters(job, frame))
    if each.isna().all():
        raise NotMeasured("the trace does not tell how large its collectives are")
    fit = None if settings.on_cpu(job) else fitted.get()
    limit = SMALL_BYTES if fit is None else max(SMALL_BYTES, fit.start_ns / fit.byte_ns)
    small = frame.assign(each=each)[each < limit]
    # Groups beside each other exchange at the same time: of a rank's own, there are as many as of one of them.
    n = float(small["calls"].sum() / job.world_size)
    if n <= FEW:
        return nothing(f"{count(n, 'collective')} below {size(limit)} a step")
    total = float((small["each"] * small["calls"]).sum() / job.world_size)
    kept, around = _units(sharding, job)
    fewer = max(small["collective"].nunique(), _buckets(job, total), math.ceil(n * kept))
    mean = float(small["transfer_ns"].sum() / small["count"].sum())
    # Of several at once each is exposed in the same time.
    theirs = exposed_transfer.get() * float(small["exposed_ns"].sum() / max(frame["exposed_ns"].sum(), 1.0))
    if fit is None:
        starts = (theirs - (theirs * fewer / n).clip(lower=min(fewer, n) * mean)).clip(lower=0.0)
    else:
        # All of what is gone was exposed, as far as so much was; the last exchange stays so.
        now, then = n * mean, min(fewer, n) * fit.start_ns + total * fit.byte_ns
        starts = (theirs - then / fewer).clip(lower=0.0, upper=max(now - then, 0.0))
    meets = _late_in_turn(own_time.get()) * float(small["wait_ns"].sum() / max(frame["wait_ns"].sum(), 1.0))
    meets *= max(0.0, 1 - math.sqrt(fewer / n))
    crowd = _crowded_out(contention, job, max(0.0, n - fewer) * job.world_size / frame["calls"].sum())
    exchanges, gone = saving(own_time.get(), starts), starts + around * (1 - kept) + crowd
    return Estimate(
        saving_ns=saving(own_time.get(), gone) + meets,
        by_rank_ns={int(str(r)): ns + meets for r, ns in gone.items()},
        noise_ns=gain_noise(transfer_noise.get(), exchanges),
        within={"communication": exchanges + meets},
        loses="starts small collectives",
        explain=lambda: _explain(sharding, mean_step_ns, job, small, fewer, fit, float(theirs.mean()), meets, crowd),
    )


def _explain(
    sharding: Maybe[pd.DataFrame],
    mean_step_ns: float,
    job: Job,
    small: pd.DataFrame,
    fewer: int,
    fit: Fit | None,
    exposed: float,
    meets: float,
    crowd: float,
) -> Explanation:
    n, total = (float(of.sum() / job.world_size) for of in (small["calls"], small["each"] * small["calls"]))
    mean, (_, around) = float(small["transfer_ns"].sum() / small["count"].sum()), _units(sharding, job)
    return Explanation(
        title="Many small collectives",
        summary=f"{count(n, 'collective')} of {size(total / n)} a step, each of {duration(mean)}: {size(total)} in all;"
        f" for {duration(exposed)} of a step of {duration(mean_step_ns)} nothing is computed beside them"
        f"{f', for {duration(crowd)} they leave no core to compute with' if crowd else ''}"
        f"{f', and FSDP2 works for {duration(around)} on its units' if around else ''}.",
        changes=_changes(job, n, fewer),
        evidence=_evidence(small, exposed * job.world_size),
        sure=f"Estimated as {count(fewer, 'start')} a step in place of {digits(round(n, 1))};"
        f" {_bytes_cost(fit, total)}{'; FSDP2 works as much less as it has fewer units' if around else ''}"
        f"{f'; ranks late in turn wait {duration(meets)} less, for they meet less' if meets else ''}"
        f"{f'; threads that exchange leave a core free for {duration(crowd)} more' if crowd else ''}.",
    )


def _bytes_cost(fit: Fit | None, total: float) -> str:
    """Say what moving so many bytes is taken to cost."""
    if fit is None:
        return "moving the bytes is taken to cost nothing at this size"
    return f"starting one takes {duration(fit.start_ns)}, moving all of it {duration(total * fit.byte_ns)}"


def _buckets(job: Job, total: float) -> int:
    """Return how many exchanges so many bytes are, in DistributedDataParallel's buckets where it makes them."""
    first = FIRST_BUCKET_BYTES if settings.model(job).get("ddp") else BUCKET_BYTES
    return 1 + math.ceil(max(0.0, total - first) / BUCKET_BYTES)


def _crowded_out(contention: Maybe[pd.DataFrame], job: Job, gone: float) -> float:
    """Return for how long of a step every rank's training thread would find a core sooner, ns; 0 where nobody tells.

    `gone` is the part of the collectives that would not be.
    """
    if not settings.on_cpu(job) or contention.lacking:
        return 0.0
    told = contention.get()
    less = told["others_ns"] * gone
    left = told["loader_ns"] + told["others_ns"] - less
    return float((told["delay_ns"] - left).clip(lower=0.0).clip(upper=less).min())


def _units(sharding: Maybe[pd.DataFrame], job: Job) -> tuple[float, float]:
    """Return the share of FSDP2's units that would be left one level up, and what it works on all of them on a CPU, ns.

    0 and 0 where it does not, or beside a GPU, which goes on meanwhile.
    """
    with suppress(NotMeasured):
        frame = sharding.get()
        if settings.on_cpu(job):
            return float((frame["parents"] / frame["units"]).iloc[0]), float(frame["around_ns"].min())
    return 0.0, 0.0


def _late_in_turn(own_time: pd.DataFrame) -> float:
    """Return what every rank waits for others in the mean step, ns: so long each is late itself. 0: it is not known."""
    return float(own_time["wait_ns"].min()) if own_time["known"].all() else 0.0


def _by_parameters(job: Job, frame: pd.DataFrame) -> pd.Series[float]:
    """Return the mean size of what a DistributedDataParallel or FSDP2 model reduces, and FSDP2 gathers; else NaN.

    Each bucket or unit is reduced once a step. (gloo's reduce-scatter is an all-reduce.)
    """
    model = settings.model(job)
    held = model.get("parameter_bytes") if model.get("ddp") or model.get("fsdp") else None
    untold = frame["bytes"].isna()
    reduces = frame["collective"].isin(("all_reduce", "reduce_scatter")) & untold
    times = float(frame["count"][reduces].sum())
    known = pd.Series(float("nan"), index=frame.index)
    if not isinstance(held, int) or not times:
        return known
    gathers = (frame["collective"] == "all_gather") & untold & bool(model.get("fsdp"))
    return known.mask(reduces | gathers, float(held) / times)


def _changes(job: Job, n: float, fewer: int) -> tuple[Change, ...]:
    ddp, fsdp = settings.model(job).get("ddp"), settings.model(job).get("fsdp")
    if ddp:
        cap = ddp.get("bucket_cap_mb")
        now = digits(cap) if isinstance(cap, (int, float)) else cap
        text = f"`bucket_cap_mb=25` (is {now}): {count(fewer, 'exchange')} a step, not {n:.0f}"
        return (change(text, bucket_cap_mb=(cap, BUCKET_BYTES / 2**20)),)
    if fsdp:
        return (change("`fully_shard` whole blocks and not single layers: one all-gather a block"),)
    return (
        change(
            "exchange gradients together: `DistributedDataParallel` does, in buckets of 25 MB during the backward pass"
        ),
        change("reduce metrics and flags in one tensor, and not in every step"),
    )


def _evidence(small: pd.DataFrame, exposed_ns: float) -> Panel:
    """Tell the kinds apart; what is exposed of all ranks' is shared out, for several at once are exposed only once."""
    small = small.assign(
        exposed_ns=small["exposed_ns"] * exposed_ns / max((small["exposed_ns"] * small["ranks"]).sum(), 1)
    )
    rows = tuple(
        (
            str(row["collective"]),
            int(row["ranks"]),
            row["count"],
            row["each"],
            row["transfer_ns"] / row["count"],
            row["exposed_ns"],
        )
        for row in small.sort_values("exposed_ns", ascending=False).head(12).to_dict("records")
    )
    columns = ("collective", "ranks", "a step", "mean size_bytes", "transfer of one_ns", "exposed a step_ns")
    return Panel("table", "The small collectives of a step", rows, columns)


RULE = Rule(
    "small_collectives",
    "Many small collectives",
    check,
    # FSDP2's own work on a CPU is copying, and the host's.
    saves_from=("communication", "computation", "host", "other"),
)
