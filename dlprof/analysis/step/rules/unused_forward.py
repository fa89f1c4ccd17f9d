"""Forward passes run in every step whose result no backward pass uses.

A second forward pass for an accuracy, on the batch that was just trained on, costs as much as the first one. It is
seldom needed: the outputs of the training pass say nearly the same, and a metric every k steps is as good.

Needs the step log, which notes forward passes of outermost modules without gradients, and those after the last backward
pass of a step. On a CPU only: on a device the time of the host in them is not the device's. With stacks, the lines that
call them are named. A teacher whose parameters are frozen (`requires_grad_(False)`) counts as used by the backward pass
after it. One that is not frozen, as many target networks, runs without gradients as well: it is named, and is no
mistake.

Saving: these passes gone, which is the most that any change can give.

What to change: compute the metric from the outputs of the training pass, detached; or every k steps; for a teacher, its
outputs computed once and kept.
"""

from __future__ import annotations

from dlprof.analysis import settings
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, by_rank, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.host.stacks import own_lines, shown
from dlprof.analysis.panel import table
from dlprof.analysis.step.whole_job import unused_forward
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.errors import NotMeasured
from dlprof.units import count, digits, duration, percent

# So many forward passes for each backward pass are no second look at the batch: they choose what comes next.
_MANY = 4
_TOGETHER = (
    "where they choose actions or make samples: for several at once (environments side by side), under"
    " `torch.inference_mode()`"
)

# Lines seen in fewer of the stacks of forward passes are there by chance.
_LEAST_SEEN = 0.05


def check(unused_forward: Frame = needs(unused_forward), job: Job = needs(JOB)) -> Estimate:
    costs = by_rank(unused_forward, "ns")
    if not any(costs.values()):
        return nothing("a backward pass uses every forward pass")
    if not settings.on_cpu(job):
        raise NotMeasured("what forward passes without a backward pass take of the device's time was not recorded")
    return Estimate(
        gone_ns=costs,
        noise_ns=float(unused_forward["noise_ns"].max()),
        loses="goes to forward passes that no backward pass uses",
    )


def explain(
    estimate: Estimate,
    unused_forward: Frame = needs(unused_forward),
    own_lines: Maybe[Frame] = maybe(own_lines),
    mean_step_ns: float = needs(mean_step_ns),
) -> Explanation:
    (mine,) = estimate.rows(unused_forward).to_dict("records")
    takes_ns = estimate.by_rank_ns[estimate.worst]
    lines = own_lines.or_none()
    where, evidence = "", None
    if lines is not None:
        calls = estimate.rows(lines[lines["doing"] == "forward"])
        calls = calls.assign(share=calls["seen"] / calls["samples"].clip(lower=1))
        calls = calls[calls["share"] >= _LEAST_SEEN]
        places = [shown(*place) for place in calls[["function", "file", "line"]].itertuples(index=False)]
        listed = ", ".join(f"{place} {percent(part)}" for place, part in zip(places, calls["share"], strict=True))
        where = f" The stacks saw forward passes called at {listed}." if places else ""
        columns = {"place": "line", "share": "seen there_share"}
        evidence = table("Lines that call forward passes", calls.assign(place=places), columns)
    passes = digits(float(mine["forwards"]))
    return Explanation(
        title="Forward passes are run for nothing",
        summary=f"A step has {passes} forward passes and {count(round(mine['backwards']), 'backward pass')};"
        f" {percent(mine['share'])} of the time in forward passes, {duration(takes_ns)} a step, is in"
        f" those without gradients, or after the last backward pass.{where}",
        changes=(
            *((change(_TOGETHER),) if mine["forwards"] >= _MANY * max(mine["backwards"], 1.0) else ()),
            change("compute metrics from the outputs of the training pass (`outputs.detach()`), or every k steps"),
            change("for a teacher or target network whose inputs repeat: keep its outputs"),
        ),
        evidence=evidence,
        sure="Measured in every steady step; the saving is all of it gone, the most that any change can give.",
        verdict=f"{percent(takes_ns / mean_step_ns)} of each step goes to forward passes that no backward pass uses.",
    )


RULE = Rule("Forward passes for nothing", check, explain, saves_from=("computation", "host", "other"))
