"""Maps measures over ranks: each rank is read once, every measure that is wanted of it computed, its tables dropped.

A per-rank measure is a function of one rank's tables (`RankData`) to a small frame. An across-ranks measure is a
function of those frames (`Measured`). Only the small frames leave the process that read the rank. What a measure could
not say (NotMeasured) and what went wrong in it travel in the place of its frame.
"""

from __future__ import annotations

import importlib
import inspect
import multiprocessing
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.errors import DlprofError, NotMeasured
from dlprof.read.kineto import prefetch
from dlprof.read.run import TRACE, Rank, Run
from dlprof.read.sources import SOURCES, Source


@dataclass(frozen=True)
class Done:
    """How much is done, and of how much: ranks, their files, and the bytes of these."""

    ranks: int
    of_ranks: int
    files: int = 0
    of_files: int = 0
    bytes: int = 0
    of_bytes: int = 0


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Progress = Callable[[Done], None]

# Each process is granted its rank's unpacked bytes and the interpreter's own footprint.
PROCESS_BYTES = 200 << 20

# The parameters that get facts and no measure.
RANK = "rank"
JOB = "job"

# What claims more ranks than this is damaged: the largest jobs known have some hundred thousand.
LARGEST_WORLD = 1 << 20


@dataclass(frozen=True)
class RankFacts:
    """What is known of one rank without its tables."""

    index: int
    facts: dict[str, Any]  # the recorder's
    resumed_ns: NDArray[np.int64]  # when the job went on after it was suspended
    trace_facts: dict[str, Any]  # what the trace says of itself


class RankData:
    """One rank while it is being read: its tables and facts, and what was computed of them so far."""

    def __init__(self, rank: Rank) -> None:
        self.index = rank.index
        self.facts: dict[str, Any] = dict(rank.facts)
        self.resumed_ns = np.array(rank.resumed_ns, dtype=np.int64)
        self.trace_facts: dict[str, Any] = {}
        self.warnings: list[str] = []
        self._tables: dict[str, pd.DataFrame] = {}
        self._missing: dict[str, str] = {}
        self._known: dict[Any, tuple[bool, Any]] = {}
        self._read(rank)
        self._rank = RankFacts(self.index, self.facts, self.resumed_ns, self.trace_facts)

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
                self._tables[name] = schema.join(name, [self._tables[name], frame]) if name in self._tables else frame
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

    def call(self, function: Callable[..., T]) -> T:
        """Return what a function makes of what its parameters name."""
        return _call(function, needs_of(function), self._value)

    def _value(self, need: Need) -> Any:
        if need.name == RANK:
            return self._rank
        ask = partial(self.table if need.name in schema.TABLES else self._measure, need.name)
        return Maybe(ask) if need.optional else ask()

    def _measure(self, name: str) -> Any:
        return self.once(_MEASURES[name])

    def once(self, function: Measure[T] | Callable[[RankData], T]) -> T:
        """Return a measure of this rank, computed once; what it raised is raised again."""
        if function not in self._known:
            try:
                known = (
                    _call(function.function, function.needs, self._value)
                    if isinstance(function, Measure)
                    else function(self)
                )
                self._known[function] = (True, known)
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


class Maybe(Generic[T_co]):
    """A need that may be lacking. It is computed when it is first asked for.

    A parameter that is annotated with it gets it in the place of the value; all other parameters are required.
    """

    def __init__(self, ask: Callable[[], T_co], lacking: Mapping[int, str] | None = None) -> None:
        self._ask = ask
        self.lacking = lacking or {}  # of a per-rank measure named across ranks: the ranks without it, and why

    def get(self) -> T_co:
        """Return the value; raise NotMeasured where it is not known, MeasureFailed where its measure broke."""
        return self._ask()

    def or_none(self) -> T_co | None:
        """Return the value; None where it is not known."""
        try:
            return self._ask()
        except (NotMeasured, MeasureFailed):
            return None

    def why(self) -> str:
        """Return why the value is not known; "" where it is."""
        try:
            self._ask()
        except (NotMeasured, MeasureFailed) as e:
            return str(e)
        return ""

    @property
    def broke(self) -> bool:
        """Whether its measure broke, which the report's warnings tell."""
        try:
            self._ask()
        except MeasureFailed:
            return True
        except NotMeasured:
            pass
        return False

    def __bool__(self) -> bool:
        """Return whether there is a value, and where that has a length, anything in it."""
        value = self.or_none()
        return value is not None and (not hasattr(value, "__len__") or len(value) > 0)


