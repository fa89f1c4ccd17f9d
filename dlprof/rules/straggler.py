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
from dataclasses import replace
from statistics import median

import pandas as pd

from dlprof.diagnosis import LEAST_NOISE, Clear, Rule
from dlprof.engine import Measured, by_rank
from dlprof.errors import NotMeasured
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
from dlprof.result import CATEGORIES, Finding, Panel
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

# What a late rank may do with its time that another rule answers for, and claims the saving of.
_OWNERS: Mapping[str, str] = {
    "input_wait": "input_wait",
    "pipeline_bubble": "pipeline_bubble",
    "checkpoint": "checkpoint_stall",
    "garbage_collection": "gc_pauses",
    "compilation": "recompilation",
}

_TRACED = "in the traced steps"
_BUSY = "in every steady step, as what each rank is busy tells"

# What it does, and what to change; what its computation is longer by is looked into further.
_CAUSES: Mapping[str, tuple[str, str]] = {
    "computation": (
        "computes longer",
        "give it the same work (shards, sequence lengths, layers); then look at its device: clock, users, cooling",
    ),
    "communication": ("transfers longer", "look at its link: a slow network card or a wrong route"),
    "copy": ("copies longer", "look at its link to the device and at its pinned memory"),
    "input_wait": ("waits longer for its data", "speed up its loader: see input_wait, and its disk and cores"),
    "pipeline_bubble": ("idles longer in its pipeline", "see pipeline_bubble"),
    "checkpoint": ("saves checkpoints", "see checkpoint_stall"),
    "validation": ("validates longer", "let all ranks validate, each its share"),
    "garbage_collection": ("collects garbage longer", "see gc_pauses"),
    "compilation": ("compiles longer", "see recompilation"),
    "optimizer_host": ("is longer in its optimizer", "give each rank the same share of the optimizer's state"),
    "host": ("spends longer on the host", "look at what only this rank does: logging, saving, its cores"),
    "other": ("is late for a reason that was not recorded", "look at what only this rank does"),
}


