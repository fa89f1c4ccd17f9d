"""One rank is late, or all ranks of one host, and all others wait for it.

Synchronous training runs at the pace of its slowest rank. The others show the loss as communication: they sit in a
collective that cannot begin. The culprit shows least of it, for it arrives last and waits for nobody.

Needs the traces of all ranks: collectives are matched by process group and order, and waiting is the latest start less
one's own. A rank's own time is the step less that waiting, and less the transfers that lie open on it only because it
is ahead: those that the last to come hides behind its computation, as this rank would have without the waiting. On a
CPU run the light layer tells it for every step, or at least for how long the rank is busy in each of them; on a GPU
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
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import median

import pandas as pd

from dlprof.diagnosis import LEAST_NOISE, Rule
from dlprof.engine import Measured, by_rank
from dlprof.errors import NotMeasured
from dlprof.estimate import Estimate, Explanation, change
from dlprof.measures import settings
from dlprof.measures.breakdown import breakdown, part
from dlprof.measures.clocks import clocks
from dlprof.measures.collectives import collectives, exposed
from dlprof.measures.lateness import Lead, busy, busy_share, lead, light_own_time, traced_own_time
from dlprof.measures.matching import SENT, matched
from dlprof.measures.replay import own_time
from dlprof.measures.samples import WAITED, outside, sample_means
from dlprof.measures.votes import voted
from dlprof.measures.waits import waits
from dlprof.measures.workload import Reason, longer_because, workload
from dlprof.result import CATEGORIES, Panel
from dlprof.timeline.steps import mean_step_ns, step_means
from dlprof.units import duration, percent

# Notable from 5 % of a step on; other tools grade 5, 10 and 20 %.
NOTABLE_SHARE = 0.05

# Where all steps of the light layer and the few traced ones in a row show different ranks, or only the latter show one,
# from here on. The slowest rank is looked at: of two alike, one is twice the noise ahead in one window of twenty, and
# three times in one of seventy.
SURE_NOISE = 3.0

# More rows than this nobody reads: the slowest and the fastest are shown.
MOST_ROWS = 16

# What a late rank may do with its time that another rule answers for: which claims the saving of it.
_OWNERS: Mapping[str, tuple[str, str]] = {
    "input_wait": ("waits longer for its data", "input_wait"),
    "pipeline_bubble": ("idles longer in its pipeline", "pipeline_bubble"),
    "checkpoint": ("saves checkpoints", "checkpoint_stall"),
    "garbage_collection": ("collects garbage longer", "gc_pauses"),
    "compilation": ("compiles longer", "recompilation"),
}

_TRACED = "in the traced steps"
_BUSY = "in every steady step, as what each rank is busy tells"

# What else, and what to change; what its computation is longer by is looked into further.
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


@dataclass(frozen=True)
class _Late:
    """The late ranks, and what this rule would save of what they cost: shares of the mean steady step."""

    run: Measured
    lead: Lead
    source: str  # which steps show it
    agreed: bool = True  # whether no other steps show other ranks
    share: float = 0.0
    noise: float = 0.0
    why: str = ""  # why it is not more
    more: Mapping[str, float] = field(default_factory=dict)  # what they spend more on than the others, ns a category
    cause: str = ""  # most of that, of what no other rule answers for
    because: Reason = field(default_factory=Reason)  # why they compute longer, where that is the cause

    def cut(self, share: float, why: str) -> _Late:
        return replace(self, share=share, noise=self.noise * share / self.share, why=why)

    @property
    def who(self) -> str:
        ranks = self.lead.ranks
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"host {settings.host(self.run, ranks[0])}"

    @property
    def behind(self) -> str:
        return f"{self.who} is {percent(self.share)} of a step behind"


def check(run: Measured) -> Estimate:
    """Estimate what the lead of the ranks with the longest own time over the next costs."""
    try:
        run.frame(waits)
    except NotMeasured as why:
        return _by_vote(run, why)
    if not (run.frame(matched)["collective"] != SENT).any() and max(part(run, "pipeline_bubble").values(), default=0):
        raise NotMeasured("the ranks exchange nothing but with their pipeline's neighbours: see stage_imbalance")
    late, step = _late(run), mean_step_ns(run)
    left = _left(late)
    saving = left.share * step
    return Estimate(
        saving_ns=saving,
        by_rank_ns=dict.fromkeys(late.lead.ranks, late.share * step),
        noise_ns=left.noise * step,
        least_ns=late.lead.least_ns / late.lead.behind_ns * saving if saving else 0.0,
        loses=f"all ranks wait for {late.who}",
        summary=left.why,
        explain=lambda: _explain(left),
    )


def _late(run: Measured) -> _Late:
    """Find the late ranks from every step where the light layer can tell, else from the traced ones."""
    traced = _dearest(run, run.frame(traced_own_time))
    late = _Late(run, traced, _TRACED)
    with suppress(NotMeasured):
        whole = _dearest(run, run.frame(light_own_time))
        # What one short window shows must exceed what such windows show by chance.
        traced = replace(traced, noise_ns=max(traced.noise_ns, whole.window_noise_ns))
        told = whole.saving_ns >= NOTABLE_SHARE * whole.step_ns and whole.behind_ns >= LEAST_NOISE * whole.noise_ns
        missed = traced.behind_ns >= SURE_NOISE * traced.noise_ns and not told
        agreed = set(traced.ranks) == set(whole.ranks)
        late = _Late(run, traced, _TRACED) if missed else _Late(run, whole, "in every steady step", agreed)
    share = _cost(late)
    if not share:
        return replace(late, why="no rank makes the others wait")
    return replace(late, share=share, noise=late.lead.noise_ns / late.lead.behind_ns * share)


def _cost(late: _Late) -> float:
    """Return what the late ranks cost, as a share of the mean steady step."""
    run, ranks = late.run, list(late.lead.ranks)
    # Traced steps are slower than others; the share of them is what carries over.
    share = late.lead.saving_ns / late.lead.step_ns if late.lead.behind_ns > 0 else 0.0
    if not share or late.source != _TRACED or settings.on_cpu(run):
        return share
    own = run.frame(own_time)
    if (run.frame(step_means)["source"] != "steps").any() or not own["known"].all():
        return share
    # The few traced steps may have been luckier than the others, whose parts the light layer and the device's clock
    # tell.
    times = own.set_index("rank")["own_ns"]
    return max(float(times[ranks].min() - times.drop(ranks).max()), 0.0) / mean_step_ns(run)


def _dearest(run: Measured, own: pd.DataFrame) -> Lead:
    """Return the lead that costs most: that of the slowest rank, or that of all ranks of one host together."""
    hosts: dict[str, list[int]] = {}
    for rank in own.columns:
        hosts.setdefault(settings.host(run, int(rank)), []).append(int(rank))
    together = [lead(own, ranks) for ranks in hosts.values() if 1 < len(ranks) < len(own.columns)]
    return max((lead(own), *together), key=lambda found: found.saving_ns)


def _left(late: _Late) -> _Late:
    """Return what is left for this rule to save. Where that is too little to be found, nothing more is looked into."""
    for cut in (_agreed, _unowned, _unthrottled, _confirmed, _uncrowded, _shared_out):
        late = cut(late) if late.share >= NOTABLE_SHARE else late
    return replace(late, why="") if late.share >= NOTABLE_SHARE else late


def _agreed(late: _Late) -> _Late:
    """Save nothing where the traced steps show another rank, and the difference may be chance."""
    if late.agreed or late.lead.behind_ns >= SURE_NOISE * late.lead.noise_ns:
        return late
    why = f"{late.behind} in all of them, but in the traced ones another rank is: none is late for sure"
    return late.cut(0.0, why)


def _unowned(late: _Late) -> _Late:
    """Find what the ranks spend more time on, and leave out what other rules answer for."""
    more = _more(late.run, late.lead.ranks)
    owned = {c: more[c] for c in _OWNERS}
    does, owner = _OWNERS[max(owned, key=lambda c: owned[c])]
    share = late.share * (1 - sum(owned.values()) / max(sum(more.values()), 1.0))
    late = late.cut(share, f"{late.behind}, as it {does}: see {owner}")
    return replace(late, more=more, cause=max(_CAUSES, key=lambda c: more[c]))


def _more(run: Measured, late: tuple[int, ...]) -> dict[str, float]:
    """Return by how much each category of the late ranks' own time exceeds the median of the others', ns; 0 or more.

    Their waiting for others is no own time.
    """
    waiting = by_rank(run.frame(own_time), "wait_ns")
    more = {}
    for category in CATEGORIES:
        ns = part(run, category)
        if category == "communication":
            ns = {r: max(0.0, t - waiting.get(r, 0.0)) for r, t in ns.items()}
        others = [t for r, t in ns.items() if r not in late]
        more[category] = max(0.0, median(t for r, t in ns.items() if r in late) - median(others))
    return more


def _unthrottled(late: _Late) -> _Late:
    """Find why the ranks compute longer, and save nothing where another rule answers for that."""
    if late.cause != "computation":
        return late
    because = longer_because(late.run, late.lead.ranks[0])
    left = late.cut(0.0, f"{late.behind}, as {because.said}: see {because.owner}") if because.owner else late
    return replace(left, because=because)


def _confirmed(late: _Late) -> _Late:
    """Keep what of the traced steps' longer computation is true of all steady ones.

    On a CPU who computes longer is busy for longer. The few traced steps, all in a row, may be unlike the others: a
    rank may share its core meanwhile, and the memory that the profiler takes costs one rank more than another. One
    computing thread is busy for as long as its rank takes; several are busy for longer, so that theirs is the most that
    it can be.
    """
    run, ranks = late.run, late.lead.ranks
    if late.source != _TRACED or late.cause != "computation":
        return late
    with suppress(NotMeasured):
        shares = busy_share(run)
        if len(shares) < 2 or not set(ranks) < set(shares.columns):
            return late
        more = lead(shares, ranks)
        # What of the lateness another rule owns is not this one's here either.
        mine = late.share / (late.lead.saving_ns / late.lead.step_ns)
        but = f"{late.behind} in the traced ones, but"
        alone = all((run.facts[r].get("cpu") or {}).get("torch_threads") == 1 for r in run.ranks)
        if alone and more.noise_ns * mine < late.noise:
            share = more.saving_ns * mine
            why = f"{but} {percent(share)} in all steady ones, as what each rank is busy tells"
            return replace(late, share=share, noise=more.noise_ns * mine, source=_BUSY, why=why)
        most = min(late.share, max(more.behind_ns, 0.0) + LEAST_NOISE * more.noise_ns)
        return late.cut(most, f"{but} in all steady steps it is busy for {percent(most)} more of the time at most")
    return late


def _uncrowded(late: _Late) -> _Late:
    """Leave out what the ranks lack of cores that the others beside them have."""
    lacks = _crowded(late.run, late.lead.ranks) if late.cause == "computation" else 0.0
    why = f"{late.behind}, as it stands ready without a core for {percent(lacks)} more of the time than the job's other"
    return late.cut(max(late.share - lacks, 0.0), f"{why} ranks on its host, which have it then")


def _crowded(run: Measured, late: tuple[int, ...]) -> float:
    """Return for what share of the time late ranks have no core, more than the ranks beside them, which have it then.

    0 where a device computes, where the kernel does not tell, where programs outside the job take cores, and where
    ranks have cores of their own, or may have.
    """
    if not settings.on_cpu(run):
        return 0.0
    with suppress(NotMeasured):
        sampled = run.frame(sample_means)
        beside = [r for r in run.ranks if settings.host(run, r) == settings.host(run, late[0]) and r not in late]
        told = [run.facts[r].get("cpu") or {} for r in (*late, *beside)]
        everywhere = all(cpu.get("affinity") == cpu.get("count") is not None for cpu in told)
        if not beside or not everywhere or outside(sampled):
            return 0.0
        waited = sampled[sampled["metric"] == WAITED].set_index("rank")["mean"]
        if set(late) | set(beside) <= set(waited.index):
            return max(float(waited[list(late)].mean() - waited[beside].mean()), 0.0)
    return 0.0


def _shared_out(late: _Late) -> _Late:
    """Keep what sharing the work out evenly saves, where the late ranks have more of the model."""
    if not late.because.shared:
        return late
    share = late.share * min(late.lead.shared_ns / late.lead.saving_ns, 1.0)
    return late.cut(share, f"{late.behind}, as {late.because.said}; shared out evenly, that saves {percent(share)}")


def _explain(late: _Late) -> Explanation:
    who, more, cause, because = late.who, late.more, late.cause, late.because
    does, do = _CAUSES[cause]
    elsewhere = "".join(
        f"; that it {also} is counted by {by}" for c, (also, by) in _OWNERS.items() if more[c] > 0.1 * more[cause]
    )
    steps = late.run.frame(waits)
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
        evidence=_table(late.run, steps),
        sure=f"Estimated by replaying the steps with {how}, {late.source}{why}",
    )


def _table(run: Measured, steps: pd.DataFrame) -> Panel:
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
        table[name] = table["rank"].map(part(run, category)).fillna(0.0)
    ends = MOST_ROWS // 2
    shown = table if len(table) <= MOST_ROWS else pd.concat([table.head(ends), table.tail(ends)])
    note = "" if shown is table else f"The slowest and the fastest {ends} of {len(table)} ranks."
    return _panel("Who waits for whom, per traced step", shown, note)


def _panel(title: str, table: pd.DataFrame, note: str = "") -> Panel:
    return Panel("table", title, tuple(table.itertuples(index=False, name=None)), tuple(table.columns), note=note)


def _by_vote(run: Measured, why: NotMeasured) -> Estimate:
    """Estimate without matching starts, where ranks are missing: the late rank's collectives are too short."""
    if not run.missing_ranks or len(run.ranks) < 2:
        raise why
    try:
        votes = run.frame(voted).set_index("rank")
    except NotMeasured as e:
        raise NotMeasured(f"{why}; {e}") from None
    late = int(str(votes["votes"].idxmax()))
    if 2 * votes["votes"].max() <= votes["counted"].iloc[0]:
        raise NotMeasured(
            f"{why}; the collectives of those that are here last alike: if one is late, its trace is not here"
        )
    # What is hidden behind computation costs nothing, and is no waiting.
    exposed_ns = pd.Series(part(run, "communication"), dtype=float).reindex(votes.index).fillna(0.0)
    waited = votes["waited_ns"].clip(upper=exposed_ns).drop(index=late)
    # Without the late one, the others still wait for the next: what the one that waits least of them waits is gained.
    gain = float(waited.min())
    return Estimate(
        saving_ns=gain,
        by_rank_ns={late: gain},
        loses=f"the ranks that are here wait for rank {late}",
        explain=lambda: _explain_vote(run, late, votes, float(waited.mean())),
    )


def _explain_vote(run: Measured, late: int, votes: pd.DataFrame, waited_ns: float) -> Explanation:
    missing = f"{len(run.missing_ranks)} of {run.world_size} ranks are not here"
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


RULE = Rule(
    "straggler",
    "A late rank",
    (
        breakdown,
        busy,
        clocks,
        collectives,
        exposed,
        light_own_time,
        matched,
        own_time,
        sample_means,
        step_means,
        traced_own_time,
        voted,
        waits,
        workload,
    ),
    check,
    saves_from=("communication", "pipeline_bubble"),
    notable=NOTABLE_SHARE,
)
