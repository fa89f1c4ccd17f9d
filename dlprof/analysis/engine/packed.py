"""Frames of one rank as they travel: plain arrays by column.

A frame of a few rows takes kilobytes of its own next to its values, and a run has a hundred frames for each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

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


def together(frames: Sequence[pd.DataFrame | Packed]) -> pd.DataFrame:
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
