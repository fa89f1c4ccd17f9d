"""The device has nothing to do because Python and the launching of work cannot keep up.

A GPU runs what the host has queued. Where a kernel ends before the next was launched, the device idles, and the step is
as long as the Python that drives it. On a CPU run it is the time in which no operator runs and nothing is waited for:
the script's own Python. Waiting for the loader is not counted here.

Needs a trace, on a GPU one that links launches to kernels. There, an idle gap counts where the next kernel was launched
after the device had run dry. Where no thread is in an operator or a runtime call for more than 100 µs, it is the
script's own Python; the rest is launching. Abstains where a device runs fewer than 8 kernels a step: it compiles or
starts up, or the trace is a part of one.

Saving: on a GPU the larger one of two, each by replaying the traced steps: without the script's own Python, which no
compiler takes away; or with the launches of a captured graph, which leave a µs between kernels. Where the traces of all
ranks are here, what all have: one that has more is a `straggler`. On a CPU all of it, less what `step_python` keeps.

What to change: find what Python does there (the report names its functions where it saw them) and take it out of the
loop, or do it rarely, or in tensors. Against launching: launch less (`fused=True` optimizers, `torch.compile`, larger
batches); replay launches (`torch.compile(mode="reduce-overhead")`, CUDA graphs).
"""

from __future__ import annotations

from collections.abc import Mapping

from dlprof.analysis import settings
from dlprof.analysis.engine import Frame, Job, Maybe
from dlprof.analysis.estimate import LEAST_SHARE, Estimate, Explanation, Rule, change, worst
from dlprof.analysis.host.between import HeldUp
from dlprof.analysis.host.gaps import HOST, LAUNCHES, ON_CPU, PYTHON, SAVES_FROM, SCRIPT
from dlprof.analysis.host.stacks import COMPUTING, hottest_own
from dlprof.analysis.panel import table
from dlprof.result import Change
from dlprof.units import current, duration, percent, short

# Idle time is worth a look from 10 to 15 % of a step on (Ascend's msprof and TraceLens); from 10 % here.
NOTABLE_SHARE = 0.10

MOST_FUNCTIONS = 3

# What the step waits for: title, verdict, and how the saving was estimated.
_SAID = {
    ON_CPU: ("Python holds up the step", "waits for Python and launches", "Estimated as all of it gone."),
    SCRIPT: (
        "The script's own Python holds up the device",
        "is lost because the device waits for the script's own Python",
        "Estimated by replaying the traced steps without it: the most that moving it out of the loop can give.",
    ),
    LAUNCHES: (
        "The host launches too slowly for its device",
        "is lost because the device waits for launches",
        "Estimated by replaying the traced steps with a captured graph; the script's own Python and optimizer stay.",
    ),
}
_LISTED = change("find the Python that the report lists, and do it less often or in tensors")
_LARGER = change("a larger batch: each kernel does more, at the same launch", numerics=True, training=True)
_UNTRACED = ", and no step without it was recorded: the true share is smaller."
_SCALED = ": what fills it was seen in the traced steps, and scaled to those that it did not slow."


def check(held_up: HeldUp, host_work: Frame) -> Estimate:
    work = host_work[host_work["rank"] == worst(held_up.by_rank_ns)]
    return Estimate(
        saving_ns=held_up.gain_ns,
        by_rank_ns=held_up.by_rank_ns,
        noise_of=HOST,
        least_ns=held_up.least_ns,
        loses=_SAID[held_up.cause][1],
        seen=(held_up.cause, work[work["phase"] != ""] if held_up.besides else work, held_up.besides),
    )