def check(run: Measured) -> Finding | Clear:
    """Find the ranks with the longest own time, and what their lead over the next costs."""
    try:
        steps = run.frame(waits)
    except NotMeasured as why:
        return _by_vote(run, why)
    if not (run.frame(matched)["collective"] != SENT).any() and max(part(run, "pipeline_bubble").values(), default=0):
        raise NotMeasured("the ranks exchange nothing but with their pipeline's neighbours: see stage_imbalance")
    steps = steps.assign(own_ns=steps.groupby("step")["dur_ns"].transform("mean") - steps["wait_ns"])
    late, source, agreed = _lead(run)
    who = _who(run, late)
    # Traced steps are slower than others; the share of them is what carries over.
    share = late.saving_ns / late.step_ns if late.behind_ns > 0 else 0.0
    if share and source == _TRACED and not settings.on_cpu(run):
        share = _in_mean_step(run, late, share)
    if share < NOTABLE_SHARE:
        return Clear(f"the slowest rank ({late.ranks[0]}) costs {percent(share)} of a step")
    if not agreed and late.behind_ns < SURE_NOISE * late.noise_ns:
        return Clear(
            f"{who} is {percent(share)} of a step behind in all of them, but in the traced ones another rank is:"
            " none is late for sure"
        )
    more = _more(run, late.ranks)
    owned = {c: ns for c, ns in more.items() if c in _OWNERS}
    left = share * (1 - sum(owned.values()) / max(sum(more.values()), 1.0))
    if left < NOTABLE_SHARE:
        owner = max(owned, key=lambda c: owned[c])
        return Clear(
            f"the others wait {percent(share)} of a step for {who}, which {_CAUSES[owner][0]}: see {_OWNERS[owner]}"
        )
    cause = max((c for c in more if c not in _OWNERS), key=lambda c: more[c])
    because = longer_because(run, late.ranks[0]) if cause == "computation" else Reason()
    if because.owner:
        return Clear(f"the others wait {percent(share)} of a step for {who}, as {because.said}: see {because.owner}")
    gain, noise = left, late.noise_ns / late.behind_ns * left
    if source == _TRACED and cause == "computation":
        gain, noise, source = _confirmed(run, late, left, noise)
    if gain < NOTABLE_SHARE:
        said = f"{who} costs {percent(share)} of a step in the traced ones, but"
        if source == _BUSY:
            return Clear(f"{said} {percent(gain)} in all steady ones, as what each rank is busy tells")
        return Clear(
            f"{said} in all steady steps it is busy for {percent(gain)} more of the time at most: it computes no longer"
            " than the others"
        )
    crowded = _crowded(run, late.ranks) if cause == "computation" else 0.0
    if gain - crowded < NOTABLE_SHARE:
        return Clear(
            f"{who} is {percent(gain)} of a step behind, as it stands ready without a core for {percent(crowded)} more"
            " of the time than the job's other ranks on its host, which have it then"
        )
    gain, noise = gain - crowded, noise * (1 - crowded / gain)
    if because.shared:
        shared = min(late.shared_ns / late.saving_ns, 1.0)
        gain, noise = gain * shared, noise * shared
        if gain < NOTABLE_SHARE:
            return Clear(f"{who} is late as {because.said}; shared out evenly, that saves {percent(gain)} of a step")
    does, do = _CAUSES[cause]
    last = steps[steps["rank"].isin(late.ranks)]
    also = "".join(
        f"; that it {_CAUSES[c][0]} is counted by {_OWNERS[c]}" for c in owned if owned[c] > 0.1 * more[cause]
    )
    met = int(steps.groupby("rank")["matched"].sum().max())
    # Ranks of one host may come at the very same time, and are then last together.
    come = f"last in {min(int(last['last'].sum()), met)} of {met} collectives"
    return Finding(
        title=f"{who[0].upper()}{who[1:]} makes the others wait",
        summary=f"It is {come} and waits {duration(last['wait_ns'].mean())} a step, the others"
        f" {duration(_others(steps, late.ranks))}; it {does} than the others ({duration(more[cause])} a step more)"
        f"{': ' if because.said else ''}{because.said}{also}.",
        verdict=f"{percent(gain)} of each step {_lost(who, shared=because.shared)}.",
        saving_ns=gain * mean_step_ns(run),
        noise_ns=noise * mean_step_ns(run),
        least_ns=late.least_ns / late.behind_ns * gain * mean_step_ns(run),
        advice=(because.do or do,),
        evidence=_table(run, steps),
        ranks=tuple(sorted(late.ranks)),
        sure=_sure(who, source, shared=because.shared),
    )


def _lost(who: str, *, shared: bool) -> str:
    return f"is lost as {who} holds more of the model than the others" if shared else f"all ranks wait for {who}"


def _sure(who: str, source: str, *, shared: bool) -> str:
    if shared:
        how = "the ranks' work shared out evenly"
        why = f"what {who} computes more is of parameters that others do not hold, and they would compute it then."
    else:
        how = f"{who} at the pace of the next slowest rank"
        why = "That none of its work is moved to the others is assumed: nothing tells that they do less for it."
    return f"Estimated by replaying the steps with {how}, {source}{': ' if shared else '. '}{why}"


def _lead(run: Measured) -> tuple[Lead, str, bool]:
    """Find the late ranks from every step where the light layer can tell, else from the traced ones.

    Give also in which steps that is, and whether no other steps show other ranks.
    """
    traced = _dearest(run, run.frame(traced_own_time))
    try:
        whole = _dearest(run, run.frame(light_own_time))
    except NotMeasured:
        return traced, _TRACED, True
    # What one short window shows must exceed what such windows show by chance.
    traced = replace(traced, noise_ns=max(traced.noise_ns, whole.window_noise_ns))
    told = whole.saving_ns >= NOTABLE_SHARE * whole.step_ns and whole.behind_ns >= LEAST_NOISE * whole.noise_ns
    missed = traced.behind_ns >= SURE_NOISE * traced.noise_ns
    if missed and not told:
        return traced, _TRACED, True
    return whole, "in every steady step", set(traced.ranks) == set(whole.ranks)


