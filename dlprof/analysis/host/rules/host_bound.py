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

from collections.abc import Mapping
from contextlib import suppress

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.engine import Job, Maybe, MeasureFailed, by_rank
from dlprof.analysis.estimate import LEAST_SHARE, Estimate, Explanation, Rule, change, worst
from dlprof.analysis.host.host_work import PYTHON, check_launches
from dlprof.analysis.host.stacks import COMPUTING, hottest_own
from dlprof.analysis.step.breakdown import part, part_least, part_noise
from dlprof.analysis.step.savings import saving
from dlprof.analysis.timeline.steps import check_marked
from dlprof.errors import NotMeasured
from dlprof.result import Change, Panel
from dlprof.units import duration, percent, short

# Idle time is worth a look from 10 to 15 % of a step on (Ascend's msprof and TraceLens); from 10 % here.
NOTABLE_SHARE = 0.10

_HOST = ("host", "optimizer_host")

_MOST_FUNCTIONS = 3

# What the step waits for: title, verdict, and how the saving was estimated.
_SAID = {
    "cpu": ("Python holds up the step", "waits for Python and launches", "Estimated as all of it gone."),
    "python": (
        "The script's own Python holds up the device",
        "the device waits for the script's own Python",
        "Estimated by replaying the traced steps without the script's own Python: the most that moving it out of the"
        " loop can give.",
    ),
    "launches": (
        "The host launches too slowly for its device",
        "the device waits for launches",
        "Estimated by replaying the traced steps with the launches of a captured graph; the script's own Python and the"
        " optimizer's launches stay.",
    ),
}


def check(
    step_means: pd.DataFrame,
    launch_means: Maybe[pd.DataFrame],
    host_work: Maybe[pd.DataFrame],
    breakdown: Maybe[pd.DataFrame],
    gaps: Maybe[pd.DataFrame],
    waits: Maybe[pd.DataFrame],
    own_time: Maybe[pd.DataFrame],
    before_forward: Maybe[tuple[int, float] | None],
    mean_step_ns: Maybe[float],
    own_python: Maybe[pd.DataFrame],
    hottest: Maybe[pd.DataFrame],
    job: Job,
) -> Estimate:
    """Estimate the time in which nothing is computed, sent, copied or waited for."""
    check_marked(step_means)
    on_cpu = settings.on_cpu(job)
    if not on_cpu:
        check_launches(launch_means.get())
    work = host_work.get()
    late = part(breakdown.get(), *_HOST)
    gone, launching = ({}, late) if on_cpu else _gains(gaps.get(), waits)
    of_python, of_launches = saving(own_time.get(), gone), saving(own_time.get(), launching)
    what = "cpu" if on_cpu else "python" if of_python >= of_launches else "launches"
    return Estimate(
        saving_ns=max(of_python, of_launches),
        by_rank_ns=late,
        noise_ns=part_noise(breakdown.get(), *_HOST),
        least_ns=part_least(breakdown.get(), *_HOST),
        loses=_SAID[what][1],
        explain=lambda: _explain(
            before_forward,
            mean_step_ns,
            step_means,
            launch_means,
            own_python,
            hottest,
            job,
            what,
            late,
            work[work["rank"] == worst(late)],
            of_python,
            of_launches,
        ),
    )


