"""Which ranks are late, what that costs, and how much of it is theirs alone; which ranks of a large job are alike.

The late ranks cost the lead of their own time over the next longest. Three parts are then subtracted: what another rule
reports, what a short trace may show by chance, and what the other ranks would lose for lack of the host's cores. The
work of each rank in a step distinguishes more work from slower work.

A late rank also shows without clocks and without all ranks: its collectives are abnormally short. The last rank to
enter a collective finds the others there and stays only for the transfer. So its collectives are shorter than those of
all others, whatever its clock shows and whichever other ranks were not recorded.

Ranks that hold the same stages of their pipelines are to do the same, or all ranks where there are none. Of those, the
ones that spend on every part of the step what their median does, within noise, are one group. Of the others, as many as
make a group of their own are one (two kinds of GPU); the few that are left stand out. Waiting for others is left out: a
rank that waits is not the one that is unlike the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
from msgspec import Struct, field
from msgspec.structs import replace
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis import settings
from dlprof.analysis.communication.collectives import SENT, instances, matched, window_steps
from dlprof.analysis.communication.experts import Balance, expert_balance
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, across_ranks, by_rank, maybe, needs, per_rank
from dlprof.analysis.machine.gpus import held_down
from dlprof.analysis.machine.samples import WAITED, outside, sample_means
from dlprof.analysis.pipeline.pipes import pipelines
from dlprof.analysis.source.line_shares import costliest, costly_lines
from dlprof.analysis.step.breakdown import breakdown, part
from dlprof.analysis.step.partition import cpu_computation
from dlprof.analysis.step.savings import own_time
from dlprof.analysis.stragglers import own_time as own
from dlprof.analysis.stragglers.own_time import NOTABLE_SHARE, Lead, lead, own_steps, steps_of
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import device_work, has_device
from dlprof.analysis.timeline.host import on_training_thread
from dlprof.analysis.timeline.steady import steady_steps
from dlprof.analysis.timeline.steps import Timing, launched_within, timing
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.result import CATEGORIES
from dlprof.result.figures import MANY, Member
from dlprof.units import percent, ranks_named

# The causes of a late rank that another rule reports, with that rule, which claims the saving.
OWNERS: Mapping[str, tuple[str, str]] = {
    "input_wait": ("waits longer for its data", "input_wait"),
    "pipeline_bubble": ("idles longer in its pipeline", "pipeline_bubble"),
    "checkpoint": ("saves checkpoints", "checkpoint_stall"),
    "garbage_collection": ("collects garbage longer", "gc_pauses"),
    "compilation": ("compiles longer", "recompilation"),
    "periodic_work": ("does more between its steps every n-th time", "periodic_work"),
}

# The other causes of a late rank, and what to change.
CAUSES: Mapping[str, tuple[str, str]] = {
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

_SHOWN_IN: Mapping[str, str] = {
    own.BUSY: "in every steady step, from how long each rank computes",
    own.TRACED: "in the traced steps",
    own.LOGGED: "in every steady step",
}


class Reason(Struct, frozen=True):
    """Why a rank computes longer than the others, what to do, and whether they have less to do for it."""

    words: str = ""
    do: str = ""
    shared: bool = False
    owner: str = ""  # the rule that answers for it
    dealt: bool = False  # by what it was given of the data


class LateRanks(Struct, frozen=True):
    """The late ranks, and what this rule would save of what they cost: shares of the mean steady step."""

    lead: Lead
    who: str  # the rank, or the host or the pipeline of all of them
    source: str  # which steps show it
    cost: float  # what they cost in all
    share: float  # what is left of that for this rule
    noise: float
    why: str = ""  # why it is not more
    more: Mapping[str, float] = field(default_factory=dict)  # what they spend more on than the others, ns a category
    cause: str = ""  # most of that, of what no other rule answers for
    because: Reason = field(default_factory=Reason)  # why they compute longer, where that is the cause
    others: tuple[int, ...] = ()  # with whom they compare: in pipelines, those that hold the same stages

    def cut(self, share: float, why: str) -> LateRanks:
        """Return the same with a smaller share left, and why."""
        return replace(self, share=share, noise=self.noise * share / self.share, why=why)

    @property
    def behind(self) -> str:
        """Who is late, and by how much."""
        return f"{self.who} is {percent(self.share)} of a step behind"


@across_ranks
def late_ranks(
    matched: Frame = needs(matched),
    breakdown: Frame = needs(breakdown),
    own_time: Frame = needs(own_time),
    own_steps: Frame = needs(own_steps),
    pipelines: Maybe[Frame] = maybe(pipelines),
    job: Job = needs(JOB),
) -> LateRanks:
    """Return the ranks whose own time is longest, or all ranks of one host or pipeline, and what they cost in all.

    In a pipeline each rank is as late as the slowest; where one alone takes longer than its like in other pipelines, it
    is that one. Raises NotMeasured where own time is not known, and where only the stages of a pipeline exchange.
    """
    if not (matched["collective"] != SENT).any() and any(part(breakdown, "pipeline_bubble").values()):
        raise DoesNotApply("the ranks exchange only with their neighbours in the pipeline: see stage_imbalance")
    stages = stages_of(pipelines.or_none())
    source, steps = str(own_steps["source"].iloc[0]), steps_of(own_steps)
    chosen = _dearest(job, steps, stages)
    if len(chosen.ranks) > 1 and stages["ranks"].reindex(chosen.ranks).nunique() == 1:
        chosen = _culprit(chosen, own_parts(breakdown, own_time), stages)
    if source == own.TRACED:
        # What a handful of steps differ by is no jitter of the others.
        chosen = replace(chosen, saving_ns=max(chosen.behind_ns, 0.0))
    share = chosen.saving_ns / chosen.step_ns if chosen.behind_ns >= 1 else 0.0  # less is rounding
    return LateRanks(
        lead=chosen,
        who=_named(job, chosen.ranks),
        source=_SHOWN_IN[source],
        cost=share,
        share=share,
        noise=chosen.noise_ns / chosen.behind_ns * share if share else 0.0,
        why="" if share else "no rank makes the others wait",
        others=_alike(stages, chosen.ranks),
    )


def stages_of(pipelines: pd.DataFrame | None) -> pd.DataFrame:
    """Return of each rank of a pipeline the ranks of that and its own stages, as text; empty without pipelines."""
    frame = pd.DataFrame(columns=["rank", "ranks", "stages"]) if pipelines is None else pipelines
    return frame.drop_duplicates("rank").set_index("rank")[["ranks", "stages"]]


def _alike(stages: pd.DataFrame, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the other ranks that hold the same stages of their pipelines; () where there are none."""
    same = stages.index[stages["stages"].isin(stages["stages"].reindex(ranks))]
    return tuple(int(rank) for rank in same if rank not in ranks)