def _in_mean_step(run: Measured, late: Lead, share: float) -> float:
    """Return what late ranks cost the mean steady step of a job on devices, as a share; `share`: the traced steps'.

    The few traced steps may have been luckier than the others, whose parts the light layer and the device's clock tell.
    """
    own = run.frame(own_time)
    if (run.frame(step_means)["source"] != "steps").any() or not own["known"].all():
        return share
    times = own.set_index("rank")["own_ns"]
    behind = float(times[list(late.ranks)].min() - times.drop(list(late.ranks)).max())
    return max(behind, 0.0) / mean_step_ns(run)


def _confirmed(run: Measured, late: Lead, share: float, noise: float) -> tuple[float, float, str]:
    """Give what of a share of the traced steps is true of all steady ones, its noise, and in which steps that is.

    On a CPU who computes longer is busy for longer. The few traced steps, all in a row, may be unlike the others: a
    rank may share its core meanwhile, and the memory that the profiler takes costs one rank more than another. One
    computing thread is busy for as long as its rank takes; several are busy for longer, so that theirs is the most that
    it can be.
    """
    with suppress(NotMeasured):
        shares = busy_share(run)
        if len(shares) > 1 and set(late.ranks) < set(shares.columns):
            more = lead(shares, late.ranks)
            # What of the lateness another rule owns is not this one's here either.
            mine = share / (late.saving_ns / late.step_ns)
            alone = all((run.facts[r].get("cpu") or {}).get("torch_threads") == 1 for r in run.ranks)
            if alone and more.noise_ns * mine < noise:
                return more.saving_ns * mine, more.noise_ns * mine, _BUSY
            most = min(share, max(more.behind_ns, 0.0) + LEAST_NOISE * more.noise_ns)
            return most, noise * most / share, _TRACED
    return share, noise, _TRACED


def _crowded(run: Measured, late: tuple[int, ...]) -> float:
    """Give for what share of the time late ranks have no core, more than the ranks beside them, which have it then.

    0 where a device computes, where the kernel does not tell, where programs outside the job take cores, and where
    ranks have cores of their own, or may have.
    """
    if not settings.on_cpu(run):
        return 0.0
    with suppress(NotMeasured):
        sampled = run.frame(sample_means)
        beside = [r for r in run.ranks if _host(run, r) == _host(run, late[0]) and r not in late]
        told = [run.facts[r].get("cpu") or {} for r in (*late, *beside)]
        everywhere = all(cpu.get("affinity") == cpu.get("count") is not None for cpu in told)
        if not beside or not everywhere or outside(sampled):
            return 0.0
        waited = sampled[sampled["metric"] == WAITED].set_index("rank")["mean"]
        if set(late) | set(beside) <= set(waited.index):
            return max(float(waited[list(late)].mean() - waited[beside].mean()), 0.0)
    return 0.0


def _dearest(run: Measured, own: pd.DataFrame) -> Lead:
    """Give the lead that costs most: that of the slowest rank, or that of all ranks of one host together."""
    hosts: dict[str, list[int]] = {}
    for rank in own.columns:
        hosts.setdefault(_host(run, int(rank)), []).append(int(rank))
    together = [lead(own, ranks) for ranks in hosts.values() if 1 < len(ranks) < len(own.columns)]
    return max((lead(own), *together), key=lambda found: found.saving_ns)


def _host(run: Measured, rank: int) -> str:
    return str(run.facts[rank].get("host") or run.trace_facts[rank].get("host") or "")


def _who(run: Measured, late: Lead) -> str:
    return f"rank {late.ranks[0]}" if len(late.ranks) == 1 else f"host {_host(run, late.ranks[0])}"


def _others(steps: pd.DataFrame, late: tuple[int, ...]) -> float:
    return float(steps[~steps["rank"].isin(late)]["wait_ns"].mean())


