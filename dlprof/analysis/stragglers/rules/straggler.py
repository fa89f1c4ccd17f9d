"""One rank is late, or all ranks of one host, and all others wait for it.

Synchronous training runs at the pace of its slowest rank. The others show the loss as communication: they sit in a
collective that cannot begin. The culprit shows least of it, for it arrives last and waits for nobody.

Needs the traces of all ranks: collectives are matched by process group and order, and waiting is the latest start less
one's own. A rank's own time is the step less that waiting, and less the transfers that lie open on it only because it
is ahead: those that the last to come hides behind its computation, as this rank would have without the waiting. On a
CPU run the step log tells it for every step, or at least for how long the rank is busy in each of them; on a GPU
only the traced steps do, and a difference that comes and goes between them is not told. Where traces are missing,
the ranks that are here vote: whose collectives are abnormally short is the one that the others wait for.

Saving: every step replayed with the late ranks at the mean pace of the next slowest; their jitter stays. Where a late
rank computes longer because it holds more of the model than others (tables, layers, experts that are not the same on
all), its work does not vanish: then every step is replayed with the work shared out evenly, which is the bound. That
other work which it does alone is nobody else's is assumed, and the report says which of the two it was. What another
rule answers for (a late rank's wait for data, its checkpoints, its garbage) is that rule's saving and not this one's.
Nor is what a late rank lacks of the cores that the job's other ranks on its host have: were it given these, they would
lack them.

What to change depends on what the late rank does with its own time, which the report tells: more work, more or longer
inputs, a slower clock, a host whose cores are taken.
"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from dlprof.analysis.communication.matching import SENT
from dlprof.analysis.engine import Job, Maybe
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change
from dlprof.analysis.step.breakdown import part
from dlprof.analysis.stragglers.late_ranks import NOTABLE_SHARE, OWNERS, LateRanks, theirs_alone
from dlprof.errors import NotMeasured
from dlprof.result import Panel
from dlprof.units import duration, percent

# More rows than this nobody reads: the slowest and the fastest are shown.
MOST_ROWS = 16

# What a late rank may do longer, and what to change.
_CAUSES: Mapping[str, tuple[str, str]] = {
    "computation": (
        "computes longer",
        "give it the same work (shards, sequence lengths, layers); then look at its device: clock, users, cooling",
    ),
    "communication": ("transfers longer", "look at its link: a slow network card or a wrong route"),
    "copy": ("copies longer", "look at its link to the device and at its pinned memory"),
    "validation": ("validates longer", "let all ranks validate, each its share"),
    "optimizer_host": ("is longer in its optimizer", "give each rank the same share of the optimizer's state"),
    "host": ("spends longer on the host", "look at what only this rank does: logging, saving, its cores"),
    "launch_latency": ("takes longer from kernel to kernel", "compare its kernels and streams with another rank's"),
    "queued_wait": ("has queued work that waits longer", "compare its kernels and streams with another rank's"),
    "other": ("is late for a reason that was not recorded", "look at what only this rank does"),
}


def check(
    waits: Maybe[pd.DataFrame],
    matched: Maybe[pd.DataFrame],
    late_ranks: Maybe[LateRanks],
    voted: Maybe[pd.DataFrame],
    breakdown: Maybe[pd.DataFrame],
    mean_step_ns: Maybe[float],
    job: Job,
) -> Estimate:
    """Estimate what the lead of the ranks with the longest own time over the next costs."""
    if waits.or_none() is None and not waits.broke:
        return _by_vote(voted, breakdown, job, waits.why())
    steps, parts = waits.get(), breakdown.get()
    if not (matched.get()["collective"] != SENT).any() and max(part(parts, "pipeline_bubble").values(), default=0):
        raise NotMeasured("the ranks exchange nothing but with their pipeline's neighbours: see stage_imbalance")
    late, step = late_ranks.get(), mean_step_ns.get()
    left = theirs_alone(late)
    saving = left.share * step
    return Estimate(
        saving_ns=saving,
        by_rank_ns=dict.fromkeys(late.lead.ranks, late.share * step),
        noise_ns=left.noise * step,
        least_ns=late.lead.least_ns / late.lead.behind_ns * saving if saving else 0.0,
        loses=f"all ranks wait for {late.who}",
        summary=left.why,
        explain=lambda: _explain(left, steps, parts),
    )


def _explain(late: LateRanks, steps: pd.DataFrame, breakdown: pd.DataFrame) -> Explanation:
    who, more, cause, because = late.who, late.more, late.cause, late.because
    does, do = _CAUSES[cause]
    elsewhere = "".join(
        f"; that it {also} is counted by {by}" for c, (also, by) in OWNERS.items() if more[c] > 0.1 * more[cause]
    )
    is_late = steps["rank"].isin(late.lead.ranks)
    mine, others = steps[is_late], steps[~is_late]
    met = int(steps.groupby("rank")["matched"].sum().max())
    # Ranks of one host may come at the very same time, and are then last together.
    come = f"last in {min(int(mine['last'].sum()), met)} of {met} collectives"
    verdict = ""
    if because.shared:
        verdict = f"{percent(late.share)} of each step is lost as {who} holds more of the model than the others."
        how = "the ranks' work shared out evenly"
        why = f": what {who} computes more is of parameters that others do not hold, and they would compute it then."
    else:
        how = f"{who} at the pace of the next slowest rank"
        why = ". That none of its work is moved to the others is assumed: nothing tells that they do less for it."
    return Explanation(
        title=f"{who[0].upper()}{who[1:]} makes the others wait",
        summary=f"It is {come} and waits {duration(mine['wait_ns'].mean())} a step, the others"
        f" {duration(others['wait_ns'].mean())}; it {does} than the others ({duration(more[cause])} a step more)"
        f"{': ' if because.said else ''}{because.said}{elsewhere}.",
        verdict=verdict,
        changes=(change(because.do or do),),
        evidence=_table(breakdown, steps),
        sure=f"Estimated by replaying the steps with {how}, {late.source}{why}",
    )


def _table(breakdown: pd.DataFrame, steps: pd.DataFrame) -> Panel:
    steps = steps.assign(own_ns=steps.groupby("step")["dur_ns"].transform("mean") - steps["wait_ns"])
    ranks = steps.groupby("rank")
    columns = {
        "own time_ns": ranks["own_ns"].mean(),
        "waits for others_ns": ranks["wait_ns"].mean(),
        "came last": ranks["last"].sum(),
        "collectives": ranks["matched"].sum(),
    }
    table = pd.DataFrame(columns).sort_values("own time_ns", ascending=False).reset_index()
    for name, category in (("computation_ns", "computation"), ("input wait_ns", "input_wait")):
        table[name] = table["rank"].map(part(breakdown, category)).fillna(0.0)
    ends = MOST_ROWS // 2
    shown = table if len(table) <= MOST_ROWS else pd.concat([table.head(ends), table.tail(ends)])
    note = "" if shown is table else f"The slowest and the fastest {ends} of {len(table)} ranks."
    return _panel("Who waits for whom, per traced step", shown, note)


def _panel(title: str, table: pd.DataFrame, note: str = "") -> Panel:
    return Panel("table", title, tuple(table.itertuples(index=False, name=None)), tuple(table.columns), note=note)


def _by_vote(voted: Maybe[pd.DataFrame], breakdown: Maybe[pd.DataFrame], job: Job, why: str) -> Estimate:
    """Estimate without matching starts, where ranks are missing: the late rank's collectives are too short."""
    if not job.missing_ranks or len(job.ranks) < 2:
        raise NotMeasured(why)
    frame = voted.or_none()
    if frame is None:
        raise NotMeasured(f"{why}; {voted.why()}")
    votes = frame.set_index("rank")
    late = int(str(votes["votes"].idxmax()))
    if 2 * votes["votes"].max() <= votes["counted"].iloc[0]:
        raise NotMeasured(
            f"{why}; the collectives of those that are here last alike: if one is late, its trace is not here"
        )
    # What is hidden behind computation costs nothing, and is no waiting.
    exposed_ns = pd.Series(part(breakdown.get(), "communication"), dtype=float).reindex(votes.index).fillna(0.0)
    waited = votes["waited_ns"].clip(upper=exposed_ns).drop(index=late)
    # Without the late one, the others still wait for the next: what the one that waits least of them waits is gained.
    gain = float(waited.min())
    return Estimate(
        saving_ns=gain,
        by_rank_ns={late: gain},
        loses=f"the ranks that are here wait for rank {late}",
        explain=lambda: _explain_vote(job, late, votes, float(waited.mean())),
    )


def _explain_vote(job: Job, late: int, votes: pd.DataFrame, waited_ns: float) -> Explanation:
    missing = f"{len(job.missing_ranks)} of {job.world_size} ranks are not here"
    shown = votes.reset_index().sort_values("waited_ns", kind="stable").head(MOST_ROWS)
    columns = ["rank", "abnormally short", "collectives", "longer than the shortest, a step_ns"]
    return Explanation(
        title=f"Rank {late} makes the others wait",
        summary=f"Its collectives are abnormally short in {votes['votes'].max()} of {votes['counted'].iloc[0]}: the"
        f" others wait {duration(waited_ns)} a step in theirs. {missing}, and what they do is not known.",
        changes=(change("compare its input, its work and its host with another's, or record the traces of all ranks"),),
        evidence=_panel("How long each rank stays in its collectives", shown.set_axis(columns, axis=1)),
        sure=f"Estimated from the lengths of collectives alone; {missing}: were one of them nearly as late, less.",
    )


RULE = Rule("straggler", "A late rank", check, saves_from=("communication", "pipeline_bubble"), notable=NOTABLE_SHARE)
