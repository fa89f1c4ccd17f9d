"""Frames as one Parquet file, and back: a row a value, with the measure and the column that it belongs to.

One file holds any number of frames of any columns, and whatever reads Parquet can query it: the columns are `measure`,
`column`, and of each value `integer`, `number` or `text`, and `missing`. What Parquet has no type for (tuples, lists,
None beside other values) is JSON in `text`. A footer holds the dtypes, so that frames come back as they were.
Nothing in such a file is ever run: it is numbers, text and JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis.engine import parquet
from dlprof.errors import DlprofError

_SPECS = "frames"
_READ = ("integer", "number", "text", "missing")  # which measure and column a value is of follows from the specs


class NotPlain(Exception):  # noqa: N818 - what keeps a frame from being stored
    """A value that would not come back as it is."""


@dataclass(frozen=True)
class _Values:
    """The values of one column, each in one of three arrays; `dtype` and `kind` say how they become a column again."""

    kind: str  # integer, number, text, json, masked, category
    dtype: str
    integer: NDArray[np.int64] | None = None
    number: NDArray[np.float64] | None = None
    text: NDArray[np.object_] | None = None
    missing: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(next(a for a in (self.integer, self.number, self.text) if a is not None))


def write(path: Path, frames: Mapping[str, pd.DataFrame], footer: Mapping[str, Any]) -> None:
    """Write frames, and JSON that stands beside them, into a file that is there already or not.

    Raises NotPlain where a frame would not come back as it is, and OSError.
    """
    sections: list[tuple[str, str, _Values]] = []
    specs = {name: _spec(name, frame, sections) for name, frame in frames.items()}
    lengths = [len(values) for _, _, values in sections]
    columns = {
        "measure": np.repeat(np.array([measure for measure, _, _ in sections], dtype=object), lengths),
        "column": np.repeat(np.array([column for _, column, _ in sections], dtype=object), lengths),
        "integer": _joined([v.integer for _, _, v in sections], lengths, np.int64, 0),
        "number": _joined([v.number for _, _, v in sections], lengths, np.float64, 0.0),
        "text": _joined([v.text for _, _, v in sections], lengths, np.object_, ""),
        "missing": _joined([v.missing for _, _, v in sections], lengths, np.bool_, False),
    }
    parquet.write(path, columns, {**footer, _SPECS: specs})


class Stored:
    """A file of frames; `footer` is what stands beside them. Raises DlprofError in one line where it is damaged."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = parquet.Stored(path)
        self.footer = dict(self._file.note)
        self._specs = self.footer.pop(_SPECS, None)

    def frames(self) -> dict[str, pd.DataFrame]:
        """Read the frames; raise DlprofError where they are damaged."""
        columns = self._file.columns()
        try:
            return _frames({name: columns[name] for name in _READ}, self._specs)
        except Exception as e:  # noqa: BLE001 - pandas raises anything on dtypes and labels that are nonsense
            raise DlprofError(f"{self._path}: damaged: {type(e).__name__}: {e}") from None


def _joined(parts: Sequence[NDArray[Any] | None], lengths: Sequence[int], dtype: Any, empty: Any) -> NDArray[Any]:
    whole = np.full(sum(lengths), empty, dtype=dtype)
    at = 0
    for part, length in zip(parts, lengths, strict=True):
        if part is not None:
            whole[at : at + length] = part
        at += length
    return whole


def _spec(name: str, frame: pd.DataFrame, sections: list[tuple[str, str, _Values]]) -> dict[str, Any]:
    """Add a frame's columns to the sections; return what tells how they become the frame again."""

    def add(label: str, values: Any) -> list[Any]:
        taken = _taken(values)
        sections.append((name, label, taken))
        spec: list[Any] = [label, taken.kind, taken.dtype, len(taken)]
        if taken.kind == "category":
            spec.append(add(f"{label} (categories)", values.dtype.categories.to_series()))
        return spec

    if not all(type(label) is str for label in frame.columns):
        raise NotPlain(f"{name}: a column that is named by no text")
    index = frame.index
    if type(index) is pd.RangeIndex and index.name is None:
        rows: Any = [index.start, index.stop, index.step]
    elif isinstance(index, pd.MultiIndex):
        raise NotPlain(f"{name}: an index of several levels")
    else:
        rows = [to_json(index.name), add("(index)", index.to_series())]
    columns = [add(label, frame.iloc[:, n]) for n, label in enumerate(frame.columns)]
    return {"index": rows, "columns": columns, "labels": str(frame.columns.dtype)}


