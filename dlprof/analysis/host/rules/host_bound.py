"""The device has nothing to do because Python and the launching of work cannot keep up.

A GPU runs what the host has queued. Where a kernel ends before the next was launched, the device idles, and the step is
as long as the Python that drives it. On a CPU run it is the time in which no operator runs and nothing is waited for:
the script's own Python. Waiting for the loader is not counted here.

Needs a trace, on a GPU one that links launches to kernels. There the rule is about the launches of the forward and
backward pass; what else the host does has rules of its own (`unfused_optimizer`, `host_sync`, `parameter_loop`,
`step_python`), which come first. Abstains where a device runs fewer than 8 kernels a step: it compiles or starts up, or
the trace is a part of one; and where the step cannot be captured, as its sizes vary or it waits for the device.

Saving: on a GPU the traced steps, at the pace of those that were not traced, replayed with the launches of a captured
graph, which leave a µs between kernels. Where the traces of all ranks are here, what all have: one that has more is a
`straggler`. On a CPU all of it, less what `step_python` keeps; and where no line of the script's is known to take it,
of the optimizer's time that alone, less the time in which the training thread was ready and had no core.

Where the model is called 4 times or more for one backward pass, the calls are replayed as one.

What to change: on a GPU call the model once for all samples of a step, or replay launches
(`torch.compile(mode="reduce-overhead")`, `torch.cuda.make_graphed_callables`).
On a CPU find what Python does there (the report names its functions where it saw them) and take it out of the loop, do
it rarely, or in tensors.
"""

from __future__ import annotations

import pandas as pd

from dlprof import schema
from dlprof.analysis import idioms, settings
from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import JOB, RANK, Frame, Job, Maybe, RankFacts, maybe, needs, per_rank
from dlprof.analysis.engine import by_rank as of_ranks
from dlprof.analysis.estimate import COMPILED, UNKNOWN, Estimate, Explanation, Rule, change, nothing, worst
from dlprof.analysis.host.gaps import HOST, PYTHON, SAVES_FROM, host_work, launch_means, model_calls
from dlprof.analysis.host.parts import MANY_CALLS, ON_CPU, ON_DEVICE, HeldUp, held_up
from dlprof.analysis.host.stacks import COMPUTING, hottest, hottest_own, hottest_place, shown
from dlprof.analysis.host.waiting import sync_waits
from dlprof.analysis.input.loader import before_forward
from dlprof.analysis.machine.cores import core_waits
from dlprof.analysis.panel import table
from dlprof.analysis.source.line_shares import CostlyLine, costliest, costly_lines, in_library
from dlprof.analysis.source.where import Option, options, with_option
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.steady import light_steps
from dlprof.analysis.timeline.steps import mean_step_ns, step_means
from dlprof.analysis.timeline.what_if import WhatIf, what_if
from dlprof.errors import NotMeasured
from dlprof.result import Change, Panel, Setting
from dlprof.units import current, digits, duration, often, percent, short

# Idle time is worth a look from 10 to 15 % of a step on (Ascend's msprof and TraceLens); from 10 % here.
NOTABLE_SHARE = 0.10

# A captured graph is worth its compiling from so many steps on that the gains of these are a minute. How long compiling
# takes differs by model: a minute stands for it in that sentence alone.
_MINUTE_NS = 60e9

_NOTHING = Change("no remedy is known to dlprof: no line of the script's takes a notable part of it", informs=True)
_UNTRACED = ", and no step without it was recorded: the true share is smaller."


