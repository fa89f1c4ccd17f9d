"""How the devices of one process share the work of a step: how long each is busy, and how long any of them is.

A model whose layers lie on several devices (`.to("cuda:1")`) has one busy at a time, unless the batch goes through in
micro-batches: then its bubble is what each device is idle while another one works.
"""

from __future__ import annotations

import pandas as pd

from dlprof.analysis import intervals as iv
from dlprof.analysis.communication.wrappers import replication
from dlprof.analysis.engine import Frame, Maybe, maybe, needs, per_rank
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import device_work
from dlprof.analysis.timeline.steps import Timing, timing
from dlprof.errors import DoesNotApply

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
    together = iv.total(iv.merge(*(busy[device] for device in works))) / n
    return pd.DataFrame({"device": works, "busy_ns": [totals[d] for d in works], "any_ns": together})


def overlapped_ns(busy_ns: pd.Series[float], microbatches: int) -> float:
    """Return how long devices would take together for the same work in so many micro-batches, ns.

    The busiest works all the time, and the others' first micro-batch on its way in, and last on its way out, comes on
    top: of stages alike that is GPipe's (m + p − 1) ÷ m of each one's time.
    """
    most = float(busy_ns.max())
    return most + (float(busy_ns.sum()) - most) / microbatches
