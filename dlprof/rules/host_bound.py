"""The device has nothing to do because Python and the launching of work cannot keep up.

A GPU runs what the host has queued. Where a kernel ends before the next was launched, the device idles, and the step is
as long as the Python that drives it. On a CPU run it is the time in which no operator runs and nothing is waited for:
the script's own Python. Waiting for the loader is not counted here.

Needs a trace, on a GPU one that links launches to kernels. There, an idle gap counts where the launch of the next
kernel came after the device had run dry. Time in which no thread is in an operator or in a call of the runtime for more
than 100 µs is the script's own Python; the rest of it is launching. A device that runs fewer than 8 kernels a step does
not train: then something compiles or starts up, or the trace is a part of one, and nothing is said.

Saving: on a GPU the larger one of two, each by replaying the traced steps: without the script's own Python, which no
compiler takes away; or with the launches of a captured graph, which leave a µs between kernels. Where the traces of all
ranks are here, what all of them have: a rank that has more makes the others wait, which is the business of `straggler`.
On a CPU all of the time.

What to change: find what Python does there (the report names its functions where it saw them) and take it out of the
loop, or do it rarely, or in tensors. Against launching: launch less (`fused=True` optimizers, `torch.compile`, larger
batches); replay launches (`torch.compile(mode="reduce-overhead")`, CUDA graphs).
"""

from __future__ import annotations

from contextlib import suppress

import pandas as pd

from dlprof.diagnosis import LEAST_SHARE, Clear, Rule
from dlprof.engine import Measured, MeasureFailed, by_rank
from dlprof.errors import NotMeasured
from dlprof.measures import settings
from dlprof.measures.breakdown import breakdown, part, part_least, part_noise
from dlprof.measures.gaps import gaps, own_python
from dlprof.measures.host_work import PYTHON, check_launches, host_work, launches
from dlprof.measures.loader import before_forward, loader_calls
from dlprof.measures.replay import own_time, saving
from dlprof.measures.stacks import COMPUTING, hottest, hottest_own
from dlprof.measures.waits import waits
from dlprof.result import Finding, Panel
from dlprof.timeline.steps import mean_step_ns, step_means
from dlprof.units import duration, percent, short

# Idle time is worth a look from 10 to 15 % of a step on (Ascend's msprof and TraceLens); from 10 % here.
NOTABLE_SHARE = 0.10

_HOST = ("host", "optimizer_host")

_MOST_FUNCTIONS = 3


def check(run: Measured) -> Finding | Clear:
    """Look at the time in which nothing is computed, sent, copied or waited for."""
    if (run.frame(step_means)["unit"] != "step").any():
        raise NotMeasured("nothing marks the steps: starting up cannot be told from training (prof.step() marks them)")
    on_cpu = settings.on_cpu(run)
    if not on_cpu:
        check_launches(run)
    work = run.frame(host_work)
    late = part(run, *_HOST)
    gone, launching = ({}, late) if on_cpu else _gains(run)
    step = mean_step_ns(run)
    of_python, of_launches = saving(run, gone), saving(run, launching)
    gain, python = max(of_python, of_launches), of_python >= of_launches
    share = gain / step
    if share < NOTABLE_SHARE:
        return Clear(f"{percent(share)} of the step waits for the host")
    worst = max(late, key=lambda r: late[r])
    mine = work[work["rank"] == worst]
    by_phase = mine.groupby("phase")["ns"].sum().sort_values(ascending=False)
    phase = str(by_phase.index[0]) if len(by_phase) else ""
    between = float(mine[mine["name"] == PYTHON]["ns"].sum()) / max(float(mine["ns"].sum()), 1.0)
    title, verdict = _TITLES["cpu" if on_cpu else "python" if python else "launches"]
    return Finding(
        title=title,
        summary=f"For {duration(late[worst])} of {duration(step)} rank {worst} computes nothing because its host has"
        f" launched nothing: {percent(between)} of that is Python between operators{_largest(mine)}."
        f"{_seen(run, worst, phase)}",
        verdict=verdict.format(percent(share)),
        noise_ns=part_noise(run, *_HOST),
        least_ns=min(gain, part_least(run, *_HOST)),
        saving_ns=gain,
        advice=_advice_cpu(run, phase, between > 0.5 and not _only_traced(run))
        if on_cpu
        else _advice(run, worst, phase, of_python, of_launches),
        evidence=_evidence(mine, worst),
        ranks=tuple(sorted(r for r, ns in late.items() if ns >= late[worst] / 2)),
        sure=_SURE["cpu" if on_cpu else "python" if python else "launches"] + _slowed(run),
    )


_TITLES = {
    "cpu": ("Python holds up the step", "{} of each step waits for Python and launches."),
    "python": (
        "The script's own Python holds up the device",
        "{} of each step the device waits for the script's own Python.",
    ),
    "launches": ("The host launches too slowly for its device", "{} of each step the device waits for launches."),
}
_SURE = {
    "cpu": "Estimated as all of it gone. ",
    "python": "Estimated by replaying the traced steps without the script's own Python: the most that moving it out of"
    " the loop can give. ",
    "launches": "Estimated by replaying the traced steps with the launches of a captured graph; the script's own Python"
    " and the optimizer's launches stay. ",
}