@dataclass(frozen=True)
class Need:
    """What a parameter asks for: the name of a measure or a table, and whether it may be lacking."""

    name: str
    optional: bool


def needs_of(function: Callable[..., Any]) -> tuple[Need, ...]:
    """Return what the parameters of a function ask for."""
    parameters = inspect.signature(function).parameters.values()
    # With postponed evaluation an annotation is its text, which is all that is needed of it.
    return tuple(Need(p.name, str(p.annotation).startswith("Maybe")) for p in parameters)


class Scope(Enum):
    """Where a measure is computed, and what may name it."""

    WITHIN_RANK = "within a rank"  # of the tables of one rank; it never leaves the process that read them
    PER_RANK = "per rank"  # likewise, but a small frame, which travels
    ACROSS_RANKS = "across ranks"  # of what travelled


@dataclass(frozen=True, eq=False)
class Measure(Generic[T_co]):
    """A function that the engine calls: its parameters name what it is made from.

    Of one rank these are tables (`schema.TABLES`), other measures of a rank, and `rank`, its facts. Across ranks they
    are measures per rank, each the frames of all ranks with a column `rank`; measures across ranks; and `job`, the
    facts of all ranks.
    """

    name: str
    function: Callable[..., T_co] = field(repr=False)
    scope: Scope
    needs: tuple[Need, ...]

    @property
    def across(self) -> bool:
        """Whether it is computed of what travelled."""
        return self.scope is Scope.ACROSS_RANKS

    @property
    def travels(self) -> bool:
        """Whether it leaves the process that read the rank, and so is known once a run was measured."""
        return self.scope is not Scope.WITHIN_RANK

    @property
    def is_frame(self) -> bool:
        """Whether it makes a frame, as its annotation says."""
        return self.function.__annotations__.get("return") == "pd.DataFrame"

    def __reduce__(self) -> tuple[Any, ...]:
        return _measure_of, (self.function.__module__, self.name)

    def __call__(self, *args: Any, **kwargs: Any) -> T_co:
        """Call the function with what its parameters name."""
        return self.function(*args, **kwargs)


_MEASURES: dict[str, Measure[Any]] = {}
_complete: list[bool] = []  # filled once all measures of the package are known


def _measure_of(module: str, name: str) -> Measure[Any]:
    importlib.import_module(module)  # which makes it known in a fresh process
    return _MEASURES[name]


def _register(function: Callable[..., T], scope: Scope) -> Measure[T]:
    name = function.__name__
    if name in _MEASURES or name in schema.TABLES or name in (RANK, JOB):
        raise TypeError(f"{function.__module__}: there is a measure or a table {name!r} already")
    if _complete:
        check_needs(function, scope, (name,))
    _MEASURES[name] = Measure(name, function, scope, needs_of(function))
    return _MEASURES[name]


def within_rank(function: Callable[..., T]) -> Measure[T]:
    """Make a measure of one rank's tables that other measures of a rank stand on."""
    return _register(function, Scope.WITHIN_RANK)


def per_rank(function: Callable[..., pd.DataFrame]) -> Measure[pd.DataFrame]:
    """Make a measure of one rank's tables: a small frame, which rules, panels and measures across ranks may name."""
    return _register(function, Scope.PER_RANK)


def across_ranks(function: Callable[..., T]) -> Measure[T]:
    """Make a measure of what the measures of all ranks found."""
    return _register(function, Scope.ACROSS_RANKS)


