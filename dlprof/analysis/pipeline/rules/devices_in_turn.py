"""The devices of one process work one after the other.

A model that is too large for one device is often cut in two, and the second half moved with `.to("cuda:1")`. The batch
then goes through the first device, and only then through the second: each is idle while the other one works, so that
two devices are as fast as one. In micro-batches, the first device begins the next one while the second works on the one
before.

Needs a trace of a process in which several devices compute, with the steps marked.

Saving: the devices' own kernels, overlapped as far as four micro-batches a device allow (GPipe, 2019): the busiest one
works all the time, and one micro-batch of the others comes on top. Small micro-batches use a device less well, which is
not included; nor is what cutting the batch costs on the host.

What to change: cut the batch into micro-batches and launch the second half of one before the first half of the next:
launching does not wait, so that a loop over `batch.split(size)` is enough. `torch.distributed.pipelining` does it with
a process a device. A model that fits on one device is better off with DistributedDataParallel.
"""

from __future__ import annotations

import pandas as pd

from dlprof.analysis import intervals as iv
from dlprof.analysis.communication.wrappers import replication
from dlprof.analysis.engine import Frame, Maybe, maybe, needs, per_rank
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change
from dlprof.analysis.panel import table
from dlprof.analysis.step.savings import own_time, saving
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import device_work
from dlprof.analysis.timeline.steps import Timing, timing
from dlprof.errors import DoesNotApply
from dlprof.units import count, duration, percent

# Micro-batches a device from which on a pipeline's bubble is called negligible (Huang et al., GPipe, 2019).
ENOUGH = 4

# A device that computes less than this share of the busiest one's time has no part of the model.
_PART = 0.02


@per_rank
def device_turns(
    device_work: Frame = needs(device_work),
    timing: Timing = needs(timing),
    replication: Maybe[Frame] = maybe(replication),
) -> pd.DataFrame:
    """Return a row for each device of the process that computes, ns of a mean steady traced step: device, busy_ns.

    Also the same in each row: any_ns, in which at least one of them computes. Raises DoesNotApply where fewer than two
    compute, and where they are replicas of nn.DataParallel.
    """
    if replication:
        raise DoesNotApply("the devices are replicas of nn.DataParallel")
    kernels = device_work[host.is_kind(device_work, "kernel")]
    if not len(kernels):
        raise DoesNotApply("one device computes in each process, or none")
    lanes: dict[str, list[str]] = {}
    for lane in kernels["lane"].cat.remove_unused_categories().cat.categories:
        lanes.setdefault(str(lane).partition(":")[0], []).append(str(lane))
    if len(lanes) < 2:
        raise DoesNotApply("one device computes in each process")
    steps, n = iv.merge(timing.windows), max(len(timing.windows), 1)
    of = kernels["lane"]
    busy = {
        device: iv.intersect(steps, host.cover(kernels, host.is_one_of(of, *lanes[device]))) for device in sorted(lanes)
    }
    totals = {device: iv.total(times) / n for device, times in busy.items()}
    most = max(totals.values(), default=0.0)
    works = [device for device, ns in totals.items() if ns >= _PART * most > 0]
    if len(works) < 2:
        raise DoesNotApply("one device computes in each process")
    combined = iv.total(iv.merge(*(busy[device] for device in works))) / n
    return pd.DataFrame({"device": works, "busy_ns": [totals[d] for d in works], "any_ns": combined})


def overlapped_ns(busy_ns: pd.Series[float], microbatches: int) -> float:
    """Return how long all devices would take for the same work in so many micro-batches, ns.

    The busiest works all the time. The first micro-batch on its way in and the last on its way out add the others'
    time for one micro-batch. With equal stages that is GPipe's (m + p − 1) ÷ m of each one's time.
    """
    most = float(busy_ns.max())
    return most + (float(busy_ns.sum()) - most) / microbatches


# As of a pipeline's bubble with few micro-batches.
NOTABLE_SHARE = 0.10

_SHOWN = {"device": "device", "busy_ns": "computes_ns", "idle": "idle_share"}


def check(device_turns: Frame = needs(device_turns), own_time: Frame = needs(own_time)) -> Estimate:
    gains = {}
    for rank, mine in device_turns.groupby("rank"):
        then = overlapped_ns(mine["busy_ns"], ENOUGH * len(mine))
        gains[int(str(rank))] = max(float(mine["any_ns"].iloc[0]) - then, 0.0)
    return Estimate(
        saving_ns=saving(own_time, gains),
        by_rank_ns=gains,
        loses="passes while one device waits for another",
    )


def explain(estimate: Estimate, device_turns: Frame = needs(device_turns)) -> Explanation:
    mine = estimate.rows(device_turns)
    n, combined = len(mine), float(mine["any_ns"].iloc[0])
    shown = mine.assign(idle=1 - mine["busy_ns"] / combined)
    overlap = 1 - combined / float(mine["busy_ns"].sum())
    return Explanation(
        title=f"{n} devices of one process work in turn",
        summary=f"In {duration(combined)} of a step some device computes; {percent(overlap)} of their work overlaps."
        f" The busiest alone needs {duration(float(mine['busy_ns'].max()))}.",
        changes=(
            change(
                f"cut the batch into {count(ENOUGH * n, 'micro-batch')} (`batch.split(size)`), and launch all halves of"
                " one before the next: each device then begins its next one while the others work"
            ),
            change("`torch.distributed.pipelining`, with a process a device"),
        ),
        evidence=table("What each device computes in a step", shown, _SHOWN),
        sure="Estimated from the devices' own kernels; what small micro-batches lose on a device is not included.",
        at_most=True,
    )


_SAVES_FROM = ("computation", "copy", "communication", "host", "launch_latency", "queued_wait", "other")
RULE = Rule("Devices that work in turn", check, explain, _SAVES_FROM, notable=NOTABLE_SHARE, only_with="gpu")
