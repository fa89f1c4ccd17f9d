"""Reads logs of one JSON object a line, appended as the job runs; the last line may be half.

`rows` reads rows of a table, `samples` readings of a sampler, `read_steps` the step log (a line a step, or one for
several short ones in a row), and `read_lines` the line counts of the named functions, by process of a rank, in pieces.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.errors import DlprofError
from dlprof.read import limits
from dlprof.read.kineto.json_stream import NOT_JSON
from dlprof.read.records import lines_in
from dlprof.read.sources import Reading

_LATEST = 2**62
_Required = Annotated[int, msgspec.Meta(ge=0, le=_LATEST)]
_Optional = Annotated[int, msgspec.Meta(ge=-1, le=_LATEST)]

# A core that is busy for more than this share of the time counts as full.
_BUSY_PERCENT = 90

T = TypeVar("T")


class Log(Generic[T]):
    """The decoded lines of a log, some thousands at a time; afterwards `warnings` has what was lost.

    A line is bad where `decode` raises. A cut last line is dropped, other bad ones with a warning. Iterating raises
    DlprofError if the file cannot be read or holds bad lines only.
    """

    def __init__(self, path: Path, what: str, decode: Callable[[bytes], T], begins: str = "") -> None:
        self.path, self.what, self._decode, self._begins = path, what, decode, begins
        self.warnings: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[list[T]]:
        count = bad = 0
        last_is_bad = False
        most = limits.limit(limits.MOST_ROWS)
        for lines in lines_in(self.path, self._begins):
            good = []
            for line in lines:
                if not line.strip():
                    continue
                try:
                    good.append(self._decode(line))
                    last_is_bad = False
                except (*NOT_JSON, LookupError, TypeError, ValueError):
                    bad += 1
                    last_is_bad = True
            many = count + len(good) > most
            del good[most - count :]
            count += len(good)
            yield good
            if many:
                self.warnings = (limits.too_many(self.path, self.what, most),)
                break
        if bad > 1 and not count:
            raise DlprofError(f"{self.path}: not a log of {self.what}: none of its lines is one")
        if lost := bad - last_is_bad:
            self.warnings = (f"{self.path.name}: {lost:,} malformed lines are left out", *self.warnings)


def rows(
    path: Path,
    table: str,
    required: tuple[str, ...],
    default: Mapping[str, str | int] | None = None,
    extra: Mapping[str, str] | None = None,
    begins: str = "",
) -> Reading:
    """Return the table of a log with the table's columns as keys of its lines; in order of time, if lines have one.

    A line without a required column is bad. Another column that is left out or null is what `default` says, else −1,
    NaN for a float64 and "" for a text. The default of a number is also the least that it may be. Keys that the table
    does not declare, of a later dlprof or an older one, are passed over. `extra` are keys (name → dtype) that become
    columns to the right of the table's, for the caller to take off. `begins`: see `records.lines_in`, here and below.
    """
    declared = {**schema.TABLES[table], **(extra or {})}
    log = Log(path, table, msgspec.json.Decoder(_line(declared, required)).decode, begins)
    columns: dict[str, list[Any]] = {name: [_values([], dtype, None)] for name, dtype in declared.items()}
    for lines in log:
        for name, dtype in declared.items():
            columns[name].append(_values([getattr(line, name) for line in lines], dtype, (default or {}).get(name)))
    frame = pd.DataFrame(
        {
            name: pd.Categorical(np.concatenate(parts)) if declared[name] == schema.CATEGORY else np.concatenate(parts)
            for name, parts in columns.items()
        }
    )
    at = [name for name in ("start_ns", "at_ns") if name in declared][:1]
    schema.check(table, frame[list(schema.TABLES[table])])
    return Reading({table: frame.sort_values(at, kind="stable", ignore_index=True) if at else frame}, {}, log.warnings)


def _line(declared: Mapping[str, str], required: tuple[str, ...]) -> type[msgspec.Struct]:
    types: Mapping[str, Any] = {"float64": float, schema.CATEGORY: str}
    fields: list[Any] = [(name, types.get(declared[name], _Required)) for name in declared if name in required]
    fields += [(n, types.get(d, _Optional) | None, None) for n, d in declared.items() if n not in required]
    return msgspec.defstruct("_Line", fields, gc=False)


def _values(values: list[Any], dtype: str, default: str | int | None) -> Any:
    if dtype == schema.CATEGORY:
        return np.array([default or "" if value is None else value for value in values], dtype=object)
    unknown = -1 if dtype == "int64" else np.nan
    known = np.array([unknown if value is None else value for value in values], dtype=dtype)
    return known if default is None else np.maximum(known, default)


Series = dict[tuple[str, str], tuple[list[int], list[float]]]  # (source, metric) → times (ns), values


def samples(path: Path, source: str, begins: str = "") -> Reading:
    """Return the table "samples" of a sampler's log: every number of a line but its clocks is a metric."""
    found: Series = {}
    log = Log(path, "samples", _sample, begins)
    for lines in log:
        for at, line in lines:
            for metric, value in line.items():
                if type(value) in (int, float) and math.isfinite(value):
                    times, values = found.setdefault((source, metric), ([], []))
                    times.append(at)
                    values.append(value)
    return Reading({"samples": samples_frame(found)}, {}, log.warnings)


_decode_sample = msgspec.json.Decoder(dict[str, Any]).decode


