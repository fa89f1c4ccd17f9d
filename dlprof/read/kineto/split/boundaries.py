"""Finds where a trace can be split: at boundaries between two events, in a file or in a stream of unpacked bytes.

A boundary looks like this: `}`, a comma, and an object that has a phase. Decoding proves it afterwards: from the first
event on, all bytes before it must be whole events.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import msgspec

from dlprof.read.kineto.json_stream import BLOCK, NOT_JSON, elements, repaired

WINDOW = 256 << 10  # bytes that are searched for a boundary at once
LAST = 2 << 20  # bytes after the last span, which one process decodes while the others are idle
# Objects in lists within args look like events until they are decoded. These limit the candidates that are tried, those
# without an end in the window, and the windows without a boundary, so that damaged files do not cost more.
_TRIED, _ENDLESS, _MISSED = 100, 4, 16

_BOUNDARY = re.compile(rb"\}(\s*,\s*)(?=\{\s*\")")


class _Phase(msgspec.Struct):
    ph: str


_has_phase = msgspec.json.Decoder(_Phase).decode


class Span(NamedTuple):
    """A piece of a trace, in unpacked bytes: whole events from `start` up to `stop`; `after`: where the next begins."""

    start: int
    stop: int
    after: int


def boundary(window: bytes) -> tuple[int, int] | None:
    """Return where an event ends and the next one begins, without proof; None: no boundary in these bytes."""
    endless = 0
    for found in islice(_BOUNDARY.finditer(window), _TRIED):
        _, end = next(elements(window, found.end()), (0, 0))
        endless += not end
        if endless == _ENDLESS:
            break
        try:
            _has_phase(repaired(window[found.end() : end]))
        except NOT_JSON:
            continue
        return found.start(1), found.end()
    return None


def late_boundary(held: bytes | memoryview) -> tuple[int, int] | None:
    """Return a boundary close to the end of these bytes; None if there is none."""
    begin = len(held) - LAST
    found = boundary(bytes(held[begin : begin + WINDOW])) if begin > 0 else None
    return (begin + found[0], begin + found[1]) if found else None


def spans(file: int, first: int, aim: int) -> Iterator[Span]:
    """Split an open file with its first event at `first` into spans of about `aim` bytes.

    What follows the last span is short, unless no boundary is found.
    """
    size = os.fstat(file).st_size

    def last_of(start: int) -> int:
        return size - LAST if start + 2 * LAST < size else size

    start, looked, missed = first, min(first + aim, last_of(first)), 0
    while looked + WINDOW < size and missed < _MISSED:
        found = boundary(os.pread(file, WINDOW, looked))
        if found:
            span = Span(start, looked + found[0], looked + found[1])
            yield span
            start, looked, missed = span.after, min(span.after + aim, last_of(span.after)), 0
        else:
            looked, missed = looked + WINDOW, missed + 1


def fill(memory: memoryview, held: bytes, blocks: Iterator[bytes], aim: int) -> tuple[int, tuple[int, int] | None]:
    """Copy `held` and then blocks into `memory`, until there is a boundary after the first `aim` bytes.

    Return the number of bytes, and the boundary: where an event ends and where the next one begins. It is None if
    the blocks ended before one was found, or if `memory` is full.
    """
    size, looked = len(held), aim
    memory[:size] = held
    while True:
        if size >= looked + WINDOW:
            if found := boundary(bytes(memory[looked:size])):
                return size, (looked + found[0], looked + found[1])
            looked = size - WINDOW // 2  # an event at the seam is whole in what is looked at next
        if size + BLOCK > len(memory) or not (block := next(blocks, b"")):
            return size, None
        memory[size : size + len(block)] = block
        size += len(block)