def _explain(
    before_forward: Maybe[tuple[int, float] | None],
    mean_step_ns: Maybe[float],
    step_means: pd.DataFrame,
    launch_means: Maybe[pd.DataFrame],
    own_python: Maybe[pd.DataFrame],
    hottest: Maybe[pd.DataFrame],
    job: Job,
    what: str,
    late: Mapping[int, float],
    mine: pd.DataFrame,
    of_python: float,
    of_launches: float,
) -> Explanation:
    rank = worst(late)
    by_phase = mine.groupby("phase")["ns"].sum().sort_values(ascending=False)
    phase = str(by_phase.index[0]) if len(by_phase) else ""
    between = float(mine[mine["name"] == PYTHON]["ns"].sum()) / max(float(mine["ns"].sum()), 1.0)
    if what == "cpu":
        changes = _changes_cpu(
            before_forward.get(), mean_step_ns, job, phase, between > 0.5 and not _only_traced(step_means)
        )
    else:
        changes = _changes(
            mean_step_ns, launch_means.get(), before_forward, own_python, job, rank, phase, of_python, of_launches
        )
    title, _, sure = _SAID[what]
    return Explanation(
        title=title,
        summary=f"For {duration(late[rank])} of {duration(mean_step_ns.get())} rank {rank} computes nothing because its"
        f" host has launched nothing: {percent(between)} of that is Python between operators{_largest(mine)}."
        f"{_seen(hottest, own_python, rank, phase)}",
        changes=changes,
        evidence=_evidence(mine, rank),
        sure=f"{sure} {_slowed(step_means)}",
    )


def _gains(gaps: pd.DataFrame, waits: Maybe[pd.DataFrame]) -> tuple[dict[int, float], dict[int, float]]:
    """Return what each rank gains without the script's own Python, and with the launches of a graph, ns a step."""
    rows = gaps.set_index("rank")
    if rows["graph_gain_ns"].isna().any():
        raise NotMeasured("the trace does not link launches to kernels: why the device idles is not known")
    python, graph = (by_rank(rows.reset_index(), f"{name}_gain_ns") for name in ("python", "graph"))
    with suppress(NotMeasured):
        # What one rank has more than the others makes them wait, which is the business of `straggler`.
        waits.get()
        python, graph = (dict.fromkeys(gains, min(gains.values())) for gains in (python, graph))
    return python, graph


def _largest(mine: pd.DataFrame) -> str:
    """Name the operator or call that takes most of the host's part; "" where that is Python itself."""
    if not len(mine) or mine["name"].iloc[0] == PYTHON:
        return ""
    inside = f" in {mine['phase'].iloc[0]}" if mine["phase"].iloc[0] else ""
    return f"; the largest part: {short(str(mine['name'].iloc[0]), 80)}{inside}"


def _seen(hottest: Maybe[pd.DataFrame], own_python: Maybe[pd.DataFrame], rank: int, phase: str) -> str:
    """Name the script's functions that were seen there: in the stacks that were sampled, else in those of the trace."""
    sampled = _hottest(hottest, rank, phase)
    if sampled:
        return sampled
    frame = _functions(own_python, rank)
    if not len(frame):
        return ""
    named = ", ".join(
        f"{short(str(f), 80)} ({duration(float(ns))})" for f, ns in zip(frame["function"], frame["ns"], strict=True)
    )
    return f" The device waited longest for {named}."


def _functions(own_python: Maybe[pd.DataFrame], rank: int) -> pd.DataFrame:
    try:
        frame = own_python.get()
    except (NotMeasured, MeasureFailed):
        return pd.DataFrame({"function": [], "ns": []})
    return frame[frame["rank"] == rank].head(_MOST_FUNCTIONS)


def _hottest(hottest: Maybe[pd.DataFrame], rank: int, phase: str) -> str:
    """Say which of the user's functions the training thread was seen in most, where stacks were recorded."""
    # A range of the user's may lie in any of them.
    doing = (phase,) if phase in COMPUTING else COMPUTING if phase else ("rest",)
    most = hottest_own(hottest, rank, *doing)
    where = "in " + " and ".join(doing) if phase else "outside forward, backward and optimizer"
    return f" Of the stacks seen {where}, {most}." if most else ""


def _only_traced(step_means: pd.DataFrame) -> bool:
    """Return whether no step was recorded but those of the trace, which of dlprof's own ranges has none."""
    return bool((step_means["source"] == "trace").all())


def _slowed(step_means: pd.DataFrame) -> str:
    if _only_traced(step_means):
        return "The profiler slows the host, and no step without it was recorded: the true share is smaller."
    return "What fills it was seen in the traced steps, which the profiler slows, and scaled to those that it did not."