def check_needs(function: Callable[..., Any], scope: Scope = Scope.ACROSS_RANKS, path: tuple[str, ...] = ()) -> None:
    """Raise TypeError where a parameter names nothing that it may, or where what it needs goes in a circle."""
    across = scope is Scope.ACROSS_RANKS
    for need in needs_of(function):
        known = _MEASURES.get(need.name)
        if need.name in path:
            raise TypeError(f"{function.__module__}: {' needs '.join((*path, need.name))}")
        if known is not None and (known.scope is not Scope.WITHIN_RANK if across else not known.across):
            check_needs(known.function, known.scope, (*path, need.name))
        elif need.name not in ((JOB,) if across else (RANK, *schema.TABLES)):
            raise TypeError(f"{function.__module__}.{function.__qualname__}: nothing {scope.value} is {need.name!r}")


def check_measures() -> tuple[Measure[Any], ...]:
    """Return all measures by name, once they are all known; raise TypeError where one needs what there is not."""
    for made in _MEASURES.values():
        check_needs(made.function, made.scope)
    _complete.append(True)
    return tuple(_MEASURES[name] for name in sorted(_MEASURES))


class MeasureFailed(Exception):  # noqa: N818 - what became of a measure, as NotMeasured is
    """A measure broke, which is a fault of dlprof's: what it said."""


@dataclass(frozen=True)
class Failure:
    """A measure that broke: what it said."""

    text: str


# What became of a measure: what it found, or NotMeasured or a Failure.
Answer = Any


@dataclass(frozen=True)
class _RankAnswer:
    """What came back of one rank: `tables` names those that could be read."""

    answers: Mapping[str, Answer]
    facts: Mapping[str, Any]
    trace_facts: Mapping[str, Any]
    warnings: tuple[str, ...]
    tables: tuple[str, ...] = ()


class Job:
    """What is known of a job without the tables of its ranks."""

    def __init__(self, run: Run, ranks: Mapping[int, _RankAnswer]) -> None:
        self.run = run
        self.ranks = tuple(sorted(ranks))
        self.facts = {r: ranks[r].facts for r in self.ranks}  # the recorder's, by rank
        self.trace_facts = {r: ranks[r].trace_facts for r in self.ranks}
        self.warnings = {r: ranks[r].warnings for r in self.ranks}

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


class Measured(Job):
    """What was measured of all ranks: what rules, panels and across-ranks measures are made from."""

    def __init__(self, run: Run, ranks: Mapping[int, _RankAnswer]) -> None:
        super().__init__(run, ranks)
        self.job = Job(run, ranks)
        self._answers = ranks
        self._across: dict[str, Answer] = {}
        self._together: dict[str, Answer] = {}

    def call(self, function: Callable[..., T]) -> T:
        """Return what a function makes of what its parameters name.

        Raises NotMeasured where one that it requires is not known, and MeasureFailed where its measure broke.
        """
        return _call(function, needs_of(function), self._value)

    def _value(self, need: Need) -> Any:
        if need.name == JOB:
            return self.job
        measure = _MEASURES[need.name]
        if not need.optional:
            return self.frame(measure)
        return Maybe(partial(self.frame, measure), None if measure.across else self.lacking(measure))

    def frame(self, measure: Measure[T]) -> T:
        """Return what a measure found; of a per-rank measure, the frames of all ranks with a column `rank`.

        Raises NotMeasured where no rank could say, with the first rank's reason, and MeasureFailed where it broke.
        """
        if measure.across:
            return cast("T", _unwrap(self._answer_across(measure)))
        if measure.name not in self._together:
            self._together[measure.name] = self._of_all_ranks(measure)
        return cast("T", _unwrap(self._together[measure.name]))

    def _of_all_ranks(self, measure: Measure[Any]) -> Answer:
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

    def lacking(self, measure: Measure[Any]) -> dict[int, str]:
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

    def _answer_across(self, measure: Measure[Any]) -> Answer:
        if measure.name not in self._across:
            self._across[measure.name] = _try(partial(_call, measure.function, measure.needs, self._value))
        return self._across[measure.name]


def _call(function: Callable[..., T], needs: Sequence[Need], value: Callable[[Need], Any]) -> T:
    return function(**{need.name: value(need) for need in needs})


