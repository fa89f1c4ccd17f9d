"""Which ranks of a run folder are of one job: two jobs that were given one folder must not be averaged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dlprof.units import listed

# Hosts' clocks may be so far apart: only a rank that began so long after another's end is of a later job.
_CLOCKS_NS = 60_000_000_000


@dataclass
class _Job:
    """What is known of the ranks that were taken for one job so far; None: nothing is."""

    ranks: list[int] = field(default_factory=list)
    named: dict[str, str] = field(default_factory=dict)  # what launchers call it, by the name of the variable
    size: int | None = None
    ended_ns: int | None = None  # when the first of them did

    def differs(self, facts: Mapping[str, Any]) -> str:
        """Return what shows that a rank is of another job; "": nothing does."""
        for name, value in self.named.items():
            if _named(facts).get(name, value) != value:
                return name
        size, began = facts.get("world_size"), _began(facts)
        if not facts.get("backend"):
            return ""  # without a process group they may come and go as they like
        if self.size and size and self.size != size:
            return "the number of their ranks"
        return "when they ran" if self.ended_ns and began - self.ended_ns > _CLOCKS_NS else ""

    def add(self, rank: int, facts: Mapping[str, Any]) -> None:
        """Take a rank for one of this job."""
        self.ranks.append(rank)
        self.named = {**_named(facts), **self.named}
        if facts.get("backend"):
            self.size = self.size or facts.get("world_size")
            ended = facts.get("ended_ns")
            self.ended_ns = min(filter(None, (self.ended_ns, ended)), default=None)


def of_one_job(ranks: Mapping[int, Mapping[str, Any]]) -> tuple[set[int], list[str]]:
    """Return which ranks, given their facts by number, are those of one job, and a warning where others are there too.

    Of several jobs it is the one of most ranks, and of these the one that began last. Ranks are of two jobs where their
    launchers say so; and those of process groups where these differ in size, or where one had ended before the other
    began. What is not known of a rank, as of older recordings, tells nothing.
    """
    jobs: list[_Job] = []
    reasons: dict[str, None] = {}
    for rank, facts in sorted(ranks.items(), key=lambda item: (_began(item[1]), item[0])):
        for job in jobs:
            why = job.differs(facts)
            if not why:
                break
            reasons[why] = None
        else:
            job = _Job()
            jobs.append(job)
        job.add(rank, facts)
    if len(jobs) < 2:
        return set(ranks), []
    *others, read = sorted(jobs, key=lambda job: len(job.ranks))  # of those as large, the last to begin stays the last
    left = [rank for job in others for rank in job.ranks]
    return set(read.ranks), [
        f"the folder holds ranks of {len(jobs)} jobs, which differ in {' and '.join(reasons)}: read are ranks"
        f" {listed(read.ranks)}, left out are {listed(left)}"
    ]


def _named(facts: Mapping[str, Any]) -> dict[str, str]:
    return {name: value for name, value in (facts.get("launch") or {}).items() if value is not None}


def _began(facts: Mapping[str, Any]) -> int:
    return (facts.get("clock") or {}).get("unix_ns") or 0
