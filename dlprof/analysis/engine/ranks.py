"""What is known of one rank while it is read, its frames as they travel, and what is known of all ranks afterwards.

A frame of a few rows takes kilobytes of its own next to its values, and a run has a hundred frames for each rank: they
travel as plain arrays by column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis.engine.needs import Fact, Maybe, Measure, MeasureFailed, Need, call_with, needs_of
from dlprof.errors import DlprofError, DoesNotApply, NotMeasured
from dlprof.read.formats import Format, format_named
from dlprof.read.limits import MOST_LANES, MOST_RANKS, limit
from dlprof.read.records import NotThereError
from dlprof.read.run import TRACE, Rank, Run
from dlprof.read.sources import SOURCES, Source

# The columns of frames, each once: all ranks have the same.
_COLUMNS: dict[tuple[str, ...], tuple[str, ...]] = {}


@dataclass(frozen=True)
class Texts:
    """A column of texts: the place of each among the different ones, −1: missing."""

    codes: NDArray[np.int32]
    values: tuple[str, ...]

    def array(self, codes: NDArray[np.int32] | None = None) -> Any:
        """Return the texts, or those at other places, as pandas holds them."""
        at = self.codes if codes is None else codes
        return pd.array(np.array([*self.values, np.nan], dtype=object)[at], dtype="str")


@dataclass(frozen=True)
class Packed:
    """A frame without its index."""

    columns: tuple[str, ...]
    arrays: tuple[NDArray[Any] | Texts, ...]
    rows: int

    def __len__(self) -> int:
        return self.rows

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.columns, self.arrays, self.rows)

    def frame(self) -> pd.DataFrame:
        """Return it as a frame."""
        values = [a.array() if isinstance(a, Texts) else a for a in self.arrays]
        return pd.DataFrame(dict(zip(self.columns, values, strict=True)), index=range(self.rows))


def _made(columns: tuple[str, ...], arrays: tuple[NDArray[Any] | Texts, ...], rows: int) -> Packed:
    return Packed(_COLUMNS.setdefault(columns, columns), arrays, rows)


def packed(value: Any) -> Any:
    """Return a frame of numbers and texts as arrays; anything else as it is."""
    if not isinstance(value, pd.DataFrame) or not len(value.columns) or not value.columns.is_unique:
        return value
    arrays: list[NDArray[Any] | Texts] = []
    for name in value.columns:
        column = value[name]
        if not isinstance(name, str):
            return value
        if isinstance(column.dtype, np.dtype) and column.dtype.kind in "iufb":
            arrays.append(np.ascontiguousarray(column.to_numpy()))
        elif column.dtype == "str":
            codes, texts = pd.factorize(column)
            arrays.append(Texts(codes.astype(np.int32), tuple(map(str, texts))))
        else:
            return value
    return Packed(tuple(value.columns), tuple(arrays), len(value))


def concatenated(frames: Sequence[pd.DataFrame | Packed]) -> pd.DataFrame:
    """Return the rows of all frames, one after the other, with a new index, as pd.concat does."""
    alike = [f for f in frames if isinstance(f, Packed)]
    if len(alike) < len(frames) or len({(f.columns, *map(_kind, f.arrays)) for f in alike}) != 1:
        every = [f.frame() if isinstance(f, Packed) else f for f in frames]
        return pd.concat(every, ignore_index=True)
    columns = zip(*(f.arrays for f in alike), strict=True)
    return pd.DataFrame({name: _joined(parts) for name, parts in zip(alike[0].columns, columns, strict=True)})


def _kind(array: NDArray[Any] | Texts) -> str:
    return "str" if isinstance(array, Texts) else str(array.dtype)


def _joined(parts: Sequence[NDArray[Any] | Texts]) -> Any:
    """Return one column of several, all numbers of one kind or all texts."""
    texts = [part for part in parts if isinstance(part, Texts)]
    if not texts:
        return np.concatenate([part for part in parts if not isinstance(part, Texts)])
    places: dict[str, int] = {}
    codes = []
    for part in texts:
        own = np.array([places.setdefault(value, len(places)) for value in part.values] + [-1], dtype=np.int32)
        codes.append(own[part.codes])
    return Texts(np.empty(0, dtype=np.int32), tuple(places)).array(np.concatenate(codes))


T = TypeVar("T")

_OURS = {source.name: source for source in SOURCES}  # what dlprof records; any other name is a format's

_NOTHING_READ = "no file of any rank was recorded"


@dataclass(frozen=True)
class RankFacts:
    """What is known of one rank apart from its tables."""

    index: int
    facts: dict[str, Any]  # the recorder's
    resumed_ns: NDArray[np.int64]  # when the job was resumed after a suspension
    trace_facts: dict[str, Any]  # the trace's own


RANK: Fact[RankFacts] = Fact("rank", across=False)


class RankData:
    """One rank while it is read: its tables and facts, and the measures computed so far."""

    def __init__(self, rank: Rank) -> None:
        self.index = rank.index
        self.warnings: list[str] = []
        recorded = self._plausible(rank.facts, "facts.json")
        self.facts = RankFacts(rank.index, recorded, np.array(rank.resumed_ns, dtype=np.int64), {})
        self._tables: dict[str, pd.DataFrame] = {}
        self._missing: dict[str, str] = {}
        self._known: dict[Any, Any] = {}
        for source in SOURCES:
            if source.name not in rank.files:
                why = (_why_no_trace(rank) if source.name == TRACE else "") or source.absent
                self._missing.update(dict.fromkeys(source.tables, why))
        foreign = [name for name in rank.files if name not in _OURS]
        for name in foreign:
            self._missing.update(format_named(name).lacks)
        for name in [*(name for name in _OURS if name in rank.files), *foreign]:
            self._take(name, rank.files[name], rank.pieces.get(name, ""), rank.begins.get(name))

    def _take(self, name: str, path: Path, piece: str, begins: str | None) -> None:
        source: Source | Format = _OURS[name] if name in _OURS and not piece else format_named(name)
        try:
            if isinstance(source, Source):
                reading = source.read(path, begins=begins) if begins else source.read(path)
            else:
                reading = source.tables_of(path, piece)
        except NotThereError:
            self._missing.update(dict.fromkeys(source.tables, _OURS[name].absent))
            return
        except DlprofError as e:
            why = str(e)
        except Exception as e:  # noqa: BLE001 - a bug of dlprof; it costs only this file
            why = f"{path}: dlprof failed to read it: {type(e).__name__}: {e}"
        else:
            for table, frame in reading.tables.items():
                # Several samplers write into one table.
                known = self._tables.get(table)
                frame = self._fewer_lanes(frame, path.name) if table == "spans" else frame
                self._tables[table] = frame if known is None else schema.join(table, [known, frame])
            self.facts.trace_facts.update(self._plausible(reading.facts, path.name))
            self.warnings.extend(reading.warnings)
            self._missing.update(reading.lacks)
            return
        self.warnings.append(why)
        self._missing.update(dict.fromkeys(source.tables, why))

    def _plausible(self, facts: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Return facts without a world size that no job has: much is made for each rank."""
        world = facts.get("world_size")
        if not isinstance(world, int) or world <= MOST_RANKS:
            return dict(facts)
        self.warnings.append(f"{name}: a world size of {world:,} is more than any job has: it is not used")
        return {k: value for k, value in facts.items() if k != "world_size"}

    def _fewer_lanes(self, spans: pd.DataFrame, name: str) -> pd.DataFrame:
        """Return the spans of the threads and streams with the most of them: many measures look at one by one."""
        lane = spans["lane"].cat
        count, most = len(lane.categories), limit(MOST_LANES)
        if count <= most:
            return spans
        self.warnings.append(
            f"{name}: holds {count:,} threads and streams: those {most:,} with the most spans are used"
            " (--no-limits uses all)"
        )
        spans_of = np.bincount(lane.codes, minlength=count)
        kept = np.zeros(count, dtype=bool)
        kept[np.argsort(-spans_of, kind="stable")[:most]] = True
        fewer = spans[kept[lane.codes.to_numpy()]].reset_index(drop=True)
        return fewer.assign(lane=fewer["lane"].cat.remove_unused_categories())

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the tables that were read."""
        return tuple(self._tables)

    def table(self, name: str) -> pd.DataFrame:
        """Return a table of this rank; raise NotMeasured where it was not recorded."""
        if name not in self._tables:
            raise NotMeasured(self._missing.get(name, f"no {name} of rank {self.index}"))
        return self._tables[name]

    def call(self, function: Callable[..., T]) -> T:
        """Call a function with what its parameters need."""
        return call_with(function, needs_of(function), self._value)

    def _value(self, need: Need) -> Any:
        if isinstance(need.of, Fact):
            return self.facts
        ask = partial(self.once, need.of) if isinstance(need.of, Measure) else partial(self.table, need.of.name)
        return Maybe(ask) if need.optional else ask()

    def once(self, measure: Measure[T]) -> T:
        """Return a measure of this rank, computed once; what it raised is raised again."""
        if measure not in self._known:
            try:
                self._known[measure] = call_with(measure.function, measure.needs, self._value)
            except Exception as e:  # noqa: BLE001 - raised below, for each caller
                self._known[measure] = e
        value = self._known[measure]
        if not isinstance(value, Exception):
            return value  # type: ignore[no-any-return]
        try:
            raise value
        finally:
            del value  # else a cycle: its traceback holds this frame

    def forget(self) -> None:
        """Drop the tables and all that was computed from them.

        Exceptions hold the tables by their tracebacks, and this holds the exceptions. Until the garbage collector finds
        such a cycle, each further rank would add its memory.
        """
        self._tables.clear()
        self._known.clear()


def _why_no_trace(rank: Rank) -> str:
    """Return the reason that the recorder knows, or ""."""
    window = rank.facts.get("window") or {}
    state = window.get("state")
    if state == "not_asked":
        return f"this rank was asked for no trace (--ranks {window.get('asked') or 'of some'})"
    if state == "off":
        return "recorded without a trace (--no-trace)"
    if state == "nsys":
        return "recorded under nsys, and its report was not exported (nsys export --type sqlite, in hosts/HOST)"
    if state == "yielded":
        return "the script runs torch.profiler itself, so dlprof's own trace window was not recorded"
    if state == "declined":
        return "the GPU's memory was full when the trace window was due, and the profiler needs some"
    if state == "partial":
        return "the job ended as its trace window began (--window skip,warmup,active moves it)"
    if state == "missed":
        return "this rank was not told in time of the later window that is read"
    if state == "waiting":
        need = sum(window.get(k) or 0 for k in ("skip", "warmup", "active"))
        return f"the job ended before the trace window of step {need} (--window skip,warmup,active moves it)"
    return ""


@dataclass(frozen=True)
class Failure:
    """A measure that failed, with its message."""

    text: str


Answer = Any  # the value of a measure, NotMeasured or a Failure
FRAMES = (pd.DataFrame, Packed)
COMBINED = object()  # in place of a rank's frame that is part of all ranks' now


@dataclass(frozen=True)
class RankAnswer:
    """What a rank passes on, its frames packed: which tables could be read, and why it could not be kept."""

    answers: Mapping[str, Answer]
    facts: Mapping[str, Any]
    trace_facts: Mapping[str, Any]
    warnings: tuple[str, ...]
    tables: tuple[str, ...] = ()
    unkept: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        answers = {name: packed(answer) for name, answer in self.answers.items()}
        return RankAnswer, (answers, *(getattr(self, field.name) for field in fields(self)[1:]))


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
        """The number of ranks of the job: the most that the facts and the ranks' numbers show."""
        facts = [f.get("world_size") for fs in (self.facts, self.trace_facts) for f in fs.values()]
        known = [len(self.ranks), *(r + 1 for r in self.ranks), *(n for n in facts if isinstance(n, int))]
        return max([k for k in known if k <= MOST_RANKS], default=1)

    @property
    def apart(self) -> bool:
        """Whether the ranks are processes of one job that train side by side without a process group."""
        return len(self.ranks) > 1 and all(self.facts[r].get("alone") is True for r in self.ranks)

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """The ranks of the job without any data."""
        return tuple(sorted(set(range(self.world_size)) - set(self.ranks)))


