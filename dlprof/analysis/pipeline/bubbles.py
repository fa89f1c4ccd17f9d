"""How long the bubbles of each pipeline are, what they are made of, and how long its stages.

How the devices of one process share the work of a step: how long each is busy, and how long any of them is.

A model whose layers lie on several devices (`.to("cuda:1")`) has one busy at a time, unless the batch goes through in
micro-batches: then its bubble is what each device is idle while another one works.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof.analysis import intervals as iv
from dlprof.analysis.communication.wrappers import replication
from dlprof.analysis.engine import Frame, Maybe, across_ranks, maybe, needs, per_rank
from dlprof.analysis.pipeline.pipes import Pipe, pipelines, pipes
from dlprof.analysis.pipeline.schedules import closed_form
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import device_work
from dlprof.analysis.timeline.steps import Timing, timing
from dlprof.errors import DoesNotApply

_SHARES = ("simulated", "scheduled")
_COLUMNS = ("rank", "step_ns", "busy_ns", *_SHARES, "schedule_ns", "imbalance_ns", "launch_ns", "communication_ns")


@across_ranks
def bubbles(pipelines: Frame = needs(pipelines), pipes: Maybe[list[Pipe]] = maybe(pipes)) -> pd.DataFrame:
    """Return the bubble of each rank: the columns of `pipeline`, its share of the step, that step, and its cause.

    `step_ns` is the synchronous step of the rank's pipeline, and `bubble` the idle share of it; where the rank with the
    first stage is not here, of its own. `simulated` is the bubble of the same chunks in the same order if launching and
    handing over took no time, `scheduled` that with stages and micro-batches alike as well, `closed` the closed form.

    The idle time is the sum of four, in ns of the mean step: schedule_ns, what even stages would leave idle;
    imbalance_ns, what uneven stages and micro-batches add to it; launch_ns, the host between chunks that wait for no
    other rank; communication_ns, the rest, which is handing over. A stage that is longer than the others is idle for
    less than among even ones: its imbalance_ns is negative. NaN where a pipeline cannot be replayed.
    """
    parts = [row for pipe in pipes.or_none() or [] for row in _parts(pipe)]
    replayed = pd.DataFrame(parts, columns=list(_COLUMNS)).astype(float).set_index("rank")
    # One set of figures: where chunks are known, all of it is of the calls that they are of.
    first = pipelines[pipelines["first_stage"]].drop_duplicates("ranks").set_index("ranks")["dur_ns"]
    step = pipelines["ranks"].map(first).fillna(pipelines["dur_ns"])
    measured = pd.DataFrame({"step_ns": step, "busy_ns": pipelines["busy_ns"]}).set_axis(pipelines["rank"])
    frame = pipelines.drop(columns="busy_ns").join(replayed.combine_first(measured), on="rank")
    shapes = frame[["schedule", "size", "microbatches", "chunks"]].itertuples(index=False, name=None)
    return frame.assign(
        bubble=(1 - frame["busy_ns"] / frame["step_ns"]).clip(lower=0.0),
        closed=[closed_form(*shape) for shape in shapes],
    )


def _parts(pipe: Pipe) -> list[tuple[float, ...]]:
    """Return what a pipeline's idle time comes from, a row of _COLUMNS for each rank."""
    alike = pipe.lengths(pipe.even)
    even = pipe.again(alike)
    own = float(np.mean([pipe.again(took) for took in pipe.took]))
    launched = min(pipe.mean_step(pipe.took, 0.0), pipe.step_ns)
    rows: list[tuple[float, ...]] = []
    for rank, row in zip(pipe.ranks, pipe.rows, strict=True):
        busy, idle = pipe.busy_ns[rank], even - sum(alike[a] for a in row)
        shares = (1 - busy / own, idle / even)
        rows.append(
            (rank, pipe.step_ns, busy, *shares, idle, own - busy - idle, launched - own, pipe.step_ns - launched)
        )
    return rows


@across_ranks
def stage_lengths(pipes: list[Pipe] = needs(pipes)) -> pd.DataFrame:
    """Return how long each stage works on a micro-batch, and what even ones would save their pipeline.

    Columns: ranks (as `pipeline` has them), rank, stage, forward_ns, backward_ns (both halves of it), stage_ns (their
    sum); and of the pipeline saved_ns (what even stages save of its measured step, in which they wait more often for
    handing over and for each other's chunks that happen to be slow) and calls_a_step.
    """
    rows = [
        {
            "ranks": ", ".join(map(str, pipe.ranks)),
            "rank": pipe.rank_of[stage],
            "stage": stage,
            "forward_ns": pipe.mean.get((stage, "forward"), 0.0),
            "backward_ns": pipe.backward_ns(stage),
            "saved_ns": pipe.saved_by_even_ns,
            "calls_a_step": pipe.calls_a_step,
        }
        for pipe in pipes
        for stage in range(pipe.stages)
    ]
    frame = pd.DataFrame(rows)
    return frame.assign(stage_ns=frame["forward_ns"] + frame["backward_ns"])


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