def _gains(run: Measured) -> tuple[dict[int, float], dict[int, float]]:
    """Return what each rank gains without the script's own Python, and with the launches of a graph, ns a step."""
    rows = run.frame(gaps).set_index("rank")
    if rows["graph_gain_ns"].isna().any():
        raise NotMeasured("the trace does not link launches to kernels: why the device idles is not known")
    python, graph = (by_rank(rows.reset_index(), f"{name}_gain_ns") for name in ("python", "graph"))
    with suppress(NotMeasured):
        # What one rank has more than the others makes them wait, which is the business of `straggler`.
        run.frame(waits)
        python, graph = (dict.fromkeys(gains, min(gains.values())) for gains in (python, graph))
    return python, graph


def _largest(mine: pd.DataFrame) -> str:
    """Name the operator or call that takes most of the host's part; "" where that is Python itself."""
    if not len(mine) or mine["name"].iloc[0] == PYTHON:
        return ""
    inside = f" in {mine['phase'].iloc[0]}" if mine["phase"].iloc[0] else ""
    return f"; the largest part: {short(str(mine['name'].iloc[0]), 80)}{inside}"


def _seen(run: Measured, rank: int, phase: str) -> str:
    """Name the script's functions that were seen there: in the stacks that were sampled, else in those of the trace."""
    sampled = _hottest(run, rank, phase)
    if sampled:
        return sampled
    frame = _functions(run, rank)
    if not len(frame):
        return ""
    named = ", ".join(
        f"{short(str(f), 80)} ({duration(float(ns))})" for f, ns in zip(frame["function"], frame["ns"], strict=True)
    )
    return f" The device waited longest for {named}."


def _functions(run: Measured, rank: int) -> pd.DataFrame:
    try:
        frame = run.frame(own_python)
    except (NotMeasured, MeasureFailed):
        return pd.DataFrame({"function": [], "ns": []})
    return frame[frame["rank"] == rank].head(_MOST_FUNCTIONS)


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


def _advice(run: Measured, rank: int, phase: str, of_python: float, of_launches: float) -> tuple[str, ...]:
    """Say what to change on a device: what gives most first, and what the other gives where that is worth a line."""
    step = mean_step_ns(run)
    frame = run.frame(launches)
    number, length = by_rank(frame, "kernels")[rank], by_rank(frame, "kernel_ns")[rank]
    replays = (
        '`torch.compile(model, mode="reduce-overhead")` replays launches as a CUDA graph'
        f" ({number:,.0f} kernels a step of {duration(length)} each)"
    )
    optimizer = settings.optimizer(run)
    said = []
    if of_launches >= LEAST_SHARE * step:
        if not settings.model(run).get("compiled"):
            said.append((of_launches, f"{replays}: {duration(of_launches)} a step"))
        if phase == "optimizer" and optimizer and not optimizer.get("fused"):
            said.append((of_launches, f"`{optimizer.get('class')}(..., fused=True)` (is {optimizer.get('fused')})"))
    if of_python >= LEAST_SHARE * step:
        said += [(of_python, line) for line in _of_python(run, rank, phase)]
    ordered = tuple(line for _, line in sorted(said, key=lambda one: -one[0]))
    return ordered or ("a larger batch: each kernel does more, at the same launch",)


def _of_python(run: Measured, rank: int, phase: str) -> list[str]:
    advice = []
    lead = before_forward(run)
    if not phase and lead is not None and lead[1] >= NOTABLE_SHARE * mean_step_ns(run):
        advice.append(
            f"if data comes in there, a DataLoader with workers: {duration(lead[1])} pass before the first forward, in"
            " no loader that dlprof knows"
        )
    frame = _functions(run, rank)
    where = f", {short(str(frame['function'].iloc[0]), 80)} first" if len(frame) else ""
    advice.append(
        f"take the script's own Python out of the loop{where}: metrics in tensors, logging every k steps, checks before"
        " training"
    )
    return advice


def _advice_cpu(run: Measured, phase: str, loose: bool) -> tuple[str, ...]:
    advice = []
    lead = before_forward(run)
    if not phase and lead is not None and lead[1] >= NOTABLE_SHARE * mean_step_ns(run):
        advice.append(
            f"if data comes in there, a DataLoader with workers: {duration(lead[1])} pass before the first forward, in"
            " no loader that dlprof knows"
        )
    if not phase and loose:
        advice.append("take the Python between the steps out of the loop: metrics in tensors, logging every k steps")
    optimizer = settings.optimizer(run)
    if phase == "optimizer" and not optimizer.get("fused"):
        advice.append(f"`{optimizer.get('class') or 'the optimizer'}(..., fused=True)` (is {optimizer.get('fused')})")
    if phase in ("forward", "backward") and not settings.model(run).get("compiled"):
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
    (breakdown, gaps, host_work, hottest, launches, loader_calls, own_python, own_time, step_means, waits),
    check,
    # A host that is faster waits for its data beside the device's work.
    saves_from=("input_wait", "host", "optimizer_host", "launch_latency", "other"),
)