def _unwrap(answer: Answer) -> Any:
    if isinstance(answer, NotMeasured):
        raise answer
    if isinstance(answer, Failure):
        raise MeasureFailed(answer.text)
    return answer


def _try(compute: Callable[[], Any]) -> Answer:
    try:
        return compute()
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


def measure_rank(rank: Rank, measures: Sequence[Measure[Any]], also: Also | None = None) -> _RankAnswer:
    """Read one rank and compute its measures; the tables end here."""
    data = RankData(rank)
    answers = {m.name: _try(partial(data.once, m)) for m in measures}
    if also:
        answers[ALSO.name] = _try(partial(also, data))
    answer = _RankAnswer(answers, data.facts, data.trace_facts, tuple(data.warnings), data.tables)
    data.forget()
    return answer


def _also() -> pd.DataFrame:
    raise NotMeasured("nothing else was asked for")


# What measure() was asked to do beside the measures.
ALSO = Measure("also", _also, Scope.PER_RANK, ())
Also = Callable[[RankData], pd.DataFrame]


def measure(
    run: Run,
    wanted: Iterable[Measure[Any] | Callable[..., Any]],
    jobs: int | None = None,
    progress: Progress | None = None,
    also: Also | None = None,
) -> Measured:
    """Compute of every rank of a run what the wanted measures, and functions to be called with measures, need.

    `also` is called with each rank while its tables are there; its frame is that of the measure ALSO. `jobs` bounds the
    processes; by default as many as cores and memory allow. Raises DlprofError where no file of
    foreign traces could be read: a recorded run still tells how it went, they tell nothing.
    """
    todo = travelling(wanted)
    workers = min(jobs or _cores(), len(run.ranks), _fitting(run))
    prefetch.stop()
    answers: dict[int, _RankAnswer] = {}
    backend = processes if workers > 1 else serial
    far = so_far(run)
    if progress:
        progress(far([]))
    # What is decoded already takes least: behind all others it fills the last gap between the processes.
    order = sorted(run.largest_first, key=lambda rank: prefetch.is_begun(rank.files.get(TRACE)))
    for index, answer in backend(order, todo, workers, also):
        answers[index] = answer
        if progress:
            progress(far(answers))
    prefetch.forget()
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


def serial(
    ranks: Sequence[Rank],
    todo: Sequence[Measure[Any]],
    workers: int = 1,  # noqa: ARG001 - a backend's signature
    also: Also | None = None,
) -> Iterator[tuple[int, _RankAnswer]]:
    """Measure the ranks one after the other in this process."""
    for rank in ranks:
        yield rank.index, measure_rank(rank, todo, also)


def processes(
    ranks: Sequence[Rank], todo: Sequence[Measure[Any]], workers: int, also: Also | None = None
) -> Iterator[tuple[int, _RankAnswer]]:
    """Measure the ranks in a pool of processes; a rank whose process died says so and costs no other."""
    # Forking is ten times cheaper than a fresh interpreter, and safe while this process has no thread of its own.
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
    # A pool that lost a process (most likely to a lack of memory) is gone as a whole: the rest goes one at a time,
    # each in a process of its own, so that only the culprit is lost.
    for rank in pending.values():
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            try:
                yield rank.index, pool.submit(measure_rank, rank, todo, also).result()
            except BrokenProcessPool:
                why = f"reading {', '.join(map(str, rank.files.values()))} killed its process (out of memory?)"
                lost: dict[str, Answer] = {m.name: Failure(why) for m in todo}
                yield rank.index, _RankAnswer(lost, rank.facts, {}, (why,))


def travelling(wanted: Iterable[Measure[Any] | Callable[..., Any]]) -> tuple[Measure[Any], ...]:
    """Return the measures per rank that must travel so that these can be computed or called."""
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
            needs = one.needs if isinstance(one, Measure) else needs_of(one)
            todo += [_MEASURES[n.name] for n in needs if n.name in _MEASURES]
    return tuple(found[name] for name in sorted(found))


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
