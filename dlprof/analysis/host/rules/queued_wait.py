"""The device has work queued, does nothing, and the work waits.

A stream runs its work in order, and may have to wait: for an event of another stream, a function on the host, memory.
While all streams wait, the device idles although its host is far ahead; neither a faster host nor a faster device would
change that.

Needs a trace of a GPU that links launches to kernels. A gap counts where the work that ended it had been launched
before the device ran dry, from 20 µs on (50 µs after a launch on an idle device). The calls before that launch show
what it waited for. A later node of a graph waits for nodes that no trace shows (functions on the host, memory, waits).
What the first node waits for may be kernels that some profilers do not record of a graph: there the rule abstains.

Saving: the traced steps replayed without these waits, where what they wait for is known and can be changed.

What to change: record the event earlier, or wait for it later; take the function off the stream (`cudaLaunchHostFunc`,
callbacks), or make it do less; no allocations that synchronise in the loop. For graphs: trace their nodes (nsys:
`--cuda-graph-trace=node`), and capture without what waits.
"""

from __future__ import annotations

from dlprof.analysis.engine import Frame, by_rank, needs
from dlprof.analysis.estimate import LEAST_SHARE, Estimate, Explanation, Rule, change, worst
from dlprof.analysis.host.waiting import EVENT, FUNCTION, GRAPH_NODE, MEMORY, OTHER_STREAM, queued_waits
from dlprof.analysis.panels.host import waits_table
from dlprof.analysis.settings import EXPANDABLE
from dlprof.analysis.step.breakdown import breakdown, part
from dlprof.analysis.step.savings import own_time, saving
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.errors import NotMeasured
from dlprof.units import duration

# Waiting counts from this share, as idle time with a known cause; the saving may be half of it.
NOTABLE_SHARE = 0.05

_CATEGORY = "queued_wait"
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
        f"call no `cudaMalloc` or `cudaFree` in the loop: keep buffers; `PYTORCH_ALLOC_CONF={EXPANDABLE}`",
        PYTORCH_ALLOC_CONF=(None, EXPANDABLE),
    ),
}


def check(
    queued_waits: Frame = needs(queued_waits),
    mean_step_ns: float = needs(mean_step_ns),
    breakdown: Frame = needs(breakdown),
    own_time: Frame = needs(own_time),
) -> Estimate:
    waits = part(breakdown, _CATEGORY)
    most = waits[worst(waits)]
    mine = queued_waits[queued_waits["rank"] == worst(waits)]
    gains = {
        reason: saving(own_time, by_rank(same.drop_duplicates("rank"), "gain_ns"))
        for reason, same in queued_waits.groupby("waits_for")
        if reason in _CHANGES and (mine["waits_for"] == reason).any()
    }
    best = max(gains, key=lambda reason: gains[reason], default="")
    gain = gains.get(best, 0.0)
    notable = len(mine) > 0 and most >= NOTABLE_SHARE * mean_step_ns
    if notable and gain < max(LEAST_SHARE * mean_step_ns, most / 2):
        longest = mine.iloc[0]
        raise NotMeasured(
            f"the longest wait ends with {longest['ended_by']} on stream {longest['stream']}, which"
            f" {longest['launched_by'] or 'a call'} had launched {duration(longest['queued_ns'])} before; what it waits"
            f" for is {longest['waits_for']}"
        )
    return Estimate(
        saving_ns=gain,
        by_rank_ns=waits,
        noise_of=(_CATEGORY,),
        least_of=(_CATEGORY,),
        lost_ns=most,
        loses="is idle device time although work is queued",
        clear=not notable,
        seen=best,
    )


def explain(
    estimate: Estimate, queued_waits: Frame = needs(queued_waits), mean_step_ns: float = needs(mean_step_ns)
) -> Explanation:
    rank, reason = estimate.worst, estimate.seen
    first = estimate.rows(queued_waits[queued_waits["waits_for"] == reason]).iloc[0]
    return Explanation(
        title="Queued work waits",
        summary=f"For {duration(estimate.by_rank_ns[rank])} of {duration(mean_step_ns)} the device of rank {rank} idles"
        f" with work queued; most of it before {first['ended_by']} on {first['stream']}, launched"
        f" {duration(first['queued_ns'])} before it starts: it waits for {reason}.",
        changes=(_CHANGES[reason],),
        evidence=waits_table(queued_waits, rank),
        sure="Estimated by replaying the traced steps without these waits.",
    )


RULE = Rule("Queued work that waits", check, explain, (_CATEGORY, "launch_latency"), only_with="gpu")