def _named(job: Job, ranks: tuple[int, ...]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    hosts = {settings.host(job, rank) for rank in ranks}
    here = [rank for rank in job.ranks if settings.host(job, rank) in hosts]
    return (
        f"host {hosts.pop()}"
        if len(hosts) == 1 and set(here) == set(ranks)
        else f"the pipeline of {ranks_named(ranks)}"
    )


def _dearest(job: Job, steps: pd.DataFrame, stages: pd.DataFrame) -> Lead:
    """Return the lead that costs most: of the slowest rank alone, or of all ranks on its host or in its pipeline."""
    alone = lead(steps)
    slowest = alone.ranks[0]
    on_host = [r for r in map(int, steps.columns) if settings.host(job, r) == settings.host(job, slowest)]
    mine = stages["ranks"].get(slowest)
    in_pipeline = [r for r in map(int, steps.columns) if mine is not None and stages["ranks"].get(r) == mine]
    # A delay of other ranks costs nothing while the slowest is as late.
    groups = [lead(steps, ranks) for ranks in (on_host, in_pipeline) if 1 < len(ranks) < len(steps.columns)]
    return max((alone, *groups), key=lambda found: found.saving_ns)


def _culprit(late: Lead, parts: pd.DataFrame, stages: pd.DataFrame) -> Lead:
    """Return the lead of the one rank that makes its pipeline late; the pipeline's where it is not one."""
    of_stage = parts.groupby(stages["stages"].reindex(parts.index)).transform("median")
    more = (parts - of_stage)[list(CAUSES)].clip(lower=0.0).sum(axis=1).reindex(late.ranks)
    most = int(str(more.idxmax()))
    is_alone = more[most] >= max(late.behind_ns, float(more.sum())) / 2
    return replace(late, ranks=(most,)) if is_alone else late


def own_parts(breakdown: pd.DataFrame, own_time: pd.DataFrame) -> pd.DataFrame:
    """Return what each rank spends on each category, ns of the mean step, without waiting for others."""
    parts = pd.DataFrame({category: part(breakdown, category) for category in CATEGORIES})
    # Waiting for others is no own time.
    waiting = pd.Series(by_rank(own_time, "wait_ns")).reindex(parts.index).fillna(0.0)
    return parts.assign(communication=(parts["communication"] - waiting).clip(lower=0.0))


@per_rank
def workload(
    timing: Timing = needs(timing),
    has_device: bool = needs(has_device),
    device_work: Maybe[Frame] = maybe(device_work),
    launched_within: Maybe[NDArray[np.int64]] = maybe(launched_within),
    on_training_thread: Maybe[Frame] = maybe(on_training_thread),
    cpu_computation: Maybe[iv.Intervals] = maybe(cpu_computation),
    steady_steps: Maybe[Frame] = maybe(steady_steps),
) -> pd.DataFrame:
    """Return one row, of the mean steady traced step: pieces of computation, piece_ns (of a mean one), copied_bytes.
    And inputs: values that its models get in a mean steady step, 0 where that is not known.

    Pieces are kernels on a device, else the outermost operators of the training thread, without their
    waiting for collectives (in a function of the backward pass, say); copied_bytes go from the host
    to the device, NaN without a device.
    """
    if not len(timing.windows):
        raise NotMeasured("no steps were traced")
    copied = np.nan
    if has_device:
        work = device_work.get()
        inside = launched_within.get() >= 0
        pieces = work["dur_ns"].to_numpy()[inside & host.is_kind(work, "kernel")]
        copied = float(work["bytes"].to_numpy()[inside & host.is_one_of(work["copy"], "HtoD")].clip(min=0).sum())
    else:
        thread = on_training_thread.get()
        outermost = host.outermost(thread[host.is_kind(thread, "op")])
        start = outermost["start_ns"].to_numpy()
        took = iv.within(cpu_computation.get(), start, start + outermost["dur_ns"].to_numpy())
        pieces = took[iv.holds(iv.merge(timing.windows), start)]
    n = len(timing.windows)
    mean = float(pieces.mean()) if len(pieces) else 0.0
    steps = steady_steps.or_none()
    inputs = 0.0 if steps is None or not len(steps) else max(float(steps["inputs"].mean()), 0.0)
    return pd.DataFrame([{"pieces": len(pieces) / n, "piece_ns": mean, "copied_bytes": copied / n, "inputs": inputs}])


@across_ranks
def straggling(
    late_ranks: LateRanks = needs(late_ranks),
    breakdown: Frame = needs(breakdown),
    own_time: Frame = needs(own_time),
    workload: Maybe[Frame] = maybe(workload),
    sample_means: Maybe[Frame] = maybe(sample_means),
    held_down: Maybe[list[tuple[dict[Any, Any], str, float]]] = maybe(held_down),
    expert_balance: Maybe[Balance] = maybe(expert_balance),
    costly_lines: Maybe[Frame] = maybe(costly_lines),
    job: Job = needs(JOB),
) -> LateRanks:
    """Return what of the cost is left for this rule to save. Once that is not notable, nothing more is looked into."""
    late = late_ranks
    if late.share < NOTABLE_SHARE:
        return late
    late = _unowned(breakdown, own_time, late)
    if late.share < NOTABLE_SHARE:
        return late
    if late.cause == "computation":
        because = longer_because(workload.get(), sample_means, held_down, expert_balance, job, late.lead.ranks[0])
        late = replace(late, because=because)
        if because.owner:
            return late.cut(0.0, f"{late.behind}, as {because.words}: see {because.owner}")
        # The others on their host have the cores that the late ranks lack.
        lacks = without_core(sample_means, job, late.lead.ranks)
        why = f"{late.behind}, as it waits for a core for {percent(lacks)} more of the time than the job's other"
        late = late.cut(max(late.share - lacks, 0.0), f"{why} ranks on its host, which have it then")
    elif (because := sends_what_it_makes(costly_lines, job, late.lead.ranks)).shared:
        late = replace(late, because=because)
    if late.because.shared and late.share >= NOTABLE_SHARE:
        # They have more to do: sharing the work out evenly saves no more than this.
        share = late.share * min(late.lead.shared_ns / late.lead.saving_ns, 1.0)
        late = late.cut(share, f"{late.behind}, as {because.words}; shared out evenly, that saves {percent(share)}")
    return late if late.share < NOTABLE_SHARE else replace(late, why="")


def _unowned(breakdown: pd.DataFrame, own_time: pd.DataFrame, late: LateRanks) -> LateRanks:
    """Find by how much the ranks exceed the median of the others in each category, and leave out what others own."""
    parts = own_parts(breakdown, own_time)
    theirs = parts.index.isin(late.lead.ranks)
    others = parts.index.isin(late.others) if late.others else ~theirs
    more = (parts[theirs].median() - parts[others].median()).clip(lower=0.0)
    owned = more[list(OWNERS)]
    does, owner = OWNERS[str(owned.idxmax())]
    share = late.share * (1 - float(owned.sum()) / max(float(more.sum()), 1.0))
    late = late.cut(share, f"{late.behind}, as it {does}: see {owner}")
    return replace(late, more={str(c): float(ns) for c, ns in more.items()}, cause=str(more[list(CAUSES)].idxmax()))


def sends_what_it_makes(lines: Maybe[pd.DataFrame], job: Job, late: tuple[int, ...]) -> Reason:
    """Return why a rank is late that makes for all what the others wait to get, by the line that they are seen in."""
    others = [rank for rank in job.ranks if rank not in late]
    seen = [line for rank in others if (line := costliest(lines, rank, "rest")) is not None]
    if len(late) > 1 or not seen or len(seen) < len(others) or not all(line.is_from_one for line in seen):
        return Reason()
    do = (
        "have each rank make its own share, as by a `DistributedSampler` or every n-th sample of a seeded order, in"
        f" place of one that makes and sends all: {seen[0].shown.rstrip(',')}"
    )
    return Reason("it makes what it then sends to the others", do, shared=True)


def without_core(sample_means: Maybe[pd.DataFrame], job: Job, late: tuple[int, ...]) -> float:
    """Return for what share of the time late ranks have no core, more than those on their host, which have it then.

    0 where a device computes, where the kernel did not count it, where programs outside the job take cores, and where
    ranks have cores of their own, or may have.
    """
    sampled = sample_means.or_none()
    if sampled is None or not settings.on_cpu(job):
        return 0.0
    neighbours = [r for r in job.ranks if settings.host(job, r) == settings.host(job, late[0]) and r not in late]
    cpus = [job.facts[r].get("cpu") or {} for r in (*late, *neighbours)]
    everywhere = all(cpu.get("affinity") == cpu.get("count") is not None for cpu in cpus)
    waited = sampled[sampled["metric"] == WAITED].set_index("rank")["mean"]
    if not neighbours or not everywhere or outside(sampled) or not {*late, *neighbours} <= set(waited.index):
        return 0.0
    return max(float(waited[list(late)].mean() - waited[neighbours].mean()), 0.0)


def longer_because(
    workload: pd.DataFrame,
    sample_means: Maybe[pd.DataFrame],
    held_down: Maybe[list[tuple[dict[Any, Any], str, float]]],
    expert_balance: Maybe[Balance],
    job: Job,
    late: int,
) -> Reason:
    """Return why a rank computes longer than the others, as far as it was recorded.

    In this order: more tokens for its experts, a larger part of the model, larger inputs, more kernels or operators,
    more bytes copied in, a slower clock, no free core for its main thread. Each must make up at least half of what its
    computation is longer by.
    """
    frame = workload.set_index("rank")
    mine, others = frame.loc[late], frame.drop(index=late).median()
    least = 1 + (mine["pieces"] * mine["piece_ns"] / (others["pieces"] * others["piece_ns"]) - 1) / 2
    if not least > 1:
        return Reason()
    more_ns = mine["pieces"] * mine["piece_ns"] - others["pieces"] * others["piece_ns"]
    if (balance := expert_balance.or_none()) is not None and balance.saving_ns > 0:
        routed = balance.ranks.set_index("rank")[["routed_ns", "ratio"]]
        if late in routed.index and routed["routed_ns"][late] - routed["routed_ns"].drop(late).median() >= more_ns / 2:
            words = f"its experts get {routed['ratio'][late]:.2f} × the mean rank's tokens"
            return Reason(words, "balance the tokens over the experts", owner="expert_imbalance")
    held = settings.held(job)
    holds, their = held.get(late, 0), median([n for rank, n in held.items() if rank != late] or [0])
    if holds and holds >= least * their:
        words = f"it holds {holds:,} parameters, the others {their:,.0f}"
        return Reason(words, "share out evenly what it holds: tables, layers, experts", shared=True)
    if mine["inputs"] >= least * others["inputs"] > 0:
        words = f"its inputs are {mine['inputs'] / others['inputs']:.2f} × the others'"
        do = (
            "give each rank as much: deal a batch that is sorted by size out in turn, not in contiguous parts, or each"
            " sample to the rank that has least so far"
        )
        return Reason(words, do, shared=True, dealt=True)
    what = "operators" if np.isnan(mine["copied_bytes"]) else "kernels"
    if mine["pieces"] >= least * others["pieces"]:
        words = f"{mine['pieces']:,.0f} {what} a step, the others {others['pieces']:,.0f}"
        do = "give it the same work: the same layers, the same number of batches, nothing that only it computes"
        return Reason(words, do)
    if mine["copied_bytes"] >= least * others["copied_bytes"] > 0:
        words = f"{mine['copied_bytes'] / others['copied_bytes']:.2f} × the others' data a step"
        return Reason(words, "give it batches like the others': sort or bucket by length")
    clock, their_clock = _sampled(sample_means, "gpu", "sm_clock_mhz", late)
    if their_clock >= least * clock:
        words = f"its clock runs at {clock:,.0f} MHz, the others' at {their_clock:,.0f}"
        do = "look at its power limit, its cooling and who else uses it (`nvidia-smi -q -d CLOCK,PERFORMANCE`)"
        down = any(why and (row["rank"], row["source"]) == (late, "gpu") for row, why, _ in held_down.or_none() or [])
        return Reason(words, do, owner="throttled_clock" if down else "")
    waited, they = _sampled(sample_means, "processes", WAITED, late)
    if waited - they >= 1 - 1 / least:
        words = f"for {100 * waited:.0f} % of the time its main thread has no core, the others' {100 * they:.0f} %"
        return Reason(words, "find out what else runs on its host, or give its process cores of its own")
    return Reason(
        f"as many {what}, each {mine['piece_ns'] / others['piece_ns']:.2f} × as long",
        "give it the same work (shards, sequence lengths); then look at its device: clock, users, cooling",
    )


def _sampled(sample_means: Maybe[pd.DataFrame], source: str, metric: str, late: int) -> tuple[float, float]:
    """Return a sampled metric's mean on the late rank, and the median of the others'; NaN where it was not sampled."""
    means = sample_means.or_none()
    if means is None:
        return np.nan, np.nan
    chosen = means[(means["source"] == source) & (means["metric"] == metric)].groupby("rank")["mean"].sum()
    return float(chosen.get(late, np.nan)), float(chosen.drop(late, errors="ignore").median())


# Dixon's Q, the gap below the shortest over the whole range, exceeds these by chance in one case of twenty: the 95th
# percentiles of 400,000 simulated samples of so many normal values.
_RANKS = (3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 80, 100)

_Q = (0.941, 0.766, 0.641, 0.563, 0.508, 0.467, 0.411, 0.375, 0.330, 0.300, 0.280, 0.255, 0.224, 0.206, 0.195, 0.185)

# Above a hundred ranks: so many standard deviations below the mean.
_SIGMAS_BELOW = 3.0

# Fewer collectives than this show nothing.
ENOUGH = 3


@across_ranks
def short_collectives(
    instances: Frame = needs(instances), window_steps: Maybe[Frame] = maybe(window_steps)
) -> pd.DataFrame:
    """Count for each rank in how many collectives its own was abnormally short: rank, short, counted, waited_ns.

    `counted` are the collectives of which three ranks or more are here; waited_ns is by how much a rank's collectives
    last longer than the shortest of the same, ns of a mean traced step. Raises NotMeasured where there are too few.
    """
    frame = instances[instances["wanted"] > 0]
    frame = frame.assign(dur_ns=frame["end_ns"] - frame["start_ns"])
    here = frame.groupby("instance")["dur_ns"].transform("size")
    frame = frame[here >= _RANKS[0]].sort_values(["instance", "dur_ns"], kind="stable")
    counted = frame["instance"].nunique()
    if counted < ENOUGH:
        raise NotMeasured(f"{counted} collectives of {_RANKS[0]} or more ranks are too few to tell by their lengths")
    groups = frame.groupby("instance")["dur_ns"]
    n, shortest, longest = groups.size(), groups.min(), groups.max()
    apart = (groups.nth(1).to_numpy() - shortest) / (longest - shortest).clip(lower=1.0) > np.interp(n, _RANKS, _Q)
    far = shortest < groups.mean() - _SIGMAS_BELOW * groups.std(ddof=0)
    first = frame.groupby("instance")["rank"].first()
    outliers = first[far.where(n > _RANKS[-1], apart)]
    steps = window_steps.get().groupby("rank").size()
    waited = (frame["dur_ns"] - groups.transform("min")).groupby(frame["rank"]).sum() / steps
    short = outliers.value_counts().reindex(waited.index, fill_value=0)
    return pd.DataFrame({"short": short, "counted": counted, "waited_ns": waited}).reset_index()


class Outlier(Struct, frozen=True):
    """The rank that most collectives were abnormally short on, and what the others wait for it, ns a step."""

    rank: int
    table: pd.DataFrame  # as `short_collectives`
    mean_ns: float  # that the others stay longer in their collectives
    gain_ns: float  # of it, what is gone without this rank: they would still wait for the next


@across_ranks
def outlier(short_collectives: Frame = needs(short_collectives), breakdown: Frame = needs(breakdown)) -> Outlier:
    """Return the late rank; raise NotMeasured where no rank has the majority of the collectives."""
    short = short_collectives.set_index("rank")
    late = int(str(short["short"].idxmax()))
    if 2 * short["short"].max() <= short["counted"].iloc[0]:
        raise NotMeasured("the collectives of those that are here last alike: if one is late, its trace is not here")
    # Waiting hidden behind computation costs nothing, and does not count.
    exposed_ns = pd.Series(part(breakdown, "communication"), dtype=float).reindex(short.index).fillna(0.0)
    waited = short["waited_ns"].clip(upper=exposed_ns).drop(index=late)
    return Outlier(late, short_collectives, float(waited.mean()), float(waited.min()))


# A rank differs from the others if it is this far from the median: a share of the step, and standard deviations. These
# are estimated from the median absolute deviation, which is 1/1.4826 standard deviations of normal values.
_UNLIKE_SHARE = 0.02
_UNLIKE_SIGMAS = 6.0
_OF_DEVIATION = 1.4826

# The fewest ranks, and the least share of those that should be alike, that make a group of their own.
LEAST_RANKS = 8
LEAST_SHARE = 0.05
MOST_GROUPS = 4  # of those that should be alike

# The categories in which a rank waits for others.
_WAITING = ("pipeline_bubble",)


@across_ranks
def members(
    breakdown: Frame = needs(breakdown),
    own_time: Frame = needs(own_time),
    pipelines: Maybe[Frame] = maybe(pipelines),
    job: Job = needs(JOB),
) -> tuple[Member, ...]:
    """Return which ranks are alike, and in what the others differ; raise DoesNotApply with fewer than MANY ranks."""
    if len(job.ranks) < MANY:
        raise DoesNotApply(f"fewer than {MANY} ranks are looked at one by one")
    parts = own_parts(breakdown, own_time)
    step = float(parts.sum(axis=1).median())
    parts = parts[[c for c in CATEGORIES if c not in _WAITING]]
    stages = stages_of(pipelines.or_none())["stages"].reindex(parts.index)
    found: list[Member] = []
    for stage, mine in parts.groupby(stages.fillna(""), sort=True):
        name = f"stage {stage}" if stage else "all ranks" if stages.isna().all() else "no stage"
        found += _members(job, name, mine, step)
    return tuple(sorted(found, key=lambda member: member.rank))


def _members(job: Job, name: str, parts: pd.DataFrame, step: float) -> list[Member]:
    """Return those of some ranks that should be alike."""
    enough = max(LEAST_RANKS, LEAST_SHARE * len(parts))
    found: list[Member] = []
    left, usual = parts, parts.median()
    for number in range(MOST_GROUPS):
        middle, far = _far(left, step)
        like = left.index[~far]
        if len(like) < enough:
            break
        if not number:
            group, usual = name, middle
        else:
            other = str((middle - usual).abs().idxmax())
            group = f"{name}, {'more' if middle[other] > usual[other] else 'less'} {other.replace('_', ' ')}"
        found += [Member(int(rank), settings.host(job, int(rank)), group) for rank in like]
        left = left[far]
        if len(left) < enough:
            break
    differ = left - usual
    for rank in left.index:
        # More of something is a reason, less of it a consequence.
        most = str(
            (differ.loc[rank] if differ.loc[rank].max() > _UNLIKE_SHARE * step else differ.loc[rank].abs()).idxmax()
        )
        found.append(
            Member(
                int(rank), settings.host(job, int(rank)), name, most, float(left.loc[rank, most]), float(usual[most])
            )
        )
    return found


def _far(parts: pd.DataFrame, step: float) -> tuple[pd.Series[float], pd.Series[bool]]:
    """Return the median of ranks, and which are far from it in any part of the step."""
    middle = parts.median()
    away = (parts - middle).abs()
    # A late rank exchanges for less time: a consequence.
    away["communication"] = (parts["communication"] - middle["communication"]).clip(lower=0.0)
    near = np.maximum(_UNLIKE_SHARE * step, _UNLIKE_SIGMAS * _OF_DEVIATION * away.median())
    return middle, (away > near).any(axis=1)


def members_of(members: Maybe[tuple[Member, ...]] = maybe(members)) -> tuple[Member, ...]:
    """Return them for the result; () where the ranks are shown one by one, or it is not known."""
    return members.or_none() or ()
