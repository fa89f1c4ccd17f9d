"""The device is done with a kernel before the host has launched the next one, kernel after kernel.

Launching an operator from Python costs the host some 10 µs, whatever it computes. Where kernels are shorter than that
the device waits for nearly each of them, and a faster device or better kernels would change nothing.

Needs a trace of a GPU. A gap counts where it lies behind a kernel of less than 10 µs, and the next one was launched too
late, or in time and took up to 20 µs to start. Where the script itself does something else for longer than 100 µs, that
is not launching.

Saving: the traced steps replayed with the launches of a captured graph, which leaves a µs between kernels; of what that
gains the share of such gaps in all that launching leaves. It is part of what `host_bound` finds, with a cause.

What to change: more work a kernel (a larger batch, longer sequences); fewer kernels (`torch.compile`, fused layers and
optimizers, `foreach` functions); cheaper launches (CUDA graphs: `torch.compile(mode="reduce-overhead")`).
"""

from __future__ import annotations

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.engine import Job, Maybe, by_rank
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change
from dlprof.analysis.host.gaps import SMALL_NS, check_launches
from dlprof.analysis.panel import table
from dlprof.analysis.step.breakdown import part_least, part_noise
from dlprof.analysis.timeline.launches import NOT_LINKED
from dlprof.analysis.timeline.steps import check_marked
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.result import Change
from dlprof.units import digits, duration, short

_HOST = ("host", "optimizer_host")


def check(
    step_means: pd.DataFrame,
    launch_means: Maybe[pd.DataFrame],
    gaps: Maybe[pd.DataFrame],
    breakdown: Maybe[pd.DataFrame],
    job: Job,
) -> Estimate:
    """Estimate the launch-bound gaps behind small kernels."""
    if settings.on_cpu(job):
        raise DoesNotApply("the job trains on the CPU, which launches no kernels")
    check_marked(step_means)
    check_launches(launch_means.get())
    rows = gaps.get()
    if rows["graph_gain_ns"].isna().any():
        raise NotMeasured(NOT_LINKED)
    of_gaps = rows["small_ns"] / (rows["launching_ns"] + rows["latency_ns"]).clip(lower=1.0)
    gone = by_rank(rows.assign(gone_ns=rows["graph_gain_ns"] * of_gaps), "gone_ns")
    return Estimate(
        gone_ns=gone,
        noise_ns=part_noise(breakdown.get(), *_HOST),
        least_ns=part_least(breakdown.get(), *_HOST),
        loses="is lost waiting for the launch after a small kernel",
    )


def explain(estimate: Estimate, small_kernels: pd.DataFrame, gaps: pd.DataFrame, job: Job) -> Explanation:
    """Say how many of a step's kernels are small, and list the most frequent."""
    rank = estimate.worst
    mine, waits_ns = small_kernels[small_kernels["rank"] == rank], gaps.set_index("rank")["small_ns"][rank]
    number = f"{digits(mine['small'].iloc[0])} of {digits(mine['kernels'].iloc[0])} kernels"
    return Explanation(
        title="Kernels are too small to hide their launches",
        summary=f"{number} a step of rank {rank} take less than {duration(SMALL_NS)}; behind them the device waits"
        f" {duration(waits_ns)} for launches.",
        changes=_changes(job, rank),
        evidence=table(
            f"Small kernels of a step on rank {rank}, the most frequent",
            mine.assign(name=[short(name, 120) for name in mine["name"]]),
            {"name": "kernel", "count": "times a step", "mean_ns": "takes_ns"},
        ),
        sure="Estimated by replaying the traced steps with the launches of a captured graph.",
    )


def _changes(job: Job, rank: int) -> tuple[Change, ...]:
    batch = settings.training_loader(job, rank).get("batch_size")
    now = f" (is {batch})" if batch else ""
    larger = change(f"a larger batch{now}: each kernel does more, at the same launch", numerics=True)
    if settings.model(job).get("compiled"):
        return (larger,)
    captured = '`torch.compile(model, mode="reduce-overhead")`: fewer kernels, launched as one graph'
    return change(captured, mode=(None, "reduce-overhead")), larger


RULE = Rule(
    "small_kernels",
    "Kernels too small for their launches",
    check,
    explain,
    saves_from=("input_wait", "host", "optimizer_host", "launch_latency", "other"),
    notable=0.05,  # half of where idle time is worth a look (rule host_bound): here its cause is known
)