def explain(
    estimate: Estimate,
    host_gains: Mapping[str, float],
    step_means: Frame,
    mean_step_ns: float,
    launch_means: Frame,
    before_forward: tuple[int, float] | None,
    own_python: Frame,
    hottest: Maybe[Frame],
    job: Job,
) -> Explanation:
    rank, (cause, work, besides) = estimate.worst, estimate.seen
    phase = str(work.groupby("phase")["ns"].sum().idxmax()) if len(work) else ""
    in_python = float(work.loc[work["name"] == PYTHON, "ns"].sum()) / max(float(work["ns"].sum()), 1.0)
    traced = bool((step_means["source"] == "trace").all())
    work = work.assign(name=[short(name, 120) for name in work["name"]], phase=work["phase"].replace("", "between"))
    name, where = work[["name", "phase"]].iloc[0] if len(work) else (PYTHON, "")
    longest = "" if name == PYTHON else f"; the largest part: {name} ({where})"
    functions = estimate.rows(own_python).head(MOST_FUNCTIONS)
    waited = ", ".join(f"{short(f['function'], 80)} ({duration(f['ns'])})" for _, f in functions.iterrows())
    # A range of the user's may lie in any of them.
    doing = (phase,) if phase in COMPUTING else COMPUTING if phase or besides else ("rest",)
    seen = hottest_own(hottest, rank, *doing) or (f" The device waited longest for {waited}." if waited else "")
    in_loop = []
    if before_forward and not phase and before_forward[1] >= NOTABLE_SHARE * mean_step_ns:
        lead = f"{duration(before_forward[1])} pass before the first forward, in no loader that dlprof knows"
        in_loop.append(change(f"if data comes in there, a DataLoader with workers: {lead}"))
    if cause != ON_CPU or (not phase and in_python > 0.5 and not traced):
        first = f", {short(functions['function'].iloc[0], 80)} first" if len(functions) else ""
        instead = "what the stacks show there first" if seen else "metrics in tensors, logging every k steps"
        in_loop.append(change(f"take the script's own Python out of the loop{first}: {instead}"))
    launches = _launches(job, phase, host_gains, estimate.rows(launch_means))
    if cause != ON_CPU:
        least = LEAST_SHARE * mean_step_ns
        in_loop, launches = in_loop * (host_gains[SCRIPT] >= least), launches * (host_gains[LAUNCHES] >= least)
    title, _, sure = _SAID[cause]
    more = ", besides the lines between the phases that step_python names" if besides else ""
    idle = "runs Python and computes nothing" if cause == ON_CPU else "has no device work, as it has launched nothing"
    return Explanation(
        title=title,
        summary=f"For {duration(estimate.by_rank_ns[rank])} of {duration(mean_step_ns)} rank {rank} {idle}{more}:"
        f" {percent(in_python)} of that is Python between operators{longest}.{seen}",
        changes=tuple(launches + in_loop if cause == LAUNCHES else in_loop + launches)
        or (_LISTED if cause == ON_CPU else _LARGER,),
        evidence=table(
            f"The host's part of a step on rank {rank}",
            work,
            {"name": "what the training thread did", "phase": "phase", "ns": "time a traced step_ns"},
        ),
        at_most=cause != LAUNCHES or traced,
        sure=f"{sure} The profiler slows the host{_UNTRACED if traced else _SCALED}",
    )


def _launches(job: Job, phase: str, host_gains: Mapping[str, float], means: Frame) -> list[Change]:
    """Return what makes the host launch less, or at a lower cost."""
    optimizer, compiled, changes = settings.optimizer(job), settings.model(job).get("compiled"), []
    if not compiled and LAUNCHES in host_gains:
        text = '`torch.compile(model, mode="reduce-overhead")` replays launches as a CUDA graph'
        kernels = f"{means['kernels'].iloc[0]:,.0f} kernels a step of {duration(means['kernel_ns'].iloc[0])} each"
        gain = f"{duration(host_gains[LAUNCHES])} a step"
        changes.append(change(f"{text} ({kernels}): {gain}", mode=(None, "reduce-overhead")))
    elif not compiled and phase in ("forward", "backward"):
        changes.append(change("`torch.compile(model)`: fewer operators, less Python between them"))
    now = optimizer.get("fused")
    if phase == "optimizer" and not now and settings.takes_fused(optimizer):
        changes.append(change(f"`{optimizer['class']}(..., fused=True)` (is {current(now)})", fused=(now, True)))
    return changes


RULE = Rule("Waiting for the host", check, explain, (*SAVES_FROM, "other"), notable=NOTABLE_SHARE)