def _changes(
    mean_step_ns: Maybe[float],
    launch_means: pd.DataFrame,
    before_forward: Maybe[tuple[int, float] | None],
    own_python: Maybe[pd.DataFrame],
    job: Job,
    rank: int,
    phase: str,
    of_python: float,
    of_launches: float,
) -> tuple[Change, ...]:
    """Return what to change on a device: what gives most first, and the other where it is worth a line."""
    least = LEAST_SHARE * mean_step_ns.get()
    number, length = by_rank(launch_means, "kernels")[rank], by_rank(launch_means, "kernel_ns")[rank]
    launching, python = [], []
    if of_launches >= least:
        if not settings.model(job).get("compiled"):
            replays = change(
                '`torch.compile(model, mode="reduce-overhead")` replays launches as a CUDA graph'
                f" ({number:,.0f} kernels a step of {duration(length)} each): {duration(of_launches)} a step",
                mode=(None, "reduce-overhead"),
            )
            launching.append(replays)
        if phase == "optimizer" and settings.optimizer(job):
            launching += _fused(job)
    if of_python >= least:
        python = _unknown_loader(before_forward.get(), mean_step_ns, phase)
        functions = _functions(own_python, rank)
        where = f", {short(str(functions['function'].iloc[0]), 80)} first" if len(functions) else ""
        python.append(
            change(
                f"take the script's own Python out of the loop{where}: metrics in tensors, logging every k steps,"
                " checks before training"
            )
        )
    ordered = [*python, *launching] if of_python > of_launches else [*launching, *python]
    return tuple(ordered) or (change("a larger batch: each kernel does more, at the same launch", numerics=True),)


def _changes_cpu(
    before_forward: tuple[int, float] | None, mean_step_ns: Maybe[float], job: Job, phase: str, loose: bool
) -> tuple[Change, ...]:
    changes = _unknown_loader(before_forward, mean_step_ns, phase)
    if not phase and loose:
        changes.append(
            change("take the Python between the steps out of the loop: metrics in tensors, logging every k steps")
        )
    if phase == "optimizer":
        changes += _fused(job)
    if phase in ("forward", "backward") and not settings.model(job).get("compiled"):
        changes.append(change("`torch.compile(model)`: fewer operators, less Python between them"))
    return tuple(changes) or (change("find the Python that the report lists, and do it less often or in tensors"),)


def _unknown_loader(before_forward: tuple[int, float] | None, mean_step_ns: Maybe[float], phase: str) -> list[Change]:
    """Return the change for batches that no known loader makes: much time passes before the first forward."""
    lead = before_forward
    if phase or lead is None or lead[1] < NOTABLE_SHARE * mean_step_ns.get():
        return []
    return [
        change(
            f"if data comes in there, a DataLoader with workers: {duration(lead[1])} pass before the first forward, in"
            " no loader that dlprof knows"
        )
    ]


def _fused(job: Job) -> list[Change]:
    optimizer = settings.optimizer(job)
    now = optimizer.get("fused")
    name = optimizer.get("class") or "the optimizer"
    return [] if now else [change(f"`{name}(..., fused=True)` (is {now})", fused=(now, True))]


def _evidence(mine: pd.DataFrame, rank: int) -> Panel:
    phases = mine["phase"].replace("", "between")
    rows = tuple(
        (short(str(n), 120), str(p), float(ns)) for n, p, ns in zip(mine["name"], phases, mine["ns"], strict=True)
    )
    columns = ("what the training thread did", "phase", "time a traced step_ns")
    return Panel("table", f"The host's part of a step on rank {rank}", rows, columns)


RULE = Rule(
    "host_bound",
    "Waiting for the host",
    check,
    # A host that is faster waits for its data beside the device's work.
    saves_from=("input_wait", "host", "optimizer_host", "launch_latency", "other"),
    notable=NOTABLE_SHARE,
)
