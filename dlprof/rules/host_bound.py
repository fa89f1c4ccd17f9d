"""The device has nothing to do because Python and the launching of work cannot keep up.

A GPU runs what the host has queued. Where a kernel ends before the next was launched, the device idles, and the step is
as long as the Python that drives it. On a CPU run it is the time in which no operator runs and nothing is waited for:
the script's own Python. Waiting for the loader is not counted here.

Needs a trace. On a GPU an idle gap counts where the launch of the next kernel came after the device had run dry, and
where the next kernel was queued in time and took up to 20 µs to start. Longer gaps before queued work are dependencies
within the device, which no host could shorten. A device that runs fewer than 8 kernels a step does not train: then
something compiles or starts up, or the trace is a part of one, and nothing is said.

Saving: on a GPU what a captured graph would save of these gaps, all but a µs each, and the script's own Python between
them. On a CPU all of the time.

What to change: find what Python does there (the table) and take it out of the loop, or do it rarely, or in tensors;
launch less (`fused=True` optimizers, `torch.compile`, larger batches); replay launches (`torch.compile(mode=
"reduce-overhead")`, CUDA graphs); do not wait for results (`.item()`, prints) in every step.
"""

from __future__ import annotations

import pandas as pd

from dlprof.diagnosis import Clear, Rule
from dlprof.engine import Measured, by_rank
from dlprof.errors import NotMeasured
from dlprof.measures import settings
from dlprof.measures.breakdown import breakdown, part, part_noise
from dlprof.measures.gaps import gaps
from dlprof.measures.host_work import PYTHON, check_launches, host_work, launches
from dlprof.measures.loader import before_forward, loader_calls
from dlprof.measures.replay import own_time, saving
from dlprof.measures.stacks import COMPUTING, hottest, hottest_own
from dlprof.measures.steps import mean_step_ns, step_means
from dlprof.result import Finding, Panel
from dlprof.units import duration, percent, short

# Idle time is worth a look from 10 to 15 % of a step on (Ascend's msprof and TraceLens); from 10 % here.
NOTABLE_SHARE = 0.10

_HOST = ("host", "optimizer_host")


def check(run: Measured) -> Finding | Clear:
    """Look at the time in which nothing is computed, sent, copied or waited for."""
    if (run.frame(step_means)["unit"] != "step").any():
        raise NotMeasured("nothing marks the steps: starting up cannot be told from training (prof.step() marks them)")
    on_cpu = settings.on_cpu(run)
    if not on_cpu:
        check_launches(run)
    work = run.frame(host_work)
    late = part(run, *_HOST)
    gone, sure = _removable(run, late)
    step = mean_step_ns(run)
    gain = saving(run, gone)
    share = gain / step
    if share < NOTABLE_SHARE:
        return Clear(f"{percent(share)} of the step waits for the host")
    worst = max(late, key=lambda r: late[r])
    mine = work[work["rank"] == worst]
    by_phase = mine.groupby("phase")["ns"].sum().sort_values(ascending=False)
    phase = str(by_phase.index[0]) if len(by_phase) else ""
    top = mine.iloc[0] if len(mine) else None
    inside = f" in {top['phase']}" if top is not None and top["phase"] else ""
    largest = short(str(top["name"]), 80) if top is not None and top["name"] != PYTHON else ""
    most = f"; the largest part: {largest}{inside}" if largest else ""
    python = float(mine[mine["name"] == PYTHON]["ns"].sum()) / max(float(mine["ns"].sum()), 1.0)
    return Finding(
        title="Python holds up the step" if on_cpu else "The host is too slow for its device",
        summary=f"For {duration(late[worst])} of {duration(step)} rank {worst} computes nothing because its host has"
        f" launched nothing: {percent(python)} of that is Python between operators{most}.{_hottest(run, worst, phase)}",
        verdict=f"{percent(share)} of each step waits for Python and launches.",
        noise_ns=part_noise(run, *_HOST),
        saving_ns=gain,
        advice=_advice(run, worst, phase, python > 0.5 and not _only_traced(run)),
        evidence=_evidence(mine, worst),
        ranks=tuple(sorted(r for r, ns in late.items() if ns >= late[worst] / 2)),
        sure=f"{sure} {_slowed(run)}",
    )