@per_rank
def capturing(
    what_if: WhatIf = needs(what_if),
    light_steps: Maybe[Frame] = maybe(light_steps),
    sync_waits: Frame = needs(sync_waits),
    spans: Frame = needs(schema.SPANS),
    model_calls: float = needs(model_calls),
    rank: RankFacts = needs(RANK),
) -> Frame:
    """Return one row on whether forward and backward can be captured as a graph.

    waits: for the device in them, a step; sizes: how many there are of what the model gets in a steady step; captured:
    1 where graphs are replayed already; calls: of the model for one backward pass.
    """
    passes = iv.merge(what_if.phases["forward"], what_if.phases["backward"])
    waits = iv.holds(passes, sync_waits["start_ns"].to_numpy()).sum() / what_if.replay.steps
    steps = light_steps.or_none()
    steady = steps[steps["steady"]] if steps is not None else None
    sizes = 1 if steady is None else max(steady[c].nunique() for c in ("samples", "inputs", "tokens"))
    graphs = host.is_named(spans, "cudaGraphLaunch", "hipGraphLaunch").any() or bool(rank.facts.get("graphs"))
    row = {"waits": float(waits), "sizes": int(sizes), "captured": int(graphs), "calls": model_calls}
    return pd.DataFrame([row])


def check(
    held_up: HeldUp = needs(held_up),
    host_work: Frame = needs(host_work),
    capturing: Maybe[Frame] = maybe(capturing),
    mean_step_ns: float = needs(mean_step_ns),
    costly_lines: Maybe[Frame] = maybe(costly_lines),
    core_waits: Maybe[Frame] = maybe(core_waits),
    job: Job = needs(JOB),
) -> Estimate:
    work = host_work[host_work["rank"] == worst(held_up.by_rank_ns)]
    if held_up.where == ON_CPU:
        by_rank = {rank: ns for rank, ns in held_up.by_rank_ns.items() if not _meets_others(costly_lines, rank)}
        if not by_rank:
            return nothing("the script's own lines wait for other ranks")
        gain = held_up.gain_ns if worst(held_up.by_rank_ns) in by_rank else min(held_up.gain_ns, max(by_rank.values()))
        rank = worst(by_rank)
        work = host_work[host_work["rank"] == rank]
        if (phase := _phase(work)) and _line(costly_lines, rank, phase) is None:
            if phase == "optimizer":  # a fused one reaches nothing else
                gain *= float(work.loc[work["phase"] == phase, "ns"].sum() / work["ns"].sum())
            # The thread may as well have been ready and without a core.
            waits = {} if core_waits.or_none() is None else of_ranks(core_waits.get(), "waits_ns")
            gain = max(gain - waits.get(rank, 0.0), 0.0)
        return Estimate(
            saving_ns=gain,
            by_rank_ns=by_rank,
            noise_of=HOST,
            least_ns=held_up.least_ns,
            loses="is Python between operators",
            seen=(ON_CPU, work[work["phase"] != ""] if held_up.besides else work, held_up.besides),
        )
    calls = float(capturing.get()["calls"].min())
    large = held_up.gain_ns >= NOTABLE_SHARE * mean_step_ns
    loop = None
    if large and calls < MANY_CALLS and (obstacle := _obstacle(capturing.get())):
        loop = costliest(costly_lines, worst(held_up.by_rank_ns), "forward")
        if loop is None or loop.idiom is None or not loop.idiom.loops:
            raise NotMeasured(
                f"{duration(held_up.gain_ns)} a step are lost to launching the forward and backward pass, but these"
                f" cannot be captured as a graph: {obstacle}"
            )
    return Estimate(
        saving_ns=held_up.gain_ns,
        by_rank_ns=held_up.by_rank_ns,
        noise_of=HOST,
        loses=f"is lost because the device waits for the launches of the {settings.passes(job)}",
        seen=(ON_DEVICE, work, calls if loop is None else loop),
    )


def _phase(work: Frame) -> str:
    """Return the phase that most of the host's work of a rank is in; "": between them."""
    return str(work.groupby("phase")["ns"].sum().idxmax()) if len(work) else ""


def _line(costly_lines: Maybe[Frame], rank: int, phase: str) -> CostlyLine | None:
    """Return the line of a rank that takes this time: of a phase only one that is a loop."""
    # A loop in the forward pass, or in a loss, is also what makes the backward pass long.
    seen = [costliest(costly_lines, rank, one) for one in (("forward", "rest") if phase else ("rest",))]
    known = [one for one in seen if one and (not phase or (one.idiom and one.idiom.name == idioms.LOOPS))]
    return known[0] if known else None


