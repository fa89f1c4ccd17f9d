"""Reads logs of one JSON object a line, appended as the job runs; the last line may be half.

Two kinds are here: rows of a table (`rows`) and samplers' readings (`samples`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import numpy as np
import pandas as pd

from dlprof import schema
from dlprof.errors import DlprofError
from dlprof.read import limits, opening
from dlprof.read.kineto.json_stream import NOT_JSON
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

    def __init__(self, path: Path, what: str, decode: Callable[[bytes], T]) -> None:
        self.path, self.what, self._decode = path, what, decode
        self.warnings: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[list[T]]:
        count = bad = 0
        last_is_bad = False
        most = limits.limit(limits.MOST_ROWS)
        with opening.open_file(self.path) as file:
            for lines in opening.lines_of(file):
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
) -> Reading:
    """Return the table of a log with the table's columns as keys of its lines; in order of time, if lines have one.

    A line without a required column is bad. Another column that is left out or null is what `default` says, else −1,
    NaN for a float64 and "" for a text. The default of a number is also the least that it may be. Keys that the table
    does not declare, of a later dlprof or an older one, are passed over. `extra` are keys (name → dtype) that become
    columns to the right of the table's, for the caller to take off.
    """
    declared = {**schema.TABLES[table], **(extra or {})}
    log = Log(path, table, msgspec.json.Decoder(_line(declared, required)).decode)
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


def samples(path: Path, source: str) -> Reading:
    """Return the table "samples" of a sampler's log: every number of a line but its clocks is a metric."""
    found: Series = {}
    log = Log(path, "samples", _sample)
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