def _removable(run: Measured, late: dict[int, float]) -> tuple[dict[int, float], str]:
    """Give what could be saved of the host's part of the step, ns by rank, and how that was estimated."""
    try:
        rows = run.frame(gaps).set_index("rank")
    except NotMeasured:
        return late, "Estimated as all of it gone."
    # What a graph keeps is the device's own, and not slowed by a trace.
    added = rows["overhead_ns"] - rows["kept_ns"]
    gone = {r: max(0.0, ns + float(added.get(r, 0.0))) for r, ns in late.items()}
    return gone, "Estimated as the launches of a captured graph, and without the script's own Python between them."


def _hottest(run: Measured, rank: int, phase: str) -> str:
    """Say which of the user's functions the training thread was seen in most, where stacks were recorded."""
    # A range of the user's may lie in any of them.
    doing = (phase,) if phase in COMPUTING else COMPUTING if phase else ("rest",)
    most = hottest_own(run, rank, *doing)
    where = "in " + " and ".join(doing) if phase else "outside forward, backward and optimizer"
    return f" Of the stacks seen {where}, {most}." if most else ""


def _only_traced(run: Measured) -> bool:
    """Tell whether no step was recorded but those of the trace, which of dlprof's own ranges has none."""
    return bool((run.frame(step_means)["source"] == "trace").all())


def _slowed(run: Measured) -> str:
    if _only_traced(run):
        return "The profiler slows the host, and no step without it was recorded: the true share is smaller."
    return "What fills it was seen in the traced steps, which the profiler slows, and scaled to those that it did not."


def _advice(run: Measured, rank: int, phase: str, loose: bool) -> tuple[str, ...]:
    advice = []
    lead = before_forward(run)
    if not phase and lead is not None and lead[1] >= NOTABLE_SHARE * mean_step_ns(run):
        advice.append(
            f"if data comes in there, a DataLoader with workers: {duration(lead[1])} pass before the first forward, in"
            " no loader that dlprof knows"
        )
    if not phase and loose:
        advice.append("take the Python between the steps out of the loop: metrics in tensors, logging every k steps")
    on_device = not settings.on_cpu(run)
    optimizer = settings.optimizer(run)
    if phase == "optimizer" and not optimizer.get("fused"):
        advice.append(f"`{optimizer.get('class') or 'the optimizer'}(..., fused=True)` (is {optimizer.get('fused')})")
    if on_device:
        frame = run.frame(launches)
        number, length = by_rank(frame, "kernels")[rank], by_rank(frame, "kernel_ns")[rank]
        many = f": {number:,.0f} kernels a step of {duration(length)} each"
        compiled = settings.model(run).get("compiled")
        if not compiled:
            advice.append(f'`torch.compile(model, mode="reduce-overhead")` replays launches as a CUDA graph{many}')
        advice.append("no `.item()`, `print` or `.cpu()` of device values in every step: each waits for the device")
    elif phase in ("forward", "backward") and not settings.model(run).get("compiled"):
        advice.append("`torch.compile(model)`: fewer operators, less Python between them")
    return tuple(advice) or ("find the Python that the report lists, and do it less often or in tensors",)


def _evidence(mine: pd.DataFrame, rank: int) -> Panel:
    phases = mine["phase"].replace("", "between")
    rows = tuple(
        (short(str(n), 120), str(p), duration(ns)) for n, p, ns in zip(mine["name"], phases, mine["ns"], strict=True)
    )
    columns = ("what the training thread did", "phase", "time a traced step")
    return Panel("table", f"The host's part of a step on rank {rank}", rows, columns)


RULE = Rule(
    "host_bound",
    "Waiting for the host",
    (breakdown, gaps, host_work, hottest, launches, loader_calls, own_time, step_means),
    check,
    saves_from=("host", "optimizer_host", "other"),
)
