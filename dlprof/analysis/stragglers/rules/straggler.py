"""One rank is late, or all ranks of one host or one pipeline, and all others wait for it.

Synchronous training runs at the pace of its slowest rank. The others show the loss as communication: they sit in a
collective that cannot begin. The culprit shows least of it, for it arrives last and waits for nobody.

Needs the traces of all ranks: collectives are matched by process group and order, and waiting is the latest start less
one's own. A rank's own time is the step less that waiting, and less the transfers that lie open on it only because it
came early, and that the last to come hides behind its computation. On a CPU all steps show it: by how long each rank's
one thread is busy, or by the phases of the step log. On a GPU its mean is that of all steps, but only the traced ones
show how it varies, and a difference that comes and goes between them is no finding. Where traces are missing, the rank
whose collectives are abnormally short is the late one.

Saving: the late ranks at the mean pace of the next slowest; where all steps show their own time, each is replayed, and
jitter stays. Where a late rank computes longer because it holds more of the model than others (tables, layers,
experts), gets larger inputs, or makes what it then sends to all, every step is replayed with the work shared out
evenly. That other work of its own is nobody else's is assumed; the report says which of the two it was. What another
rule answers for (a late rank's wait for data, its checkpoints, its garbage) is that rule's saving and not this one's.
Nor is what it lacks of the cores that the job's other ranks on its host then have.

Of pipelines side by side, all ranks of one are as late as its slowest. Named is the one that takes longer than those
with its stage in the others, where it explains half of the delay; else the pipeline.

What to change depends on what the late rank does with its own time, which the report tells: more work, more or longer
inputs, a slower clock, a host whose cores are taken.
"""

from __future__ import annotations

import pandas as pd

from dlprof.analysis.communication.collectives import waits
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change
from dlprof.analysis.panel import table
from dlprof.analysis.source.statements import Trees, contiguous_parts, statements
from dlprof.analysis.stragglers.late_ranks import CAUSES, OWNERS, LateRanks, Outlier, outlier, straggling
from dlprof.analysis.stragglers.own_time import NOTABLE_SHARE, who_waits
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.errors import NotMeasured
from dlprof.units import duration, percent

# If there are more rows, the slowest and the fastest are shown.
MOST_ROWS = 16

_WAITING = {
    "rank": "rank",
    "own_ns": "own time_ns",
    "wait_ns": "waits for others_ns",
    "last": "came last",
    "matched": "collectives",
    "computation_ns": "computation_ns",
    "input_wait_ns": "input wait_ns",
}
_SHORT = {
    "rank": "rank",
    "short": "abnormally short",
    "counted": "collectives",
    "waited_ns": "longer than the shortest, a step_ns",
}


def check(
    waits: Maybe[Frame] = maybe(waits),
    straggling: Maybe[LateRanks] = maybe(straggling),
    outlier: Maybe[Outlier] = maybe(outlier),
    mean_step_ns: Maybe[float] = maybe(mean_step_ns),
    job: Job = needs(JOB),
) -> Estimate:
    if waits.or_none() is None and not waits.broke:
        return _without_all(waits, outlier, job)
    left, step = straggling.get(), mean_step_ns.get()
    saving = left.share * step
    return Estimate(
        saving_ns=saving,
        by_rank_ns=dict.fromkeys(left.lead.ranks, left.cost * step),
        noise_ns=left.noise * step,
        least_ns=left.lead.least_ns / left.lead.behind_ns * saving if saving else 0.0,
        loses=f"is lost because all ranks wait for {left.who}",
        summary=left.why,
        seen=left,
    )


def _without_all(waits: Maybe[Frame], outlier: Maybe[Outlier], job: Job) -> Estimate:
    """Estimate where ranks are missing, and so starts cannot be matched: the late rank's collectives are too short."""
    if not job.missing_ranks or len(job.ranks) < 2:
        waits.get()  # raises why
    found = outlier.or_none()
    if found is None:
        raise NotMeasured(f"{waits.why()}; {outlier.why()}")
    loses = f"is lost because the recorded ranks wait for rank {found.rank}"
    return Estimate(saving_ns=found.gain_ns, by_rank_ns={found.rank: found.gain_ns}, loses=loses, seen=found)


def explain(
    estimate: Estimate,
    who_waits: Maybe[Frame] = maybe(who_waits),
    statements: Trees = needs(statements),
    job: Job = needs(JOB),
) -> Explanation:
    if isinstance(estimate.seen, Outlier):
        return _explain_outlier(estimate.seen, job)
    late: LateRanks = estimate.seen
    who, because, (does, do) = late.who, late.because, CAUSES[late.cause]
    least = 0.1 * late.more[late.cause]
    elsewhere = "".join(
        f"; that it {also} is counted by {by}" for c, (also, by) in OWNERS.items() if late.more[c] > least
    )
    ranks = who_waits.get()
    is_late = ranks["rank"].isin(late.lead.ranks)
    met = int(ranks["matched"].max())
    last = min(int(ranks["last"][is_late].sum()), met)  # ranks of one host may come at the very same time
    mine, others = (float(ranks["wait_ns"][which].mean()) for which in (is_late, ~is_late))
    waits = f"waits for others {duration(mine)} a step" if mine else "waits for none of them"
    verdict, how = "", f"{who} at the pace of the next slowest rank"
    why = ". That none of its work is moved to the others is assumed: nothing shows that they do less for it."
    if because.shared:
        verdict = f"{percent(late.share)} of each step is lost as {who} has more to do: {because.words}."
        how = "the ranks' work shared out evenly"
        why = f": what {who} computes more, the others would compute then."
    ends = MOST_ROWS // 2
    all_shown = len(ranks) <= MOST_ROWS
    shown = ranks if all_shown else pd.concat([ranks.head(ends), ranks.tail(ends)])
    note = "" if all_shown else f"The slowest and the fastest {ends} of {len(ranks)} ranks."
    return Explanation(
        title=f"{who[0].upper()}{who[1:]} makes the others wait",
        summary=f"It is last in {last} of {met} collectives and {waits}, the others wait {duration(others)}; it {does}"
        f" than the others ({duration(late.more[late.cause])} a step more){': ' if because.words else ''}"
        f"{because.words}{elsewhere}.",
        verdict=verdict,
        changes=(change(because.do or do),),
        evidence=table("Who waits for whom, per traced step", shown, _WAITING, note=note),
        sure=f"Estimated with {how}, {late.source}{why}",
        where=contiguous_parts(statements) if because.dealt else (),
    )


def _explain_outlier(found: Outlier, job: Job) -> Explanation:
    missing = f"{len(job.missing_ranks)} of {job.world_size} ranks are not here"
    shortest_first = found.table.sort_values("waited_ns", kind="stable")
    short, counted = found.table[["short", "counted"]].max()
    return Explanation(
        title=f"Rank {found.rank} makes the others wait",
        summary=f"Its collectives are abnormally short in {short} of {counted}: the others wait"
        f" {duration(found.mean_ns)} a step in theirs. {missing}, and what they do is not known.",
        changes=(change("compare its input, its work and its host with another's, or record the traces of all ranks"),),
        evidence=table("How long each rank stays in its collectives", shortest_first, _SHORT, MOST_ROWS),
        at_most=True,
        sure=f"Estimated from the lengths of collectives alone; {missing}: were one of them nearly as late, less.",
    )


_SAVES_FROM = ("communication", "pipeline_bubble")
RULE = Rule("A late rank", check, explain, _SAVES_FROM, notable=NOTABLE_SHARE)