JOB: Fact[Job] = Fact("job", across=True)


class Measured(Job):
    """The measures of all ranks, from which rules, panels and across-ranks measures are made."""

    def __init__(self, run: Run, ranks: Mapping[int, RankAnswer]) -> None:
        super().__init__(run, ranks)
        self.job = Job(run, ranks)
        # A copy, as the frames of single ranks are dropped once they are combined: many ranks have many small ones.
        self._answers = {r: dict(answer.answers) for r, answer in ranks.items()}
        self._across: dict[str, Answer] = {}
        self._combined: dict[str, Answer] = {}

    def call(self, function: Callable[..., T], *given: Any) -> T:
        """Call a function with `given` and what its other parameters need.

        Raises NotMeasured where a required need is not known, and MeasureFailed where its measure failed.
        """
        return call_with(function, needs_of(function), self._value, *given)

    def _value(self, need: Need) -> Any:
        if not isinstance(need.of, Measure):
            return self.job
        measure = need.of
        if not need.optional:
            return self.frame(measure)
        return Maybe(partial(self.frame, measure), None if measure.across else self.lacking(measure))

    def frame(self, measure: Measure[T]) -> T:
        """Return the value of a measure; of a per-rank measure, the frames of all ranks with a column `rank`.

        Raises NotMeasured with the first rank's reason where no rank has it (DoesNotApply only where it applies to
        none), and MeasureFailed where it failed.
        """
        if measure.across and measure.name not in self._across:
            self._across[measure.name] = answered(partial(call_with, measure.function, measure.needs, self._value))
        elif not measure.across and measure.name not in self._combined:
            self._combined[measure.name] = self._of_all_ranks(measure)
        answer = (self._across if measure.across else self._combined)[measure.name]
        if isinstance(answer, NotMeasured):
            raise answer
        if isinstance(answer, Failure):
            raise MeasureFailed(answer.text)
        return cast("T", answer)

    def _of_all_ranks(self, measure: Measure[Any]) -> Answer:
        frames, ranks, first = [], [], None
        for r in self.ranks:
            answer = self._answers[r].get(measure.name)
            if isinstance(answer, FRAMES):
                frames.append(answer)
                ranks.append(r)
            elif first is None or _precedence(answer) > _precedence(first):
                first = answer
        if not frames:
            return first if first is not None else NotMeasured(_NOTHING_READ)
        whole = concatenated(frames)
        whole["rank"] = np.repeat(np.array(ranks, dtype=np.int64), [len(frame) for frame in frames])
        for r in ranks:
            self._answers[r][measure.name] = COMBINED
        return whole

    def lacking(self, measure: Measure[Any]) -> dict[int, str]:
        """Return the ranks without such a per-rank frame, each with the reason."""
        answers = {r: self._answers[r].get(measure.name) for r in self.ranks}
        return {
            r: a.text if isinstance(a, Failure) else str(a or _NOTHING_READ)
            for r, a in answers.items()
            if a is not COMBINED and not isinstance(a, FRAMES)
        }

    def failures(self) -> dict[str, list[int]]:
        """Return the measures that failed so far with their messages, and on which ranks; across ranks: []."""
        failed: dict[str, list[int]] = {}
        for r in self.ranks:
            for name, answer in self._answers[r].items():
                # A lost process is a warning of its rank already, and fails all of its measures.
                if isinstance(answer, Failure) and answer.text not in self.warnings[r]:
                    failed.setdefault(f"{name}: {answer.text}", []).append(r)
        for name, answer in self._across.items():
            if isinstance(answer, Failure):
                failed.setdefault(f"{name}: {answer.text}", [])
        return failed


def _precedence(answer: Answer) -> int:
    """Return the precedence of an answer without a value: the highest of several ranks' stands for all."""
    return 2 if isinstance(answer, Failure) else int(not isinstance(answer, DoesNotApply))


def answered(compute: Callable[[], Any]) -> Answer:
    """Return what `compute` returns, or the NotMeasured or Failure in its place."""
    try:
        return compute()
    except NotMeasured as e:
        return type(e)(*e.args)  # without its traceback, which would keep the tables
    except MeasureFailed as e:
        return Failure(str(e))
    except Exception as e:  # noqa: BLE001 - a bug in one measure costs only what needs it
        return Failure(f"{type(e).__name__}: {e}")


def by_rank(frame: pd.DataFrame, column: str) -> dict[int, float]:
    """Add up a column for each rank: rank → sum."""
    # pandas' groupby takes ten times as long for so few rows.
    ranks, of = np.unique(frame["rank"].to_numpy(dtype=np.int64), return_inverse=True)
    values = frame[column].to_numpy(dtype=float)
    sums = np.bincount(of, np.where(np.isnan(values), 0.0, values), len(ranks))
    return dict(zip(ranks.tolist(), sums.tolist(), strict=True))
