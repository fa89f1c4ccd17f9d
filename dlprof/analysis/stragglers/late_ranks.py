"""Which ranks are late, what that costs, and how much of the cost is theirs alone.

The lead of the ranks with the longest own time over the next is what they cost. What another rule answers for, what a
short trace shows by chance, and what the others would then lack of the host's cores is taken off that, step by step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.engine import Job, Maybe, across_ranks, by_rank
from dlprof.analysis.machine.samples import WAITED, outside
from dlprof.analysis.step.breakdown import part
from dlprof.analysis.step.spread import LEAST_NOISE
from dlprof.analysis.stragglers.own_time import Lead, lead
from dlprof.analysis.stragglers.workload import Reason, longer_because
from dlprof.result import CATEGORIES
from dlprof.units import percent

# Notable from 5 % of a step on; other tools grade 5, 10 and 20 %.
NOTABLE_SHARE = 0.05

# Where all steps of the light layer and the few traced ones in a row show different ranks, or only the latter show one,
# from here on. The slowest rank is looked at: of two alike, one is twice the noise ahead in one window of twenty, and
# three times in one of seventy.
SURE_NOISE = 3.0

# What a late rank may do with its time that another rule answers for: which claims the saving of it.
OWNERS: Mapping[str, tuple[str, str]] = {
    "input_wait": ("waits longer for its data", "input_wait"),
    "pipeline_bubble": ("idles longer in its pipeline", "pipeline_bubble"),
    "checkpoint": ("saves checkpoints", "checkpoint_stall"),
    "garbage_collection": ("collects garbage longer", "gc_pauses"),
    "compilation": ("compiles longer", "recompilation"),
}

_TRACED = "in the traced steps"
_BUSY = "in every steady step, as what each rank is busy tells"

# What else a late rank may do longer than the others.
CAUSES = (
    "computation",
    "communication",
    "copy",
    "validation",
    "optimizer_host",
    "host",
    "launch_latency",
    "queued_wait",
    "other",
)


@dataclass(frozen=True)
class _Known:
    """What the cost of late ranks is worked out from."""

    traced_own_time: Maybe[pd.DataFrame]
    light_own_time: Maybe[pd.DataFrame]
    own_time: Maybe[pd.DataFrame]
    step_means: Maybe[pd.DataFrame]
    mean_step_ns: Maybe[float]
    breakdown: Maybe[pd.DataFrame]
    busy_share: Maybe[pd.DataFrame]
    sample_means: Maybe[pd.DataFrame]
    workload: Maybe[pd.DataFrame]
    held_down: Maybe[list[tuple[dict[Any, Any], str, float]]]
    job: Job


@dataclass(frozen=True)
class LateRanks:
    """The late ranks, and what this rule would save of what they cost: shares of the mean steady step."""

    known: _Known
    lead: Lead
    source: str  # which steps show it
    agreed: bool = True  # whether no other steps show other ranks
    share: float = 0.0
    noise: float = 0.0
    why: str = ""  # why it is not more
    more: Mapping[str, float] = field(default_factory=dict)  # what they spend more on than the others, ns a category
    cause: str = ""  # most of that, of what no other rule answers for
    because: Reason = field(default_factory=Reason)  # why they compute longer, where that is the cause

    def cut(self, share: float, why: str) -> LateRanks:
        """Return the same with a smaller share left, and why."""
        return replace(self, share=share, noise=self.noise * share / self.share, why=why)

    @property
    def who(self) -> str:
        """The rank, or the host of all of them."""
        ranks = self.lead.ranks
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"host {settings.host(self.known.job, ranks[0])}"

    @property
    def behind(self) -> str:
        """Who is late, and by how much."""
        return f"{self.who} is {percent(self.share)} of a step behind"


@across_ranks
def late_ranks(
    traced_own_time: Maybe[pd.DataFrame],
    light_own_time: Maybe[pd.DataFrame],
    own_time: Maybe[pd.DataFrame],
    step_means: Maybe[pd.DataFrame],
    mean_step_ns: Maybe[float],
    breakdown: Maybe[pd.DataFrame],
    busy_share: Maybe[pd.DataFrame],
    sample_means: Maybe[pd.DataFrame],
    workload: Maybe[pd.DataFrame],
    held_down: Maybe[list[tuple[dict[Any, Any], str, float]]],
    job: Job,
) -> LateRanks:
    """Return the ranks whose own time is longest, or all ranks of one host, and what they cost in all.

    Raises NotMeasured where own time is not known.
    """
    return _found(
        _Known(
            traced_own_time,
            light_own_time,
            own_time,
            step_means,
            mean_step_ns,
            breakdown,
            busy_share,
            sample_means,
            workload,
            held_down,
            job,
        )
    )


def _found(known: _Known) -> LateRanks:
    """Find the late ranks from every step where the step log can tell, else from the traced ones."""
    traced = _dearest(known.job, known.traced_own_time.get())
    late = LateRanks(known, traced, _TRACED)
    steps = known.light_own_time.or_none()
    if steps is not None:
        whole = _dearest(known.job, steps)
        # What one short window shows must exceed what such windows show by chance.
        traced = replace(traced, noise_ns=max(traced.noise_ns, whole.window_noise_ns))
        told = whole.saving_ns >= NOTABLE_SHARE * whole.step_ns and whole.behind_ns >= LEAST_NOISE * whole.noise_ns
        missed = traced.behind_ns >= SURE_NOISE * traced.noise_ns and not told
        agreed = set(traced.ranks) == set(whole.ranks)
        late = LateRanks(known, traced, _TRACED) if missed else LateRanks(known, whole, "in every steady step", agreed)
    share = _cost(late)
    if not share:
        return replace(late, why="no rank makes the others wait")
    return replace(late, share=share, noise=late.lead.noise_ns / late.lead.behind_ns * share)


def _cost(late: LateRanks) -> float:
    """Return what the late ranks cost, as a share of the mean steady step."""
    known, ranks = late.known, list(late.lead.ranks)
    # Traced steps are slower than others; the share of them is what carries over.
    share = late.lead.saving_ns / late.lead.step_ns if late.lead.behind_ns > 0 else 0.0
    if not share or late.source != _TRACED or settings.on_cpu(known.job):
        return share
    own = known.own_time.get()
    if (known.step_means.get()["source"] != "steps").any() or not own["known"].all():
        return share
    # The few traced steps may have been luckier than the others, whose parts the step log and the device's clock tell.
    times = own.set_index("rank")["own_ns"]
    return max(float(times[ranks].min() - times.drop(ranks).max()), 0.0) / known.mean_step_ns.get()


def _dearest(job: Job, own: pd.DataFrame) -> Lead:
    """Return the lead that costs most: that of the slowest rank, or that of all ranks of one host together."""
    hosts: dict[str, list[int]] = {}
    for rank in own.columns:
        hosts.setdefault(settings.host(job, int(rank)), []).append(int(rank))
    together = [lead(own, ranks) for ranks in hosts.values() if 1 < len(ranks) < len(own.columns)]
    return max((lead(own), *together), key=lambda found: found.saving_ns)


def theirs_alone(late: LateRanks) -> LateRanks:
    """Return what is left for this rule to save. Where that is too little to be found, nothing more is looked into."""
    for cut in (_agreed, _unowned, _unthrottled, _confirmed, _uncrowded, _shared_out):
        late = cut(late) if late.share >= NOTABLE_SHARE else late
    return replace(late, why="") if late.share >= NOTABLE_SHARE else late


def _agreed(late: LateRanks) -> LateRanks:
    """Save nothing where the traced steps show another rank, and the difference may be chance."""
    if late.agreed or late.lead.behind_ns >= SURE_NOISE * late.lead.noise_ns:
        return late
    why = f"{late.behind} in all of them, but in the traced ones another rank is: none is late for sure"
    return late.cut(0.0, why)


def _unowned(late: LateRanks) -> LateRanks:
    """Find what the ranks spend more time on, and leave out what other rules answer for."""
    more = _more(late.known, late.lead.ranks)
    owned = {c: more[c] for c in OWNERS}
    does, owner = OWNERS[max(owned, key=lambda c: owned[c])]
    share = late.share * (1 - sum(owned.values()) / max(sum(more.values()), 1.0))
    late = late.cut(share, f"{late.behind}, as it {does}: see {owner}")
    return replace(late, more=more, cause=max(CAUSES, key=lambda c: more[c]))


def _more(known: _Known, late: tuple[int, ...]) -> dict[str, float]:
    """Return by how much each category of the late ranks' own time exceeds the median of the others', ns; 0 or more.

    Their waiting for others is no own time.
    """
    waiting = by_rank(known.own_time.get(), "wait_ns")
    more = {}
    for category in CATEGORIES:
        ns = part(known.breakdown.get(), category)
        if category == "communication":
            ns = {r: max(0.0, t - waiting.get(r, 0.0)) for r, t in ns.items()}
        others = [t for r, t in ns.items() if r not in late]
        more[category] = max(0.0, median(t for r, t in ns.items() if r in late) - median(others))
    return more


def _unthrottled(late: LateRanks) -> LateRanks:
    """Find why the ranks compute longer, and save nothing where another rule answers for that."""
    if late.cause != "computation":
        return late
    because = longer_because(
        late.known.workload.get(), late.known.sample_means, late.known.held_down, late.known.job, late.lead.ranks[0]
    )
    left = late.cut(0.0, f"{late.behind}, as {because.said}: see {because.owner}") if because.owner else late
    return replace(left, because=because)


def _confirmed(late: LateRanks) -> LateRanks:
    """Keep what of the traced steps' longer computation is true of all steady ones.

    On a CPU who computes longer is busy for longer. The few traced steps, all in a row, may be unlike the others: a
    rank may share its core meanwhile, and the memory that the profiler takes costs one rank more than another. One
    computing thread is busy for as long as its rank takes; several are busy for longer, so that theirs is the most that
    it can be.
    """
    job, ranks = late.known.job, late.lead.ranks
    if late.source != _TRACED or late.cause != "computation":
        return late
    shares = late.known.busy_share.or_none()
    if shares is not None:
        if len(shares) < 2 or not set(ranks) < set(shares.columns):
            return late
        more = lead(shares, ranks)
        # What of the lateness another rule owns is not this one's here either.
        mine = late.share / (late.lead.saving_ns / late.lead.step_ns)
        but = f"{late.behind} in the traced ones, but"
        alone = all((job.facts[r].get("cpu") or {}).get("torch_threads") == 1 for r in job.ranks)
        if alone and more.noise_ns * mine < late.noise:
            share = more.saving_ns * mine
            why = f"{but} {percent(share)} in all steady ones, as what each rank is busy tells"
            return replace(late, share=share, noise=more.noise_ns * mine, source=_BUSY, why=why)
        most = min(late.share, max(more.behind_ns, 0.0) + LEAST_NOISE * more.noise_ns)
        return late.cut(most, f"{but} in all steady steps it is busy for {percent(most)} more of the time at most")
    return late


def _uncrowded(late: LateRanks) -> LateRanks:
    """Leave out what the ranks lack of cores that the others beside them have."""
    lacks = (
        without_core(late.known.sample_means, late.known.job, late.lead.ranks) if late.cause == "computation" else 0.0
    )
    why = f"{late.behind}, as it stands ready without a core for {percent(lacks)} more of the time than the job's other"
    return late.cut(max(late.share - lacks, 0.0), f"{why} ranks on its host, which have it then")


def without_core(sample_means: Maybe[pd.DataFrame], job: Job, late: tuple[int, ...]) -> float:
    """Return for what share of the time late ranks have no core, more than the ranks beside them, which have it then.

    0 where a device computes, where the kernel does not tell, where programs outside the job take cores, and where
    ranks have cores of their own, or may have.
    """
    sampled = sample_means.or_none()
    if sampled is None or not settings.on_cpu(job):
        return 0.0
    neighbours = [r for r in job.ranks if settings.host(job, r) == settings.host(job, late[0]) and r not in late]
    cpus = [job.facts[r].get("cpu") or {} for r in (*late, *neighbours)]
    everywhere = all(cpu.get("affinity") == cpu.get("count") is not None for cpu in cpus)
    if not neighbours or not everywhere or outside(sampled):
        return 0.0
    waited = sampled[sampled["metric"] == WAITED].set_index("rank")["mean"]
    if not set(late) | set(neighbours) <= set(waited.index):
        return 0.0
    return max(float(waited[list(late)].mean() - waited[neighbours].mean()), 0.0)


def _shared_out(late: LateRanks) -> LateRanks:
    """Keep what sharing the work out evenly saves, where the late ranks have more of the model."""
    if not late.because.shared:
        return late
    share = late.share * min(late.lead.shared_ns / late.lead.saving_ns, 1.0)
    return late.cut(share, f"{late.behind}, as {late.because.said}; shared out evenly, that saves {percent(share)}")
