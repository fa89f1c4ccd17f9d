"""The stages of a pipeline stand idle while it fills and drains.

A batch is cut into micro-batches that follow each other through the stages. The last stage has nothing to do until the
first micro-batch arrives, and the first stage nothing until its gradients come back. How long, the schedule decides:
GPipe and 1F1B leave (p − 1) ÷ (m + p − 1) of a step idle on each of p ranks, with m micro-batches; v stages a rank make
that (p − 1) ÷ (v·m + p − 1); schedules that split the backward pass leave p − 1 forward passes of one stage.

Needs a pipeline of torch.distributed.pipelining, recorded by dlprof: every schedule.step() and how much of it each
rank was at work. The bubble is the idle share of a step, on a GPU in the device's time. What is measured above the
schedule's own comes from stages that are not alike, from handing over and from launching; it is told, and not saved.

Saving: the bubble of the schedule with twice the micro-batches, each of half the size and taking half as long, the
batch being the same. Small micro-batches use a GPU less well: it may be less.

What to change: more micro-batches; a schedule with several stages a rank (Interleaved1F1B) or with split backward
passes (InterleavedZeroBubble, ZBVZeroBubble, DualPipeV); fewer stages, with other kinds of parallelism instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from dlprof.diagnosis import Clear, Rule
from dlprof.engine import Measured
from dlprof.errors import NotMeasured
from dlprof.measures.pipeline import bubbles, closed_form
from dlprof.measures.steps import mean_step_ns, of_step, step_means
from dlprof.result import Finding, Panel
from dlprof.units import duration, percent

# The bubble is called negligible from four micro-batches a rank on (Huang et al., GPipe, 2019): twice as many would
# then still save a tenth of the step.
NOTABLE_SHARE = 0.10


def check(run: Measured) -> Finding | Clear:
    """Look at the pipeline that loses most to its schedule, and at what twice the micro-batches would give it."""
    frame = run.frame(bubbles)
    if (frame["size"] < 2).all():
        return Clear("the pipeline has one rank")
    known = frame[frame["closed"].notna()]
    idle = float(frame["bubble"].mean())
    if not len(known):
        raise NotMeasured(
            f"{percent(idle)} of a step is idle, but how much of it the schedule {frame['schedule'].iloc[0]} costs is"
            " not known here"
        )
    gain, pipeline = max((_gain(ranks), str(of)) for of, ranks in known.groupby("ranks"))
    worst = known[known["ranks"] == pipeline]
    share = gain / mean_step_ns(run)
    bubble = float(worst["bubble"].mean())
    if share < NOTABLE_SHARE:
        return Clear(
            f"{percent(bubble)} of a pipeline's step is idle; twice the micro-batches would save {percent(share)} of it"
        )
    told = worst.to_dict("records")[0]
    rest = max(bubble - told["closed"], 0.0)
    return Finding(
        title="Pipeline stages stand idle",
        summary=f"{percent(bubble)} of a pipeline's step of {duration(told['step_ns'])} is idle on its {told['size']}"
        f" ranks: {percent(min(told['closed'], bubble))} by the schedule ({_name(told)}, {told['microbatches']}"
        f" micro-batches), {percent(rest)} by unequal stages, handing over and launching.",
        verdict=f"{percent(share)} {of_step(run)} is a bubble that more micro-batches would fill.",
        noise_ns=float(worst["noise_ns"].max()),
        saving_ns=gain,
        advice=_advice(told),
        evidence=_evidence(told, bubble),
        ranks=tuple(int(r) for r in worst["rank"]),
        sure="By the closed form of the schedule: the same batch in twice as many micro-batches, each taking half as"
        " long. Smaller ones may use a device less well.",
    )


def _gain(ranks: pd.DataFrame) -> float:
    """Give what twice the micro-batches would save of one pipeline's mean steady step, ns; no more than is idle."""
    busy = float(ranks["busy_ns"].mean())
    now, then = float(ranks["closed"].iloc[0]), float(ranks["doubled"].iloc[0])
    less = busy / (1 - now) - busy / (1 - then)
    idle = float((ranks["bubble"] * ranks["step_ns"]).mean())
    return max(0.0, min(less, idle)) * float(ranks["calls_a_step"].iloc[0])


def _name(told: Mapping[Any, Any]) -> str:
    return str(told["schedule"]).removeprefix("Schedule")


def _advice(told: Mapping[Any, Any]) -> tuple[str, ...]:
    more = 2 * told["microbatches"]
    advice = [
        f"`n_microbatches={more}` (is {told['microbatches']}): the schedule's bubble becomes"
        f" {percent(told['doubled'])} of a step"
    ]
    other = _other(told)
    if other is not None:
        advice.append(f"`ScheduleInterleaved1F1B` with 2 stages a rank: {percent(other)}, for twice the hand-overs")
    return tuple(advice)


def _other(told: Mapping[Any, Any]) -> float | None:
    """Give the bubble with two stages a rank, where there is one now."""
    if told["chunks"] > 1:
        return None
    return closed_form("ScheduleInterleaved1F1B", told["size"], told["microbatches"], 2, math.nan)


def _evidence(told: Mapping[Any, Any], bubble: float) -> Panel:
    name, m = _name(told), told["microbatches"]
    rows = [
        ("measured", bubble, "pipeline_bubble"),
        (f"{name}, {m} micro-batches", float(told["closed"]), "pipeline_bubble"),
        (f"{name}, {2 * m} micro-batches", float(told["doubled"]), "pipeline_bubble"),
    ]
    other = _other(told)
    if other is not None:
        rows.append((f"Interleaved1F1B, {m} micro-batches", other, "pipeline_bubble"))
    return Panel(
        "bars", "Idle share of the pipeline's step: measured, and as schedules have it", tuple(rows), unit="share"
    )


RULE = Rule(
    "pipeline_bubble",
    "Idle pipeline stages",
    (bubbles, step_means),
    check,
    saves_from=("pipeline_bubble", "communication"),
)
