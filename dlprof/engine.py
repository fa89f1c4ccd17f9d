"""Maps measures over ranks: each rank is read once, every measure that is wanted of it computed, its tables dropped.

A per-rank measure is a function of one rank's tables (`RankData`) to a small frame. An across-ranks measure is a
function of those frames (`Measured`). Only the small frames leave the process that read the rank. What a measure could
not say (NotMeasured) and what went wrong in it travel in the place of its frame.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from dlprof import tables
from dlprof.errors import DlprofError, NotMeasured
from dlprof.progress import Done
from dlprof.readers import SOURCES, Source, ahead
from dlprof.run import TRACE, Rank, Run

T = TypeVar("T")
Progress = Callable[[Done], None]

# Each process is granted its rank's unpacked bytes and the interpreter's own footprint.
PROCESS_BYTES = 200 << 20

# What claims more ranks than this is damaged: the largest jobs known have some hundred thousand.
LARGEST_WORLD = 1 << 20


class RankData:
    """One rank while it is being read: its tables and facts, and what was computed of them so far."""

    def __init__(self, rank: Rank) -> None:
        self.index = rank.index
        self.facts: dict[str, Any] = dict(rank.facts)  # the recorder's
        self.resumed_ns = np.array(rank.resumed_ns, dtype=np.int64)  # when the job went on after it was stopped
        self.trace_facts: dict[str, Any] = {}  # what the trace says of itself
        self.warnings: list[str] = []
        self._tables: dict[str, pd.DataFrame] = {}
        self._missing: dict[str, str] = {}
        self._known: dict[Callable[[RankData], Any], Any] = {}
        self._read(rank)

    def _read(self, rank: Rank) -> None:
        for source in SOURCES:
            if source.name in rank.files:
                self._take(source, rank.files[source.name])
            else:
                why = (_why_no_trace(rank) if source.name == TRACE else "") or source.absent
                self._missing.update(dict.fromkeys(source.tables, why))

    def _take(self, source: Source, path: Path) -> None:
        try:
            reading = source.read(path)
        except DlprofError as e:
            why = str(e)
        except Exception as e:  # noqa: BLE001 - dlprof's own fault, said to be one; it costs only this file
            why = f"{path}: dlprof failed to read it: {type(e).__name__}: {e}"
        else:
            for name, frame in reading.tables.items():
                # What several samplers wrote is one table.
                self._tables[name] = tables.join(name, [self._tables[name], frame]) if name in self._tables else frame
            self.trace_facts.update(reading.facts)
            self.warnings.extend(reading.warnings)
            return
        self.warnings.append(why)
        self._missing.update(dict.fromkeys(source.tables, why))

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the tables that were read."""
        return tuple(self._tables)

    def table(self, name: str) -> pd.DataFrame:
        """Return a table of this rank; raise NotMeasured where it was not recorded."""
        if name not in self._tables:
            raise NotMeasured(self._missing.get(name, f"no {name} of rank {self.index}"))
        return self._tables[name]

    def has(self, name: str) -> bool:
        """Return whether the rank has rows of a table."""
        return name in self._tables and len(self._tables[name]) > 0

    def once(self, function: Callable[[RankData], T]) -> T:
        """Return function(self), computed once; what it raised is raised again."""
        if function not in self._known:
            try:
                self._known[function] = (True, function(self))
            except Exception as e:  # noqa: BLE001 - kept and raised below, at each that asks
                self._known[function] = (False, e)
        fine, value = self._known[function]
        if fine:
            return value  # type: ignore[no-any-return]
        try:
            raise value
        finally:
            del value  # or its traceback, which holds this frame, would be held by it

    def forget(self) -> None:
        """Drop the tables and all that was computed of them.

        What measures raised holds on to the tables by its traceback, and this holds on to what they raised. Until such
        a circle is looked for, each further rank would take memory of its own.
        """
        self._tables.clear()
        self._known.clear()


