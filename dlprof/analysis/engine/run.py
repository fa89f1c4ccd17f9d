"""Reads each rank of a run once, in parallel where that helps, and computes the wanted measures."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from time import monotonic
from typing import Any, Protocol

import pandas as pd

from dlprof.analysis.engine.needs import Measure, Scope, all_needed
from dlprof.analysis.engine.ranks import Failure, Measured, RankAnswer, RankData, answered
from dlprof.analysis.engine.store import Kept, Store, left_out, not_there
from dlprof.errors import DlprofError, NotMeasured
from dlprof.read import limits
from dlprof.read.kineto import prefetch
from dlprof.read.kineto.split import free_bytes
from dlprof.read.run import TRACE, Rank, Run
from dlprof.units import count, listed


@dataclass(frozen=True)
class Done:
    """How much is done, and of how much: ranks, their files, the bytes of these; and what of it was known before."""

    ranks: int
    of_ranks: int
    files: int = 0
    of_files: int = 0
    bytes: int = 0
    of_bytes: int = 0
    known_ranks: int = 0
    known_bytes: int = 0


Progress = Callable[[Done], None]

# Memory of a process next to its rank's unpacked bytes.
PROCESS_BYTES = 200 << 20
# A share of the free memory.
USED = 0.8


class Backend(Protocol):
    """Reads ranks in whatever order and yields their answers; keeps each in the store, where there is one."""

    def __call__(
        self, ranks: Sequence[Rank], todo: Sequence[Measure[Any]], workers: int, also: Also | None, store: Store | None
    ) -> Iterator[tuple[int, RankAnswer]]:
        """Measure the ranks in at most so many processes at once."""
        ...


def measure_rank(
    rank: Rank, measures: Sequence[Measure[Any]], also: Also | None = None, store: Store | None = None
) -> RankAnswer:
    """Read one rank, compute its measures, drop its tables, and keep the answer where there is a store."""
    stamp = store.stamp(rank) if store else ""  # before reading: the files may change meanwhile
    data = RankData(rank)
    answers = {m.name: answered(partial(data.once, m)) for m in measures}
    if also:
        answers[ALSO.name] = answered(partial(also, data))
    facts = data.facts
    answer = RankAnswer(answers, facts.facts, facts.trace_facts, tuple(data.warnings), data.tables)
    data.forget()
    return replace(answer, unkept=store.keep(rank, answer, stamp)) if store else answer


def lost(rank: Rank, todo: Sequence[Measure[Any]]) -> RankAnswer:
    """Return the answer of a rank that killed the process which read it."""
    why = f"reading {', '.join(map(str, rank.paths))} killed its process (out of memory?)"
    return RankAnswer({m.name: Failure(why) for m in todo}, rank.facts, {}, (why,))


def _also() -> pd.DataFrame:
    raise NotMeasured("nothing else was asked for")


# The measure that holds the frames of the `also` of measure().
ALSO = Measure("also", _also, Scope.PER_RANK, {})
Also = Callable[[RankData], pd.DataFrame]


def measure(
    run: Run,
    wanted: Iterable[Measure[Any] | Callable[..., Any]],
    jobs: int | None = None,
    progress: Progress | None = None,
    also: Also | None = None,
    *,
    store: Store | None = None,
    backend: Backend | None = None,
    only_kept: bool = False,
    tell: Callable[[str], None] | None = None,
) -> Measured:
    """Compute for every rank of a run what the wanted measures, and functions to be called with measures, need.

    `also` is called with each rank while its tables exist; its frame is that of the measure ALSO. `jobs` bounds the
    processes; by default cores and memory do. What `store` has is not read again, and the rest is kept there; with
    `only_kept` the rest is left out, with a warning of the run. `backend` reads the ranks; by default this process
    does, or others beside it. What is left when the time for reading is up is named in a warning of the run, too.
    `tell` gets a line for each thing that a user should know meanwhile. Raises DlprofError where no file of foreign
    traces could be read; a recorded run still has its facts.
    """
    within_s = limits.limit(limits.MOST_SECONDS)
    answers = answers_of(
        run,
        wanted,
        jobs,
        progress,
        also,
        store=store,
        backend=backend,
        only_kept=only_kept,
        tell=tell,
        until=monotonic() + within_s,
    )
    if only_kept:
        run = left_out(run, answers)
    elif unread := [rank.index for rank in run.ranks if rank.index not in answers]:
        text = f"not read within {within_s:,} s: ranks {listed(unread)} (--no-limits reads all)"
        run = replace(run, warnings=(*run.warnings, text))
    if answers and not run.recorded and not any(a.tables for a in answers.values()):
        why = answers[min(answers)].warnings[0]
        raise DlprofError(why if len(answers) == 1 else f"none of {len(answers)} traces can be read: {why}")
    return Measured(run, answers)


def answers_of(
    run: Run,
    wanted: Iterable[Measure[Any] | Callable[..., Any]],
    jobs: int | None = None,
    progress: Progress | None = None,
    also: Also | None = None,
    *,
    store: Store | None = None,
    backend: Backend | None = None,
    only_kept: bool = False,
    tell: Callable[[str], None] | None = None,
    until: float = inf,
) -> dict[int, RankAnswer]:
    """Return the answer of each rank, as for `measure`, whatever could be read until a time of `monotonic`."""
    todo = travelling(wanted)
    if also:
        store = None  # what it returns is not among the measures
    kept = store.read(run.ranks, todo) if store else Kept()
    answers = dict(kept.answers)
    if tell and store:
        for line in (*kept.warnings(), *not_there(run, kept, only_kept)):
            tell(line)
    far = so_far(run, kept.answers)
    if progress:
        progress(far(answers))
    left = [] if only_kept else [rank for rank in run.largest_first if rank.index not in answers]
    unkept = Counter[str]()
    with closing(_read(run, left, todo, jobs, also, store, backend)) as reading:
        for index, answer in reading:
            answers[index] = answer
            unkept[answer.unkept] += 1
            if progress:
                progress(far(answers))
            if monotonic() > until:
                break
    del unkept[""]
    if tell and unkept and store:
        tell(f"{count(unkept.total(), 'rank')} could not be kept in {store.folder}: {', '.join(unkept)}")
    return answers


def _read(
    run: Run,
    ranks: Sequence[Rank],
    todo: Sequence[Measure[Any]],
    jobs: int | None,
    also: Also | None,
    store: Store | None,
    backend: Backend | None,
) -> Generator[tuple[int, RankAnswer], None, None]:
    workers = at_once(ranks, jobs)
    prefetch.stop()
    replace(run, ranks=tuple(ranks)).share_out(jobs)
    if backend is None:
        # Where answers are kept, a process that dies of one rank must not end the analysis of the others.
        backend = processes if workers > 1 or (store and len(ranks) > 1) else serial
    # Traces that are decoded already take least: they go last, where they even out the processes.
    order = sorted(ranks, key=lambda rank: prefetch.is_begun(rank.files.get(TRACE)))
    try:
        if order:
            yield from backend(order, todo, workers, also, store)
    finally:
        prefetch.forget()


def so_far(run: Run, known: Collection[int] = ()) -> Callable[[Collection[int]], Done]:
    """Return a function from the ranks that are done to the progress; `known`: those that need not be read."""
    sizes = {r.index: [p.stat().st_size for p in r.paths if p.exists()] for r in run.ranks}
    whole = (sum(len(of) for of in sizes.values()), sum(sum(of) for of in sizes.values()))
    before = (len(known), sum(sum(sizes[r]) for r in known))

    def done(ranks: Collection[int]) -> Done:
        read = [sizes[r] for r in ranks]
        files, read_bytes = sum(len(of) for of in read), sum(sum(of) for of in read)
        return Done(len(ranks), len(sizes), files, whole[0], read_bytes, whole[1], *before)

    return done


def serial(
    ranks: Sequence[Rank],
    todo: Sequence[Measure[Any]],
    workers: int = 1,  # noqa: ARG001 - a backend's signature
    also: Also | None = None,
    store: Store | None = None,
) -> Iterator[tuple[int, RankAnswer]]:
    """Measure the ranks one after the other in this process."""
    for rank in ranks:
        yield rank.index, measure_rank(rank, todo, also, store)


def processes(
    ranks: Sequence[Rank],
    todo: Sequence[Measure[Any]],
    workers: int,
    also: Also | None = None,
    store: Store | None = None,
) -> Iterator[tuple[int, RankAnswer]]:
    """Measure the ranks in a pool of processes. If a process dies, its rank gets a warning and the others go on."""
    # Forking is ten times cheaper than a fresh interpreter, and safe while this process has no other thread.
    alone = threading.active_count() == 1 and "fork" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("fork" if alone else "spawn")
    pending = {r.index: r for r in ranks}
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = {pool.submit(measure_rank, r, todo, also, store): r.index for r in ranks}
        try:
            for future in as_completed(futures):
                index = futures[future]
                answer = future.result()
                del pending[index]
                yield index, answer
        except BrokenProcessPool:
            pass
        finally:
            pool.shutdown(cancel_futures=True)  # their results are not needed any more
    # A pool that lost a process (most likely out of memory) is broken: the remaining ranks are measured one at a time,
    # each in a process of its own, so that only the culprit is lost.
    for rank in pending.values():
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            try:
                yield rank.index, pool.submit(measure_rank, rank, todo, also, store).result()
            except BrokenProcessPool:
                yield rank.index, lost(rank, todo)


def travelling(wanted: Iterable[Measure[Any] | Callable[..., Any]]) -> tuple[Measure[Any], ...]:
    """Return the per-rank measures that these need to be computed or called, by name."""
    return tuple(measure for measure in all_needed(wanted, into_ranks=False) if not measure.across)


def at_once(ranks: Sequence[Rank], jobs: int | None = None) -> int:
    """Return how many processes read these ranks at once: `jobs` or the cores, no more than ranks and memory allow."""
    largest = max((r.unpacked_bytes for r in ranks), default=0)
    free = free_bytes()
    fitting = _cores() if free is None else max(1, int(free * USED) // (largest + PROCESS_BYTES))
    return min(jobs or _cores(), len(ranks), fitting)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
