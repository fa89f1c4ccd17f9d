"""Shares of a run's ranks for several processes that know nothing of each other, and what some of them left undone."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import replace

from dlprof.analysis.engine.store import Kept
from dlprof.errors import DlprofError
from dlprof.read.run import Rank, Run
from dlprof.units import count, few, listed

# Shards that one line names.
_MOST_NAMED = 8


def shares(run: Run, shards: int) -> list[list[Rank]]:
    """Divide the ranks so that all shards have about as many bytes: the same shares wherever it is computed."""
    ranks = sorted(run.ranks, key=lambda rank: (-rank.unpacked_bytes, rank.index))
    least = [(0, 0, k) for k in range(shards)]
    found: list[list[Rank]] = [[] for _ in range(shards)]
    for rank in ranks:
        used, many, k = least[0]
        heapq.heapreplace(least, (used + rank.unpacked_bytes, many + 1, k))
        found[k].append(rank)
    return found


def not_there(run: Run, kept: Kept, only_kept: bool) -> list[str]:
    """Say how many ranks are not kept, and which shards they are of; nothing where all are, or none is."""
    missing = [rank for rank in run.ranks if rank.index not in kept.answers]
    if not missing or not kept.answers:
        return []
    of = count(len(run.ranks), "rank")
    reduced = {int(shard.partition("/")[2]) for shard in kept.shards if shard}
    if not reduced:
        is_or_are = "is" if len(kept.answers) == 1 else "are"
        return [f"{len(kept.answers):,} of {of} {is_or_are} known from before"]
    undone = f" ({_undone(run, reduced.pop(), missing)})" if len(reduced) == 1 else ""
    one = len(missing) == 1
    then = "left out" if only_kept else "reading it now" if one else "reading them now"
    return [f"{len(missing):,} of {of} {'was' if one else 'were'} not reduced{undone}: {then}"]


def left_out(run: Run, known: Collection[int]) -> Run:
    """Return the run with a warning of the ranks that were not reduced; raise DlprofError where none was."""
    if not known and run.ranks:
        raise DlprofError(f"{run.path}: no rank of it was reduced (dlprof reduce {run.path})")
    missing = [rank.index for rank in run.ranks if rank.index not in known]
    if not missing:
        return run
    was, are = ("was", "is") if len(missing) == 1 else ("were", "are")
    of = count(len(run.ranks), "rank")
    text = f"{len(missing):,} of {of} {was} not reduced and {are} left out: {listed(missing)}"
    return replace(run, warnings=(*run.warnings, text))


def _undone(run: Run, shards: int, missing: Collection[Rank]) -> str:
    """Name the shards that these ranks are of, and whether all of each is missing."""
    gone = {rank.index for rank in missing}
    states: dict[str, list[str]] = {"missing": [], "incomplete": []}
    for k, share in enumerate(shares(run, shards)):
        mine = {rank.index for rank in share}
        if mine & gone:
            states["missing" if mine <= gone else "incomplete"].append(f"{k}/{shards}")
    told = []
    for state, names in states.items():
        if names:
            one = len(names) == 1
            told.append(f"{'shard' if one else 'shards'} {few(names, _MOST_NAMED)} {'is' if one else 'are'} {state}")
    return "; ".join(told)