def _taken(column: pd.Series[Any]) -> _Values:
    dtype, name = column.dtype, str(column.dtype)
    if isinstance(dtype, pd.CategoricalDtype):
        return _Values(
            "category", "ordered" if dtype.ordered else "", integer=column.cat.codes.to_numpy().astype(np.int64)
        )
    if isinstance(dtype, np.dtype):
        values = column.to_numpy()
        if dtype.kind in "iub":
            return _Values("integer", name, integer=values.astype(np.int64))  # the bits of an uint64 are kept
        if dtype.kind == "f" and dtype.itemsize <= 8:
            return _Values("number", name, number=values.astype(np.float64))
        if dtype.kind in "mM":
            return _Values("integer", name, integer=values.view(np.int64))
        if dtype.kind != "O":
            raise NotPlain(f"a column of dtype {name}")
        return _objects(values)
    missing = column.isna().to_numpy()
    if isinstance(dtype, pd.StringDtype):
        text = column.to_numpy(dtype=object, na_value="")
        if _is_text(text):
            return _Values("text", name, text=text, missing=missing)
    elif name in ("Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64", "boolean"):
        return _Values("masked", name, column.to_numpy(np.dtype(np.int64), na_value=0), missing=missing)
    elif name in ("Float32", "Float64"):
        return _Values("masked", name, number=column.to_numpy(np.dtype(np.float64), na_value=0), missing=missing)
    raise NotPlain(f"a column of dtype {name}")


def _objects(values: NDArray[np.object_]) -> _Values:
    if _is_text(values):
        return _Values("text", "object", text=values, missing=np.zeros(len(values), dtype=bool))
    cells = np.array([json.dumps(to_json(value)) for value in values], dtype=object)
    return _Values("json", "object", text=cells)


def _is_text(values: NDArray[np.object_]) -> bool:
    """Return whether all values are text that UTF-8 holds."""
    try:
        return all(type(value) is str and value.encode() is not None for value in values)
    except UnicodeEncodeError:
        return False


def _frames(arrays: Mapping[str, NDArray[Any]], specs: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    at = 0

    def take(spec: Sequence[Any]) -> Any:
        nonlocal at
        _, kind, dtype, length = spec[:4]
        part = {name: values[at : at + length] for name, values in arrays.items()}
        at += length
        if len(part["text"]) != length:
            raise DlprofError("fewer values than its footer says")
        if kind == "category":
            return pd.Categorical.from_codes(part["integer"], take(spec[4]), ordered=dtype == "ordered")
        return _column(kind, dtype, part)

    frames = {}
    for name, spec in specs.items():
        if len(spec["index"]) == 3:
            index: Any = pd.RangeIndex(*spec["index"])
        else:
            label, column = spec["index"]
            index = pd.Index(take(column), name=from_json(label))
        columns = [take(column) for column in spec["columns"]]
        frame = pd.DataFrame(dict(enumerate(columns)), index=pd.RangeIndex(len(index)))
        frame.index = index
        frame.columns = pd.Index([column[0] for column in spec["columns"]], dtype=spec["labels"])
        frames[name] = frame
    if at != len(arrays["text"]):
        raise DlprofError("more values than its footer says")
    return frames


def _column(kind: str, dtype: str, part: Mapping[str, NDArray[Any]]) -> Any:
    missing = part["missing"]
    if kind == "integer":
        numbers = part["integer"]
        return numbers.copy().view(dtype) if np.dtype(dtype).kind in "mM" else numbers.astype(dtype)
    if kind == "number":
        return part["number"].astype(dtype)
    if kind == "masked":
        values = part["number" if dtype.startswith("Float") else "integer"].astype(
            dtype.lower().replace("boolean", "bool")
        )
        made = pd.array(values, dtype=dtype)  # type: ignore[call-overload]
        made[missing] = pd.NA
        return made
    text = np.array(part["text"], dtype=object)
    if kind == "json":
        cells = np.empty(len(text), dtype=object)
        for n, value in enumerate(text):
            cells[n] = from_json(json.loads(value))
        return pd.Series(cells, dtype=object)  # else pandas guesses that it is text
    if dtype == "object":
        return pd.Series(text, dtype=object)
    text[missing] = None
    return pd.array(text, dtype=dtype)  # type: ignore[call-overload]


def to_json(value: Any) -> Any:
    """Return a value as JSON has it, what JSON does not have as an object that names its type; raise NotPlain."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [to_json(one) for one in value]
    if kind is dict and all(type(key) is str for key in value):
        return {"dict": {key: to_json(one) for key, one in value.items()}}
    if kind is dict:
        return {"pairs": [[to_json(key), to_json(one)] for key, one in value.items()]}
    if kind is tuple:
        return {"tuple": [to_json(one) for one in value]}
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        return {"numpy": [value.dtype.name, value.item()]}
    if value is pd.NA:
        return {"NA": None}
    raise NotPlain(f"a value of type {kind.__name__}")


def from_json(data: Any) -> Any:
    """Return the value that `to_json` made JSON of; raise DlprofError for what it did not make."""
    if isinstance(data, list):
        return [from_json(one) for one in data]
    if not isinstance(data, dict):
        return data
    ((kind, inner),) = data.items()
    if kind == "dict":
        return {key: from_json(one) for key, one in inner.items()}
    if kind == "pairs":
        return {from_json(key): from_json(one) for key, one in inner}
    if kind == "tuple":
        return tuple(from_json(one) for one in inner)
    if kind == "numpy":
        return np.dtype(inner[0]).type(inner[1])
    if kind == "NA":
        return pd.NA
    raise DlprofError(f"a value of no known type: {kind!r}")