def _sample(text: bytes) -> tuple[int, dict[str, Any]]:
    """Return when a line was read and its metrics, with what a table can hold of a host's cores."""
    row = _decode_sample(text)
    at, cores = row.pop("at_ns"), row.get("core_percent")
    row.pop("perf_ns", None)
    if type(at) is not int or not 0 <= at <= _LATEST:
        raise ValueError(at)
    if cores:
        row["cores"], row["cpu_cores"] = len(cores), sum(cores) / 100
        row["busy_cores"] = sum(core > _BUSY_PERCENT for core in cores)
        row["busiest_core_share"] = max(cores) / 100
    return at, row


def samples_frame(found: Series) -> pd.DataFrame:
    """Return the table "samples" of some series."""
    if not found:
        return schema.empty("samples")
    counts = [len(times) for times, _ in found.values()]

    def column(names: list[str]) -> Any:
        codes, categories = pd.factorize(np.array(names, dtype=object))
        return pd.Categorical.from_codes(np.repeat(codes, counts), pd.Index(categories))

    made = pd.DataFrame(
        {
            "source": column([source for source, _ in found]),
            "metric": column([metric for _, metric in found]),
            "at_ns": np.concatenate([np.array(times, dtype=np.int64) for times, _ in found.values()]),
            "value": np.concatenate([np.array(values, dtype=np.float64) for _, values in found.values()]),
        }
    )
    return schema.check("samples", made)


def read_steps(path: Path, begins: str = "") -> Reading:
    """Return the table "steps"; raises DlprofError if the file cannot be read or is no log of steps."""
    extra = {"steps": "int64", "outstanding": "int64"}
    log = rows(path, "steps", ("step", "start_ns", "dur_ns"), {"kind": "other"}, extra, begins)
    frame, warnings = _settled(log.tables["steps"]), log.warnings
    steps = np.maximum(frame["steps"].to_numpy(), 1)
    most = limits.limit(limits.MOST_ROWS)
    fit = int(np.searchsorted(np.cumsum(steps.astype(float)), most, side="right"))
    if fit < len(frame):
        warnings += (limits.too_many(path, "steps", most),)
    frame = _each(frame.drop(columns=list(extra)).head(fit), steps[:fit])
    if not len(frame):
        warnings += (f"{path.name}: holds no steps",)
    return Reading({"steps": frame}, {}, warnings)


def _settled(frame: pd.DataFrame) -> pd.DataFrame:
    """Leave out the lines that were written before a step's device time was known, where it was written again."""
    outstanding = frame["outstanding"].to_numpy() > 0
    if not outstanding.any():
        return frame
    end = (frame["start_ns"] + frame["dur_ns"]).to_numpy()
    last = end[~outstanding].max(initial=0)
    left = np.flatnonzero(~outstanding | (frame["start_ns"].to_numpy() >= last))
    return frame.take(left).reset_index(drop=True)


# A line of several steps holds the sum of these; in the rest its steps are alike.
_PARTS = ("lead_ns", "fetch_ns", "forward_ns", "backward_ns", "optimizer_ns", "device_step_ns", "unused_forward_ns")
_COUNTS = ("fetches", "forwards", "backwards", "optimizer_steps", "samples", "inputs", "tokens")
_SUMS = ("dur_ns", *_PARTS, *_COUNTS)


def _each(frame: pd.DataFrame, steps: NDArray[np.int64]) -> pd.DataFrame:
    """Return every step a row: those of one line follow each other and share its times, to the nanosecond."""
    if not len(frame) or steps.max() == 1:
        return frame
    each = frame.loc[np.repeat(np.arange(len(frame)), steps)].reset_index(drop=True)
    n = np.repeat(steps, steps)
    nth = np.arange(len(each)) - np.repeat(np.cumsum(steps) - steps, steps)

    def share(name: str) -> NDArray[np.int64]:
        total = each[name].to_numpy()
        return np.where(total < 0, total, total * (nth + 1) // n - total * nth // n)

    return each.assign(
        step=each["step"] + nth,
        start_ns=each["start_ns"] + each["dur_ns"] * nth // n,
        **{name: share(name) for name in _SUMS},
    )


# Sums of a thousand of them still fit into 64 bits.
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class _Piece(msgspec.Struct):
    role: str
    function: str
    file: str
    first: _Count
    lines: list[tuple[_Count, _Count, _Count]]  # line, hits, ns
    source: str | None = None


def read_lines(path: Path) -> Reading:
    """Return table "lines"; raises DlprofError if the file cannot be read or holds lines but no valid one."""
    hits: Counter[tuple[str, str, str, int]] = Counter()
    took: Counter[tuple[str, str, str, int]] = Counter()
    texts: dict[tuple[str, str], dict[int, str]] = {}
    log = Log(path, "lines", msgspec.json.Decoder(_Piece).decode)
    for pieces in log:
        for piece in pieces:
            if piece.source:
                numbered = dict(enumerate(piece.source.splitlines(), piece.first))
                texts.setdefault((piece.function, piece.file), numbered)
            for line, n, ns in piece.lines:
                hits[piece.role, piece.function, piece.file, line] += n
                took[piece.role, piece.function, piece.file, line] += ns
    for role, function, name in {key[:3] for key in hits}:
        for line in texts.get((function, name), ()):
            hits[role, function, name, line] += 0
    keys = sorted(key for key in hits if max(hits[key], took[key]) < 1 << 63)
    counted = [(*key, hits[key], took[key], texts.get(key[1:3], {}).get(key[3], "")) for key in keys]
    frame = pd.DataFrame(counted, columns=list(schema.LINES)).astype(dict(schema.LINES))
    return Reading({"lines": schema.check("lines", frame)}, {}, log.warnings)