def _why_no_trace(rank: Rank) -> str:
    """Return what the recorder knows of it; "" where it knows nothing."""
    window = rank.facts.get("window") or {}
    state = window.get("state")
    if state == "off":
        return "recorded without a trace (--no-trace)"
    if state == "nsys":
        return "recorded under nsys, which torch.profiler would get in the way of (--nsys, or nsys around it)"
    if state == "yielded":
        return "the script runs torch.profiler itself, so dlprof's own window was not recorded"
    if state == "waiting":
        need = sum(window.get(k) or 0 for k in ("skip", "warmup", "active"))
        return f"the job ended before the traced window of step {need} (--window skip,warmup,active moves it)"
    return ""


@dataclass(frozen=True)
class Measure:
    """A measure: its name, its function, and for one across ranks the measures that it is made from."""

    name: str
    module: str
    function: Callable[[Any], pd.DataFrame] = field(repr=False)
    across: bool = False
    needs: tuple[Measure, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _measure_named, (self.module, self.name)


def _measure_named(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def per_rank(function: Callable[[RankData], pd.DataFrame]) -> Measure:
    """Make a measure of one rank's tables."""
    return Measure(function.__name__, function.__module__, function)


def across_ranks(*needs: Measure) -> Callable[[Callable[[Measured], pd.DataFrame]], Measure]:
    """Make a measure from the frames that the needed measures gave of all ranks."""

    def make(function: Callable[[Measured], pd.DataFrame]) -> Measure:
        return Measure(function.__name__, function.__module__, function, across=True, needs=needs)

    return make


class MeasureFailed(Exception):  # noqa: N818 - what became of a measure, as NotMeasured is
    """A measure broke, which is a fault of dlprof's: what it said."""


@dataclass(frozen=True)
class Failure:
    """A measure that broke: what it said."""

    text: str


Answer = pd.DataFrame | NotMeasured | Failure


@dataclass(frozen=True)
class _RankAnswer:
    """What came back of one rank: `tables` names those that could be read."""

    answers: Mapping[str, Answer]
    facts: Mapping[str, Any]
    trace_facts: Mapping[str, Any]
    warnings: tuple[str, ...]
    tables: tuple[str, ...] = ()


class Measured:
    """The frames of all ranks: what rules and across-ranks measures are made from."""

    def __init__(self, run: Run, ranks: Mapping[int, _RankAnswer]) -> None:
        self.run = run
        self.ranks = tuple(sorted(ranks))
        self.facts = {r: ranks[r].facts for r in self.ranks}  # the recorder's, by rank
        self.trace_facts = {r: ranks[r].trace_facts for r in self.ranks}
        self.warnings = {r: ranks[r].warnings for r in self.ranks}
        self._answers = ranks
        self._across: dict[str, Answer] = {}
        self._together: dict[str, Answer] = {}

    @property
    def world_size(self) -> int:
        """How many ranks the job had, as far as anything tells."""
        said = [f.get("world_size") for fs in (self.facts, self.trace_facts) for f in fs.values()]
        # Where there is a rank 1, there is a rank 0.
        known = [len(self.ranks), *(r + 1 for r in self.ranks), *(s for s in said if isinstance(s, int))]
        return max([k for k in known if k <= LARGEST_WORLD], default=1)

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """The ranks of the job of which nothing was read."""
        return tuple(sorted(set(range(self.world_size)) - set(self.ranks)))

    def frame(self, measure: Measure) -> pd.DataFrame:
        """Return a measure's frame; of a per-rank measure, those of all ranks with a column `rank`.

        Raises NotMeasured where no rank could say, with the first rank's reason, and MeasureFailed where it broke.
        """
        if measure.across:
            return _unwrap(self._answer_across(measure))
        if measure.name not in self._together:
            self._together[measure.name] = self._of_all_ranks(measure)
        return _unwrap(self._together[measure.name])

    def _of_all_ranks(self, measure: Measure) -> Answer:
        frames, ranks, first = [], [], None
        for r in self.ranks:
            answer = self._answers[r].answers.get(measure.name)
            if isinstance(answer, pd.DataFrame):
                frames.append(answer)
                ranks.append(r)
            elif first is None or isinstance(answer, Failure):
                first = answer
        if not frames:
            return first if first is not None else NotMeasured("nothing was read")
        rows = np.repeat(np.array(ranks, dtype=np.int64), [len(frame) for frame in frames])
        together = pd.concat(frames, ignore_index=True)
        together["rank"] = rows
        return together

    def lacking(self, measure: Measure) -> dict[int, str]:
        """Return which ranks have no such per-rank frame, and why."""
        answers = {r: self._answers[r].answers.get(measure.name) for r in self.ranks}
        return {
            r: a.text if isinstance(a, Failure) else str(a or "nothing was read")
            for r, a in answers.items()
            if not isinstance(a, pd.DataFrame)
        }

    def failures(self) -> dict[str, list[int]]:
        """Return which measures broke so far and what each said, with the ranks; of one across ranks, none."""
        said: dict[str, list[int]] = {}
        for r in self.ranks:
            for name, answer in self._answers[r].answers.items():
                # A lost process has said so once, and not for each of its measures.
                if isinstance(answer, Failure) and answer.text not in self.warnings[r]:
                    said.setdefault(f"{name}: {answer.text}", []).append(r)
        for name, answer in self._across.items():
            if isinstance(answer, Failure):
                said.setdefault(f"{name}: {answer.text}", [])
        return said

    def _answer_across(self, measure: Measure) -> Answer:
        if measure.name not in self._across:
            self._across[measure.name] = _try(measure.function, self)
        return self._across[measure.name]


def _unwrap(answer: Answer) -> pd.DataFrame:
    if isinstance(answer, NotMeasured):
        raise answer
    if isinstance(answer, Failure):
        raise MeasureFailed(answer.text)
    return answer


def _try(function: Callable[[Any], pd.DataFrame], of: Any) -> Answer:
    try:
        return function(of)
    except NotMeasured as e:
        return NotMeasured(*e.args)  # without its traceback, which would keep the tables
    except MeasureFailed as e:
        return Failure(str(e))
    except Exception as e:  # noqa: BLE001 - one measure's fault costs only those that need it
        return Failure(f"{type(e).__name__}: {e}")


def by_rank(frame: pd.DataFrame, column: str) -> dict[int, float]:
    """Add up a column for each rank: rank → sum."""
    # By hand: for the few rows of each, pandas' groupby takes ten times as long.
    ranks, of = np.unique(frame["rank"].to_numpy(dtype=np.int64), return_inverse=True)
    values = frame[column].to_numpy(dtype=float)
    sums = np.bincount(of, np.where(np.isnan(values), 0.0, values), len(ranks))
    return dict(zip(ranks.tolist(), sums.tolist(), strict=True))


def measure_rank(rank: Rank, measures: Sequence[Measure]) -> _RankAnswer:
    """Read one rank and compute its measures; the tables end here."""
    data = RankData(rank)
    answers = {m.name: _try(lambda d, m=m: d.once(m.function), data) for m in measures}  # type: ignore[misc]
    answer = _RankAnswer(answers, data.facts, data.trace_facts, tuple(data.warnings), data.tables)
    data.forget()
    return answer


def measure(run: Run, wanted: Iterable[Measure], jobs: int | None = None, progress: Progress | None = None) -> Measured:
    """Compute the wanted measures, and what they need, of every rank of a run.

    `jobs` bounds the processes; by default as many as cores and memory allow. Raises DlprofError where no file of
    foreign traces could be read: a recorded run still tells how it went, they tell nothing.
    """
    todo = tuple(m for m in _closure(wanted) if not m.across)
    workers = min(jobs or _cores(), len(run.ranks), _fitting(run))
    ahead.stop()
    answers: dict[int, _RankAnswer] = {}
    backend = processes if workers > 1 else serial
    far = so_far(run)
    if progress:
        progress(far([]))
    # What is decoded already takes least: behind all others it fills the last gap between the processes.
    order = sorted(run.largest_first, key=lambda rank: ahead.is_begun(rank.files.get(TRACE)))
    for index, answer in backend(order, todo, workers):
        answers[index] = answer
        if progress:
            progress(far(answers))
    ahead.forget()
    if answers and not run.recorded and not any(a.tables for a in answers.values()):
        said = answers[min(answers)].warnings[0]
        raise DlprofError(said if len(answers) == 1 else f"none of {len(answers)} traces can be read: {said}")
    return Measured(run, answers)


def so_far(run: Run) -> Callable[[Collection[int]], Done]:
    """Return a function that tells how much is done once some of a run's ranks are: their number, files and bytes."""
    sizes = {r.index: [p.stat().st_size for p in r.files.values() if p.exists()] for r in run.ranks}
    whole = (sum(len(of) for of in sizes.values()), sum(sum(of) for of in sizes.values()))

    def done(ranks: Collection[int]) -> Done:
        read = [sizes[r] for r in ranks]
        files, read_bytes = sum(len(of) for of in read), sum(sum(of) for of in read)
        return Done(len(ranks), len(sizes), files, whole[0], read_bytes, whole[1])

    return done


def serial(ranks: Sequence[Rank], todo: Sequence[Measure], workers: int = 1) -> Iterator[tuple[int, _RankAnswer]]:  # noqa: ARG001 - a backend's signature
    """Measure the ranks one after the other in this process."""
    for rank in ranks:
        yield rank.index, measure_rank(rank, todo)


def processes(ranks: Sequence[Rank], todo: Sequence[Measure], workers: int) -> Iterator[tuple[int, _RankAnswer]]:
    """Measure the ranks in a pool of processes; a rank whose process died says so and costs no other."""
    # Forking is ten times cheaper than a fresh interpreter, and safe while this process has no thread of its own.
    alone = threading.active_count() == 1 and "fork" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("fork" if alone else "spawn")
    pending = {r.index: r for r in ranks}
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = {pool.submit(measure_rank, r, todo): r.index for r in ranks}
        try:
            for future in as_completed(futures):
                index = futures[future]
                answer = future.result()
                del pending[index]
                yield index, answer
        except BrokenProcessPool:
            pass
    # A pool that lost a process (most likely to a lack of memory) is gone as a whole: the rest goes one at a time,
    # each in a process of its own, so that only the culprit is lost.
    for rank in pending.values():
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            try:
                yield rank.index, pool.submit(measure_rank, rank, todo).result()
            except BrokenProcessPool:
                why = f"reading {', '.join(map(str, rank.files.values()))} killed its process (out of memory?)"
                lost: dict[str, Answer] = {m.name: Failure(why) for m in todo}
                yield rank.index, _RankAnswer(lost, rank.facts, {}, (why,))


def _closure(wanted: Iterable[Measure]) -> tuple[Measure, ...]:
    seen: dict[str, Measure] = {}

    def add(m: Measure) -> None:
        for n in m.needs:
            add(n)
        seen.setdefault(m.name, m)

    for m in wanted:
        add(m)
    return tuple(seen.values())


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _fitting(run: Run) -> int:
    """Return how many of the largest ranks fit into the free memory at once; at least one."""
    try:
        with open("/proc/meminfo") as f:  # noqa: PTH123 - a line of the kernel's
            free = next(int(line.split()[1]) << 10 for line in f if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return _cores()
    largest = max((r.unpacked_bytes for r in run.ranks), default=0)
    return max(1, int(free * 0.8) // (largest + PROCESS_BYTES))
