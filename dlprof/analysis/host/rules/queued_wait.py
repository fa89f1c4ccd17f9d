"""The device has work queued, does nothing, and the work waits.

A stream runs its work in order, and may be told to wait: for an event of another stream, for a function on the host,
for memory. While all streams wait, the device idles although its host is far ahead; neither a faster host nor a faster
device would change that.

Needs a trace of a GPU that links launches to kernels. A gap counts where the work that ended it had been launched
before the device ran dry, and which is longer than 20 µs (50 µs after a launch on an idle device). The calls before its
launch tell what it waited for. Graphs hold nodes that no trace shows (functions on the host, memory, waits): one of
them is what a later node of the same graph waits for. Before a graph's first node it may be that, or the kernels that
some profilers do not record of a graph: there nothing can be said.

Saving: the traced steps replayed without these waits, where what they wait for is known and can be changed.

What to change: record the event earlier, or wait for it later; take the function off the stream (`cudaLaunchHostFunc`,
callbacks), or make it do less; no allocations that synchronise in the loop. For graphs: trace their nodes (nsys:
`--cuda-graph-trace=node`), and capture without what waits.
"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.engine import Job, Maybe, by_rank
from dlprof.analysis.estimate import LEAST_SHARE, Estimate, Explanation, Rule, change, worst
from dlprof.analysis.host.panels.queue import waits_table
from dlprof.analysis.host.queue import EVENT, FUNCTION, GRAPH_NODE, MEMORY, OTHER_STREAM
from dlprof.analysis.step.breakdown import part, part_least, part_noise
from dlprof.analysis.step.savings import saving
from dlprof.errors import NotMeasured
from dlprof.units import duration

# Waiting counts from here on, as idle time whose cause is known (small_kernels); the saving may be half of it.
NOTABLE_SHARE = 0.05

_CHANGES = {
    EVENT: change(
        "record the event as soon as what must be waited for is launched, and wait for it as late as possible"
    ),
    OTHER_STREAM: change("launch what it waits for earlier, or on the same stream"),
    FUNCTION: change("take the function off the stream (`cudaLaunchHostFunc`, stream callbacks), or make it do less"),
    GRAPH_NODE: change(
        "find what the captured code does before that kernel on the host or on another stream, and capture without it"
        " (nsys `--cuda-graph-trace=node` shows the nodes)"
    ),
    MEMORY: change(
        "no `cudaMalloc` or `cudaFree` in the loop: keep buffers; `PYTORCH_ALLOC_CONF=expandable_segments:True`",
        PYTORCH_ALLOC_CONF=(None, "expandable_segments:True"),
    ),
}


def check(
    queued_waits: Maybe[pd.DataFrame],
    mean_step_ns: Maybe[float],
    breakdown: Maybe[pd.DataFrame],
    own_time: Maybe[pd.DataFrame],
    job: Job,
) -> Estimate:
    """Estimate what the job would gain without the queued work's waits for what most of it waits for."""
    if settings.on_cpu(job):
        raise NotMeasured("the job trains on the CPU, which has no queue")
    frame, step = queued_waits.get(), mean_step_ns.get()
    waits = part(breakdown.get(), "queued_wait")
    most = max(waits.values(), default=0.0)
    mine = frame[frame["rank"] == worst(waits)] if waits else frame
    by_reason = mine.groupby("waits_for")["ns"].sum().sort_values(ascending=False)
    gains = {
        str(reason): _gain(queued_waits.get(), own_time.get(), str(reason))
        for reason in by_reason.index
        if reason in _CHANGES
    }
    best = max(gains, key=lambda reason: gains[reason], default="")
    gain = gains.get(best, 0.0)
    long = len(mine) > 0 and most >= NOTABLE_SHARE * step
    if long and gain < max(LEAST_SHARE * step, most / 2):
        longest = mine.iloc[0]
        raise NotMeasured(
            f"the longest wait ends with {longest['ended_by']} on stream {longest['stream']}, which"
            f" {longest['launched_by'] or 'a call'} had launched {duration(float(longest['queued_ns']))} before; what"
            f" it waits for is {by_reason.index[0]}"
        )
    return Estimate(
        saving_ns=gain,
        by_rank_ns=waits,
        noise_ns=part_noise(breakdown.get(), "queued_wait"),
        least_ns=part_least(breakdown.get(), "queued_wait"),
        lost_ns=most,
        loses="the device idles although work is queued",
        explain=(lambda: _explain(mean_step_ns.get(), waits, mine, best)) if long else None,
    )


def _explain(mean_step_ns: float, waits: Mapping[int, float], mine: pd.DataFrame, reason: str) -> Explanation:
    rank = worst(waits)
    first = mine[mine["waits_for"] == reason].iloc[0]
    return Explanation(
        title="Queued work waits",
        summary=f"For {duration(waits[rank])} of {duration(mean_step_ns)} the device of rank {rank} idles with"
        f" work queued; most of it before {first['ended_by']} on {first['stream']}, launched"
        f" {duration(float(first['queued_ns']))} before it starts: it waits for {reason}.",
        changes=(_CHANGES[reason],),
        evidence=waits_table(mine, rank),
        sure="Estimated by replaying the traced steps without these waits.",
    )


def _gain(queued_waits: pd.DataFrame, own_time: pd.DataFrame, reason: str) -> float:
    mine = queued_waits[queued_waits["waits_for"] == reason].drop_duplicates("rank").dropna(subset=["gain_ns"])
    return saving(own_time, by_rank(mine, "gain_ns"))


RULE = Rule(
    "queued_wait",
    "Queued work that waits",
    check,
    saves_from=("queued_wait", "launch_latency"),
)