def _more(run: Measured, late: tuple[int, ...]) -> dict[str, float]:
    """Give by how much each category of the late ranks' own time exceeds the median of the others', ns; never below 0.

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


def _by_vote(run: Measured, why: NotMeasured) -> Finding | Clear:
    """Name the late rank without matching starts: where ranks are missing, by whose collectives are too short."""
    if not run.missing_ranks or len(run.ranks) < 2:
        raise why
    try:
        votes = run.frame(voted).set_index("rank")
    except NotMeasured as e:
        raise NotMeasured(f"{why}; {e}") from None
    late = int(str(votes["votes"].idxmax()))
    counted, mine = int(votes["counted"].iloc[0]), int(votes["votes"].max())
    if 2 * mine <= counted:
        raise NotMeasured(
            f"{why}; the collectives of those that are here last alike: if one is late, its trace is not here"
        )
    # What is hidden behind computation costs nothing, and is no waiting.
    exposed_ns = pd.Series(part(run, "communication"), dtype=float).reindex(votes.index).fillna(0.0)
    others = votes.assign(waited_ns=votes["waited_ns"].clip(upper=exposed_ns)).drop(index=late)
    # Without the late one, the others still wait for the next: what the one that waits least of them waits is gained.
    gain = float(others["waited_ns"].min())
    share = gain / mean_step_ns(run)
    if share < NOTABLE_SHARE:
        return Clear(f"rank {late} costs {percent(share)} of a step, as far as the ranks that are here tell")
    missing = f"{len(run.missing_ranks)} of {run.world_size} ranks are not here"
    return Finding(
        title=f"Rank {late} makes the others wait",
        summary=f"Its collectives are abnormally short in {mine} of {counted}: the others wait"
        f" {duration(float(others['waited_ns'].mean()))} a step in theirs. {missing}, and what they do is not known.",
        verdict=f"{percent(share)} of each step ranks wait for rank {late}.",
        saving_ns=gain,
        advice=(
            "compare its input, its work and its host with another's; the traces of all ranks would tell which it is",
        ),
        evidence=_votes(votes),
        ranks=(late,),
        sure=f"Estimated from the lengths of collectives alone; {missing}: were one of them nearly as late, less.",
    )


def _votes(votes: pd.DataFrame) -> Panel:
    """Tell how often each rank's collectives were abnormally short, those of the late one first."""
    shown = votes.sort_values("waited_ns", kind="stable").head(MOST_ROWS)
    rows = tuple(
        (r, f"{short} of {counted}", duration(waited))
        for r, short, counted, waited in zip(
            shown.index, shown["votes"], shown["counted"], shown["waited_ns"], strict=True
        )
    )
    columns = ("rank", "abnormally short", "longer than the shortest, a step")
    return Panel("table", "How long each rank stays in its collectives", rows, columns)


def _table(run: Measured, steps: pd.DataFrame) -> Panel:
    by = steps.groupby("rank").agg(
        own=("own_ns", "mean"), wait=("wait_ns", "mean"), last=("last", "sum"), matched=("matched", "sum")
    )
    computing, waiting = part(run, "computation"), part(run, "input_wait")
    by = by.sort_values("own", ascending=False)
    shown = by if len(by) <= MOST_ROWS else pd.concat([by.head(MOST_ROWS // 2), by.tail(MOST_ROWS // 2)])
    rows = tuple(
        (
            r,
            duration(row["own"]),
            duration(row["wait"]),
            f"{int(row['last'])} of {int(row['matched'])}",
            duration(computing.get(r, 0.0)),
            duration(waiting.get(r, 0.0)),
        )
        for r, row in zip((int(str(x)) for x in shown.index), shown.to_dict("records"), strict=True)
    )
    columns = ("rank", "own time", "waits for others", "came last", "computation", "input wait")
    note = "" if len(by) <= MOST_ROWS else f"The slowest and the fastest {MOST_ROWS // 2} of {len(by)} ranks."
    return Panel("table", "Who waits for whom, per traced step", rows, columns, note=note)


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
)
