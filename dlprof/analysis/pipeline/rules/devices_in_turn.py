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

from dlprof.analysis.engine import Frame, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change
from dlprof.analysis.panel import table
from dlprof.analysis.pipeline.bubbles import ENOUGH, device_turns, overlapped_ns
from dlprof.analysis.step.savings import own_time, saving
from dlprof.units import count, duration, percent

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
