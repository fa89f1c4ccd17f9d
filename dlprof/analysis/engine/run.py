"""Reads each rank of a run once, in parallel where that helps, and computes the wanted measures."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd

from dlprof.analysis.engine.needs import Measure, Scope, measures_among, needs_of
from dlprof.analysis.engine.ranks import Answer, Failure, Measured, RankAnswer, RankData, answered
from dlprof.errors import DlprofError, NotMeasured
from dlprof.read.kineto import prefetch
from dlprof.read.kineto.split.shares import free_bytes
from dlprof.read.run import TRACE, Rank, Run


@dataclass(frozen=True)
class Done:
    """How much is done, and of how much: ranks, their files, and the bytes of these."""

    ranks: int
    of_ranks: int
    files: int = 0
    of_files: int = 0
    bytes: int = 0
    of_bytes: int = 0


Progress = Callable[[Done], None]

# Memory of a process next to its rank's unpacked bytes.
PROCESS_BYTES = 200 << 20


def measure_rank(rank: Rank, measures: Sequence[Measure[Any]], also: Also | None = None) -> RankAnswer:
    """Read one rank, compute its measures and drop its tables."""
    data = RankData(rank)
    answers = {m.name: answered(partial(data.once, m)) for m in measures}
    if also:
        answers[ALSO.name] = answered(partial(also, data))
    facts = data.facts
    answer = RankAnswer(answers, facts.facts, facts.trace_facts, tuple(data.warnings), data.tables)
    data.forget()
    return answer


def _also() -> pd.DataFrame:
    raise NotMeasured("nothing else was asked for")


# The measure whose frames are those of the `also` of measure().
ALSO = Measure("also", _also, Scope.PER_RANK, ())
Also = Callable[[RankData], pd.DataFrame]


def measure(
    run: Run,
    wanted: Iterable[Measure[Any] | Callable[..., Any]],
    jobs: int | None = None,
    progress: Progress | None = None,
    also: Also | None = None,
) -> Measured:
    """Compute for every rank of a run what the wanted measures, and functions to be called with measures, need.

    `also` is called with each rank while its tables exist; its frame is that of the measure ALSO. `jobs` bounds the
    processes; by default cores and memory do. Raises DlprofError where no file of foreign traces could be read; a
    recorded run still has its facts.
    """
    todo = travelling(wanted)
    workers = min(jobs or _cores(), len(run.ranks), _fitting(run))
    prefetch.stop()
    run.share_out(jobs)
    answers: dict[int, RankAnswer] = {}
    backend = processes if workers > 1 else serial
    far = so_far(run)
    if progress:
        progress(far([]))
    # Traces that are decoded already take least: they go last, where they even out the processes.
    order = sorted(run.largest_first, key=lambda rank: prefetch.is_begun(rank.files.get(TRACE)))
    for index, answer in backend(order, todo, workers, also):
        answers[index] = answer
        if progress:
            progress(far(answers))
    prefetch.forget()
    if answers and not run.recorded and not any(a.tables for a in answers.values()):
        why = answers[min(answers)].warnings[0]
        raise DlprofError(why if len(answers) == 1 else f"none of {len(answers)} traces can be read: {why}")
    return Measured(run, answers)


def so_far(run: Run) -> Callable[[Collection[int]], Done]:
    """Return a function from the ranks that are done to the progress: their number, files and bytes."""
    sizes = {r.index: [p.stat().st_size for p in r.files.values() if p.exists()] for r in run.ranks}
    whole = (sum(len(of) for of in sizes.values()), sum(sum(of) for of in sizes.values()))

    def done(ranks: Collection[int]) -> Done:
        read = [sizes[r] for r in ranks]
        files, read_bytes = sum(len(of) for of in read), sum(sum(of) for of in read)
        return Done(len(ranks), len(sizes), files, whole[0], read_bytes, whole[1])

    return done


def serial(
    ranks: Sequence[Rank],
    todo: Sequence[Measure[Any]],
    workers: int = 1,  # noqa: ARG001 - a backend's signature
    also: Also | None = None,
) -> Iterator[tuple[int, RankAnswer]]:
    """Measure the ranks one after the other in this process."""
    for rank in ranks:
        yield rank.index, measure_rank(rank, todo, also)


def processes(
    ranks: Sequence[Rank], todo: Sequence[Measure[Any]], workers: int, also: Also | None = None
) -> Iterator[tuple[int, RankAnswer]]:
    """Measure the ranks in a pool of processes; a rank whose process died has a warning and costs no other."""
    # Forking is ten times cheaper than a fresh interpreter, and safe while this process has no other thread.
    alone = threading.active_count() == 1 and "fork" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("fork" if alone else "spawn")
    pending = {r.index: r for r in ranks}
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = {pool.submit(measure_rank, r, todo, also): r.index for r in ranks}
        try:
            for future in as_completed(futures):
                index = futures[future]
                answer = future.result()
                del pending[index]
                yield index, answer
        except BrokenProcessPool:
            pass
    # A pool that lost a process (most likely out of memory) is broken: the remaining ranks are measured one at a time,
    # each in a process of its own, so that only the culprit is lost.
    for rank in pending.values():
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            try:
                yield rank.index, pool.submit(measure_rank, rank, todo, also).result()
            except BrokenProcessPool:
                why = f"reading {', '.join(map(str, rank.files.values()))} killed its process (out of memory?)"
                lost: dict[str, Answer] = {m.name: Failure(why) for m in todo}
                yield rank.index, RankAnswer(lost, rank.facts, {}, (why,))


def travelling(wanted: Iterable[Measure[Any] | Callable[..., Any]]) -> tuple[Measure[Any], ...]:
    """Return the per-rank measures that these need to be computed or called."""
    found: dict[str, Measure[Any]] = {}
    todo, seen = list(wanted), set()
    while todo:
        one = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        if isinstance(one, Measure) and not one.across:
            found[one.name] = one
        else:
            todo += measures_among(one.needs if isinstance(one, Measure) else needs_of(one))
    return tuple(found[name] for name in sorted(found))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _fitting(run: Run) -> int:
    """Return how many of the largest ranks fit into the free memory at once; at least one."""
    free = free_bytes()
    if free is None:
        return _cores()
    largest = max((r.unpacked_bytes for r in run.ranks), default=0)
    return max(1, int(free * 0.8) // (largest + PROCESS_BYTES))
