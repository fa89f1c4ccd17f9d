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

from dlprof.analysis import settings
from dlprof.analysis.engine import Frame, Job, by_rank
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change
from dlprof.analysis.host.gaps import HOST, SAVES_FROM, SMALL_NS, check_launches
from dlprof.analysis.panel import table
from dlprof.analysis.timeline.launches import NOT_LINKED
from dlprof.analysis.timeline.steps import check_marked
from dlprof.errors import NotMeasured
from dlprof.units import digits, duration, is_now, short

# Half of where idle time is worth a look (rule host_bound): here its cause is known.
NOTABLE_SHARE = 0.05

_COLUMNS = {"name": "kernel", "count": "times a step", "mean_ns": "takes_ns"}
_CAPTURED = change(
    '`torch.compile(model, mode="reduce-overhead")`: fewer kernels, launched as one graph',
    mode=(None, "reduce-overhead"),
)


def check(step_means: Frame, launch_means: Frame, gaps: Frame) -> Estimate:
    check_marked(step_means)
    check_launches(launch_means)
    if gaps["graph_gain_ns"].isna().any():
        raise NotMeasured(NOT_LINKED)
    of_gaps = gaps["small_ns"] / (gaps["launching_ns"] + gaps["latency_ns"]).clip(lower=1.0)
    return Estimate(
        gone_ns=by_rank(gaps.assign(gone_ns=gaps["graph_gain_ns"] * of_gaps), "gone_ns"),
        noise_of=HOST,
        least_of=HOST,
        loses="is lost waiting for the launch after a small kernel",
    )


def explain(estimate: Estimate, small_kernels: Frame, gaps: Frame, job: Job) -> Explanation:
    rank = estimate.worst
    mine, waits_ns = estimate.rows(small_kernels), estimate.rows(gaps)["small_ns"].iloc[0]
    number = f"{digits(mine['small'].iloc[0])} of {digits(mine['kernels'].iloc[0])} kernels"
    batch = settings.training_loader(job, rank).get("batch_size")
    text = f"a larger batch{is_now(batch)}: each kernel does more, at the same launch"
    larger = change(text, numerics=True, training=True)
    shown = mine.assign(name=[short(name, 120) for name in mine["name"]])
    return Explanation(
        title="Kernels are too small to hide their launches",
        summary=f"{number} a step of rank {rank} take less than {duration(SMALL_NS)}; behind them the device waits"
        f" {duration(waits_ns)} for launches.",
        changes=(larger,) if settings.model(job).get("compiled") else (_CAPTURED, larger),
        evidence=table(f"Small kernels of a step on rank {rank}, the most frequent", shown, _COLUMNS),
        sure="Estimated by replaying the traced steps with the launches of a captured graph.",
    )


_SAVES_FROM = (*SAVES_FROM, "other")
RULE = Rule("Kernels too small for their launches", check, explain, _SAVES_FROM, notable=NOTABLE_SHARE, only_with="gpu")
