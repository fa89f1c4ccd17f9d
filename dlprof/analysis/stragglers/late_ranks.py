"""Which ranks are late, what that costs, and how much of the cost is theirs alone.

The lead of the ranks with the longest own time over the next is what they cost. What another rule answers for, what a
short trace shows by chance, and what the others would then lack of the host's cores is taken off that, step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.communication.matching import SENT, matched
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, across_ranks, by_rank, maybe, needs
from dlprof.analysis.experts.tokens import Balance, expert_balance
from dlprof.analysis.machine.clocks import held_down
from dlprof.analysis.machine.samples import WAITED, outside, sample_means
from dlprof.analysis.pipeline.pipes import pipelines
from dlprof.analysis.step.breakdown import breakdown, part
from dlprof.analysis.step.savings import own_time
from dlprof.analysis.stragglers import own_time as own
from dlprof.analysis.stragglers.own_time import NOTABLE_SHARE, Lead, lead, own_steps, steps_of
from dlprof.analysis.stragglers.workload import Reason, longer_because, workload
from dlprof.errors import DoesNotApply
from dlprof.result import CATEGORIES
from dlprof.units import percent, ranks_named

# What a late rank may do with its time that another rule answers for: which claims the saving of it.
OWNERS: Mapping[str, tuple[str, str]] = {
    "input_wait": ("waits longer for its data", "input_wait"),
    "pipeline_bubble": ("idles longer in its pipeline", "pipeline_bubble"),
    "checkpoint": ("saves checkpoints", "checkpoint_stall"),
    "garbage_collection": ("collects garbage longer", "gc_pauses"),
    "compilation": ("compiles longer", "recompilation"),
    "periodic_work": ("does more between its steps every n-th time", "periodic_work"),
}

# What else a late rank may do longer, and what to change.
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


@dataclass(frozen=True)
class LateRanks:
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
    """Return the lead that costs most: that of the slowest rank, or that of all of its host or its pipeline."""
    alone = lead(steps)
    slowest = alone.ranks[0]
    on_host = [r for r in map(int, steps.columns) if settings.host(job, r) == settings.host(job, slowest)]
    mine = stages["ranks"].get(slowest)
    in_pipeline = [r for r in map(int, steps.columns) if mine is not None and stages["ranks"].get(r) == mine]
    # What others are late by costs nothing while the slowest is as late.
    together = [lead(steps, ranks) for ranks in (on_host, in_pipeline) if 1 < len(ranks) < len(steps.columns)]
    return max((alone, *together), key=lambda found: found.saving_ns)


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


@across_ranks
def straggling(
    late_ranks: LateRanks = needs(late_ranks),
    breakdown: Frame = needs(breakdown),
    own_time: Frame = needs(own_time),
    workload: Maybe[Frame] = maybe(workload),
    sample_means: Maybe[Frame] = maybe(sample_means),
    held_down: Maybe[list[tuple[dict[Any, Any], str, float]]] = maybe(held_down),
    expert_balance: Maybe[Balance] = maybe(expert_balance),
    job: Job = needs(JOB),
) -> LateRanks:
    """Return what of the cost is left for this rule to save. Once that is not notable, nothing more is looked into."""
    cuts: tuple[Callable[[LateRanks], LateRanks], ...] = (
        partial(_unowned, breakdown, own_time),
        partial(_with_reason, workload, sample_means, held_down, expert_balance, job),
        partial(_uncrowded, sample_means, job),
        _shared_out,
    )
    late = late_ranks
    for cut in cuts:
        if late.share < NOTABLE_SHARE:
            return late
        late = cut(late)
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


def _with_reason(
    workload: Maybe[pd.DataFrame],
    sample_means: Maybe[pd.DataFrame],
    held_down: Maybe[list[tuple[dict[Any, Any], str, float]]],
    expert_balance: Maybe[Balance],
    job: Job,
    late: LateRanks,
) -> LateRanks:
    """Find why the ranks compute longer, and save nothing where another rule answers for that."""
    if late.cause != "computation":
        return late
    because = longer_because(workload.get(), sample_means, held_down, expert_balance, job, late.lead.ranks[0])
    left = late.cut(0.0, f"{late.behind}, as {because.said}: see {because.owner}") if because.owner else late
    return replace(left, because=because)


def _uncrowded(sample_means: Maybe[pd.DataFrame], job: Job, late: LateRanks) -> LateRanks:
    """Leave out what the ranks lack of cores that the others on their host have."""
    lacks = without_core(sample_means, job, late.lead.ranks) if late.cause == "computation" else 0.0
    why = f"{late.behind}, as it waits for a core for {percent(lacks)} more of the time than the job's other"
    return late.cut(max(late.share - lacks, 0.0), f"{why} ranks on its host, which have it then")


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


def _shared_out(late: LateRanks) -> LateRanks:
    """Keep what sharing the work out evenly saves, where the late ranks have more of the model."""
    if not late.because.shared:
        return late
    share = late.share * min(late.lead.shared_ns / late.lead.saving_ns, 1.0)
    return late.cut(share, f"{late.behind}, as {late.because.said}; shared out evenly, that saves {percent(share)}")