def _meets_others(lines: Maybe[Frame], rank: int) -> bool:
    """Return whether what a rank was mostly seen in between the phases is a collective."""
    line = costliest(lines, rank, "rest")
    return line is not None and line.is_collective


def _obstacle(frame: Frame) -> str:
    """Return what keeps the passes from being captured; "": nothing that was seen."""
    if frame["captured"].any():
        return "graphs are replayed already"
    if (most := float(frame["waits"].max())) >= 1:
        return f"the host waits for the device in them {often(most)} a step, which the report lists"
    if (sizes := int(frame["sizes"].max())) > 1:
        return f"the model gets {sizes} different sizes in the steady steps"
    return ""


def explain(
    estimate: Estimate,
    step_means: Frame = needs(step_means),
    mean_step_ns: float = needs(mean_step_ns),
    launch_means: Maybe[Frame] = maybe(launch_means),
    before_forward: tuple[int, float] | None = needs(before_forward),
    hottest: Maybe[Frame] = maybe(hottest),
    costly_lines: Maybe[Frame] = maybe(costly_lines),
    options: Maybe[list[Option]] = maybe(options),
    job: Job = needs(JOB),
) -> Explanation:
    rank, (where, work, more) = estimate.worst, estimate.seen
    phase = _phase(work)
    in_python = float(work.loc[work["name"] == PYTHON, "ns"].sum()) / max(float(work["ns"].sum()), 1.0)
    traced = bool((step_means["source"] == "trace").all())
    work = work.assign(name=[short(name, 120) for name in work["name"]], phase=work["phase"].replace("", "between"))
    evidence = table(
        f"The host's part of a step on rank {rank}",
        work,
        {"name": "what the training thread did", "phase": "phase", "ns": "time a traced step_ns"},
    )
    if where == ON_DEVICE:
        if isinstance(more, CostlyLine):
            return _looped(estimate, more, mean_step_ns, evidence)
        if more >= MANY_CALLS:
            return _called_often(estimate, mean_step_ns, digits(round(more)), evidence)
        return _launching(estimate, mean_step_ns, estimate.rows(launch_means.get()), evidence, traced, job)
    besides = bool(more)
    name, at = work[["name", "phase"]].iloc[0] if len(work) else (PYTHON, "")
    longest = "" if name == PYTHON else f"; the largest part: {name} ({at})"
    # A range of the user's may lie in any of them.
    doing = (phase,) if phase in COMPUTING else COMPUTING if phase or besides else ("rest",)
    seen = hottest_own(hottest, rank, *doing)
    line = None if besides else _line(costly_lines, rank, phase)
    changes = [] if line is None else [in_library(line) or change(line.advice(between=not phase))]
    if line is None and not phase and in_python > 0.5 and not traced:
        place = hottest_place(hottest, rank, *doing)
        if place is not None:
            at = shown(place.function, place.file, place.line)
            changes.append(change(f"make {at} faster, or run it less often ({UNKNOWN})"))
    if line is None and before_forward and not phase and before_forward[1] >= NOTABLE_SHARE * mean_step_ns:
        lead = (
            f"what runs in the {duration(before_forward[1])} before the first forward, in no loader that dlprof knows"
        )
        changes.append(change(f"find {lead}: batches that are made there, workers of a DataLoader can make beside it"))
    if phase in ("forward", "backward") and not settings.model(job).get("compiled"):
        compiled = change(f"{COMPILED}: fewer operators, less Python between them")
        changes.append(with_option(compiled, (), options.or_none() or (), Setting("compile", False, True)))
    optimizer = settings.optimizer(job)
    now = optimizer.get("fused")
    if phase == "optimizer" and not now and settings.takes_fused(optimizer):
        changes.append(change(f"`{optimizer['class']}(..., fused=True)` (is {current(now)})", fused=(now, True)))
    apart = ", besides the lines between the phases that step_python names" if besides else ""
    untraced = _UNTRACED if traced else ": what fills it was seen in the traced steps, and scaled to the others."
    return Explanation(
        title="Python holds up the step",
        summary=f"For {duration(estimate.by_rank_ns[rank])} of {duration(mean_step_ns)} rank {rank} runs Python and"
        f" computes nothing{apart}: {percent(in_python)} of that is Python between operators{longest}.{seen}",
        changes=tuple(changes) or (_NOTHING,),
        evidence=evidence,
        at_most=True,
        where=() if line is None else (line.place,),
        verdict=f"{percent(estimate.saving_ns / mean_step_ns)} of each step waits for Python: {line.does}."
        if line is not None and line.does
        else "",
        sure=f"Estimated as all of it gone. The profiler slows the host{untraced}",
    )


