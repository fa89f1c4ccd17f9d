"""A log of ours as a table: one JSON object a line, appended as the job runs; the last line may be half."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import pandas as pd

from dlprof import schema
from dlprof.errors import DlprofError
from dlprof.read.kineto.json_stream import NOT_JSON
from dlprof.read.opening import lines_of, most_rows, open_file, too_many

_Told = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Measured = Annotated[int, msgspec.Meta(ge=-1, le=2**62)]


def read_log(
    path: Path,
    table: str,
    required: Collection[str],
    default: Mapping[str, str | int] | None = None,
    beside: Mapping[str, str] | None = None,
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Return a log whose lines have the table's columns as keys, in order of time, and what was lost of it.

    A line without a required column is none; of the other columns one that is left out or null is what `default` says,
    else −1, NaN for a float64 and "" for a text. The default of a number is also the least that it may be. Keys that
    the table does not declare, of a later dlprof or an older one, are passed over. A cut last line is dropped, as are
    other bad ones, with a warning. Raises DlprofError where the file cannot be read or holds lines and none of them is
    a row. `beside` are keys (name → dtype) that the lines have and the table has not: they become columns to the right
    of the table's, for the caller to take off.
    """
    declared = {**schema.TABLES[table], **(beside or {})}
    decode = msgspec.json.Decoder(_line(declared, required)).decode
    columns: dict[str, list[Any]] = {name: [] for name in declared}
    count = bad = 0
    last_is_bad = many = False
    with open_file(path) as file:
        for lines in lines_of(file):
            rows = []
            for line in lines:
                if not line.strip():
                    continue
                last_is_bad = False
                try:
                    rows.append(decode(line))
                except NOT_JSON:
                    bad += 1
                    last_is_bad = True
            many = count + len(rows) > most_rows()
            del rows[most_rows() - count :]
            count += len(rows)
            for name, dtype in declared.items():
                columns[name].append(_values([getattr(row, name) for row in rows], dtype, (default or {}).get(name)))
            if many:
                break
    if bad > 1 and not count:
        raise DlprofError(f"{path}: not a log of {table}: none of its lines is one")
    if not count:
        return schema.empty(table).assign(
            **{name: pd.Series([], dtype=dtype) for name, dtype in (beside or {}).items()}
        ), ()
    frame = pd.DataFrame(
        {
            name: pd.Categorical([text for part in columns[name] for text in part])
            if dtype == schema.CATEGORY
            else np.concatenate(columns[name])
            for name, dtype in declared.items()
        }
    )
    at = next(name for name in ("start_ns", "at_ns") if name in declared)
    frame = frame.sort_values(at, kind="stable", ignore_index=True)
    lost = bad - last_is_bad
    warnings = [f"{path.name}: {lost:,} lines are no {table} and are left out"] if lost else []
    warnings += [too_many(path, table)] if many else []
    schema.check(table, frame[list(schema.TABLES[table])])
    return frame, tuple(warnings)


def _line(declared: Mapping[str, str], required: Collection[str]) -> type[msgspec.Struct]:
    told: Mapping[str, Any] = {"int64": _Told, "float64": float, schema.CATEGORY: str}
    measured: Mapping[str, Any] = {"int64": _Measured, "float64": float, schema.CATEGORY: str}
    return msgspec.defstruct(
        "_Line",
        [
            *((name, told[declared[name]]) for name in declared if name in required),
            *((name, measured[dtype] | None, None) for name, dtype in declared.items() if name not in required),
        ],
        gc=False,
    )


def _values(values: list[Any], dtype: str, default: str | int | None) -> Any:
    if dtype == schema.CATEGORY:
        return [default or "" if value is None else value for value in values]
    unknown = -1 if dtype == "int64" else np.nan
    known = np.array([unknown if value is None else value for value in values], dtype=dtype)
    return known if default is None else np.maximum(known, default)
