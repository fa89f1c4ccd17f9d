"""Reads autograd's sequence numbers of operators and backward functions, and the threads that made the latter.

The numbers show which operator a backward function belongs to. Few measures need that. So they are decoded only once a
trace names a module, or an operator with which a script may have printed something. Until then their text is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from dlprof.read.kineto.events import integers, made

# Separates the args of two events; no JSON contains it.
_APART = b"\0"

# Args with a number have this key. Operators of an optimizer often lack it, so whole groups of 64 are skipped.
_NUMBER, _GROUP = b'"Sequence number"', 64


class Made(NamedTuple):
    """Autograd's numbers of the rows that have any."""

    row: NDArray[np.int64]
    number: NDArray[np.int64]  # autograd's; −1: none
    maker: NDArray[np.int32]  # thread that made a backward function; 0: none


class _Text(NamedTuple):
    row: NDArray[np.int64]
    runs: NDArray[np.bool_]
    args: bytes


class Numbers:
    """Collects autograd's numbers from the args of operators. Picklable."""

    def __init__(self) -> None:
        self._known: list[Made] = []
        self._texts: list[_Text] = []

    def add(self, row: NDArray[np.int64], runs: NDArray[np.bool_], args: Sequence[msgspec.Raw], wanted: bool) -> None:
        """Add the args of some rows. `runs`: which rows are backward functions. `wanted`: decode them now."""
        groups = [_APART.join(args[at : at + _GROUP]) for at in range(0, len(args), _GROUP)]
        numbered = [_NUMBER in group for group in groups]
        if not any(numbered):
            return
        mine = np.repeat(numbered, _GROUP)[: len(row)]
        row, runs = row[mine], runs[mine]
        if wanted:
            self._known.append(_decoded(row, runs, list(compress(args, mine.tolist()))))
        else:
            self._texts.append(_Text(row, runs, _APART.join(compress(groups, numbered))))

    def join(self, other: Numbers, first: int) -> None:
        """Add the numbers of later rows; row 0 of `other` becomes row `first`."""
        self._known += [one._replace(row=one.row + first) for one in other._known]
        self._texts += [one._replace(row=one.row + first) for one in other._texts]

    def end(self, wanted: bool) -> Made:
        """Return the numbers; texts are decoded only if `wanted`."""
        for row, runs, text in self._texts if wanted else ():
            args = [msgspec.Raw(one) for one in text.split(_APART)]
            if len(args) == len(row):  # else they were no JSON
                self._known.append(_decoded(row, runs, args))
        self._texts.clear()
        none = Made(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int32))
        parts: Any = zip(none, *self._known, strict=True)
        return Made(*map(np.concatenate, parts))


def _decoded(row: NDArray[np.int64], runs: NDArray[np.bool_], args: Sequence[msgspec.Raw]) -> Made:
    numbers = made(args)
    number, maker = integers([one.number for one in numbers]), np.zeros(len(row), dtype=np.int32)
    threads = integers([one.thread for one in compress(numbers, runs.tolist())])
    maker[runs] = np.where(threads < 2**31, np.maximum(threads, 0), 0)
    known = (number >= 0) | (maker > 0)
    return Made(row[known], number[known], maker[known])