def _looped(estimate: Estimate, line: CostlyLine, mean_step_ns: float, evidence: Panel) -> Explanation:
    return Explanation(
        title="A loop in the model launches its work bit by bit",
        summary=f"{percent(line.share)} of the stacks in the forward pass of rank {estimate.worst} are in {line.shown}"
        f" and the lines around it, a loop; for {duration(estimate.saving_ns)} of {duration(mean_step_ns)} a step the"
        " device waits for launches, and no CUDA graph can replay them, as the host waits for the device in between.",
        changes=(change(line.advice("do all of the loop at once:")),),
        evidence=evidence,
        at_most=True,
        where=(line.place,),
        verdict=f"Up to {percent(estimate.saving_ns / mean_step_ns)} of each step waits for a loop in the model:"
        f" {line.does}.",
        sure="Estimated by replaying the traced steps with all launches of the forward and backward pass at once: the"
        " most that it can give.",
    )


def _called_often(estimate: Estimate, mean_step_ns: float, calls: str, evidence: Panel) -> Explanation:
    return Explanation(
        title="The model is called again and again for one step",
        summary=f"Rank {estimate.worst} calls its model {calls} times for each backward pass; of the"
        f" {duration(mean_step_ns)} step the device waits most of the time for launches.",
        changes=(
            change(
                f"where the {calls} calls do not depend on each other: one call for all, with their samples put"
                " together (padded to the longest; graphs as one graph, as `torch_geometric.data.Batch` does)"
            ),
        ),
        evidence=evidence,
        at_most=True,
        sure=f"Estimated by replaying the traced steps with a part in {calls} of the calls, and of the work of each:"
        " the most that it can give.",
    )


def _launching(
    estimate: Estimate, mean_step_ns: float, means: Frame, evidence: Panel, traced: bool, job: Job
) -> Explanation:
    rank, kernels, mean_ns = estimate.worst, float(means["kernels"].iloc[0]), float(means["kernel_ns"].iloc[0])
    compiled = settings.model(job).get("compiled")
    # That many steps gain the minute that compiling may take.
    steps = digits(_MINUTE_NS / max(estimate.saving_ns, 1.0))
    call = "the call of `torch.compile`" if compiled else '`model = torch.compile(model, mode="reduce-overhead")`'
    text = f'`mode="reduce-overhead"` in {call}' if compiled else call
    return Explanation(
        title=f"The host launches the {settings.passes(job)} too slowly for its device",
        summary=f"Rank {rank} launches {kernels:,.0f} kernels of {duration(mean_ns)} each in a step of"
        f" {duration(mean_step_ns)}; the device waits for the next launch.",
        changes=(
            change(
                f"{text}: the launches replayed as a CUDA graph. It compiles first: a minute of that is gained back in"
                f" {steps} steps",
                mode=(None, "reduce-overhead"),
            ),
            change("or `torch.cuda.make_graphed_callables` around the part of the model with constant sizes"),
        ),
        evidence=evidence,
        at_most=traced,
        sure="Estimated by replaying the traced steps, at the pace of those that were not traced, with the launches of"
        f" a captured graph; the rest of the script stays. The profiler slows the host{_UNTRACED if traced else '.'}",
    )


RULE = Rule(
    "Waiting for the host",
    check,
    explain,
    (*SAVES_FROM, "computation", "queued_wait", "other"),
    notable=NOTABLE_SHARE,
    of_host=True,
    generic=True,
)
