"""What is known of one rank while it is being read, and of all ranks once they were."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis.engine.needs import JOB, RANK, Maybe, Measure, MeasureFailed, Need, call_with, named, needs_of
from dlprof.errors import DlprofError, NotMeasured
from dlprof.read.run import TRACE, Rank, Run
from dlprof.read.sources import SOURCES, Source

T = TypeVar("T")

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
        return call_with(function, needs_of(function), self._value)

    def _value(self, need: Need) -> Any:
        if need.name == RANK:
            return self._rank
        ask = partial(self.table if need.name in schema.TABLES else self._measure, need.name)
        return Maybe(ask) if need.optional else ask()

    def _measure(self, name: str) -> Any:
        return self.once(named(name))

    def once(self, measure: Measure[T]) -> T:
        """Return a measure of this rank, computed once; what it raised is raised again."""
        if measure not in self._known:
            try:
                self._known[measure] = (True, call_with(measure.function, measure.needs, self._value))
            except Exception as e:  # noqa: BLE001 - kept and raised below, at each that asks
                self._known[measure] = (False, e)
        fine, value = self._known[measure]
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
class Failure:
    """A measure that broke: what it said."""

    text: str


# What became of a measure: what it found, or NotMeasured or a Failure.
Answer = Any


@dataclass(frozen=True)
class RankAnswer:
    """What came back of one rank: `tables` names those that could be read."""

    answers: Mapping[str, Answer]
    facts: Mapping[str, Any]
    trace_facts: Mapping[str, Any]
    warnings: tuple[str, ...]
    tables: tuple[str, ...] = ()


class Job:
    """What is known of a job without the tables of its ranks."""

    def __init__(self, run: Run, ranks: Mapping[int, RankAnswer]) -> None:
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

    def __init__(self, run: Run, ranks: Mapping[int, RankAnswer]) -> None:
        super().__init__(run, ranks)
        self.job = Job(run, ranks)
        self._answers = ranks
        self._across: dict[str, Answer] = {}
        self._together: dict[str, Answer] = {}

    def call(self, function: Callable[..., T], *given: Any) -> T:
        """Return what a function makes of what it is given, and of what its other parameters name.

        Raises NotMeasured where one that it requires is not known, and MeasureFailed where its measure broke.
        """
        return call_with(function, needs_of(function, len(given)), self._value, *given)

    def _value(self, need: Need) -> Any:
        if need.name == JOB:
            return self.job
        measure = named(need.name)
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
            self._across[measure.name] = answered(partial(call_with, measure.function, measure.needs, self._value))
        return self._across[measure.name]


def _unwrap(answer: Answer) -> Any:
    if isinstance(answer, NotMeasured):
        raise answer
    if isinstance(answer, Failure):
        raise MeasureFailed(answer.text)
    return answer


def answered(compute: Callable[[], Any]) -> Answer:
    """Return what a measure found, or NotMeasured or a Failure where it could not say or broke."""
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
