"""Reads the times of lines that line_profiler took: kernprof's .lprof, and the text that it prints.

A .lprof is a pickle, which may name any function of Python's to be called. Here it may name one class, line_profiler's
own LineStats, and gets an empty one in its place; whatever else it names is refused.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dlprof import schema
from dlprof.errors import DlprofError
from dlprof.read.formats import Format, beginning
from dlprof.read.kineto.patterns import rank_in
from dlprof.read.limits import MOST_LISTED, limit
from dlprof.read.opening import read_file
from dlprof.read.sources import Reading

_MODULES = ("line_profiler.line_profiler", "line_profiler._line_profiler", "line_profiler", "_line_profiler")
_CLASS = "LineStats"
_MOST_TEXT = 300
_LONGEST_NS = 1 << 62

# What reading a damaged pickle raises.
_DAMAGED = (
    *(pickle.UnpicklingError, ValueError, TypeError, EOFError, IndexError, KeyError, AttributeError),
    *(OverflowError, MemoryError, RecursionError, struct.error, ImportError),
)

_UNIT = re.compile(r"Timer unit: ([0-9.eE+-]+) s")
_FILE = re.compile(r"File: (.*)")
_FUNCTION = re.compile(r"Function: (.*) at line (\d{1,9})")
_ROW = re.compile(r" *(\d{1,9}) +(\d{1,18}) +([0-9.eE+]+) +[0-9.eE+]+ +[0-9.eE+]+(?: {2}(.*))?")
_NEVER = re.compile(r" *(\d{1,9})(?: {2,}(.*))?")

_Row = tuple[str, str, int, int, float, str]  # function, file, line, hits, ns, source


def begins(head: bytes) -> bool:
    """Return whether a file begins as a pickle that names LineStats, or as line_profiler's text."""
    if head[:1] in (b"\x80", b"c"):
        return b"line_profiler" in head[:200] and _CLASS.encode() in head[:200]
    return b"Timer unit:" in head and (b"Total time:" in head or b"Line #" in head)


def read(path: Path, piece: str = "") -> Reading:  # noqa: ARG001 - one piece is all of it
    """Return the table "lines"; raises DlprofError if the file cannot be read or holds no line."""
    import pandas as pd

    data = read_file(path)
    rows = _of_pickle(path, data) if data[:1] in (b"\x80", b"c") else _of_text(data.decode(errors="replace"))
    taken: Counter[tuple[str, str, int]] = Counter()
    hits: Counter[tuple[str, str, int]] = Counter()
    source: dict[tuple[str, str, int], str] = {}
    for function, file, line, times, ns, text in rows:
        key = (function[:_MOST_TEXT], file[:_MOST_TEXT], line)
        if key not in source and len(source) >= limit(MOST_LISTED):
            break
        source[key] = text[:_MOST_TEXT]
        hits[key] = min(hits[key] + times, _LONGEST_NS)
        taken[key] = min(taken[key] + round(ns), _LONGEST_NS)
    if not any(hits.values()):
        raise DlprofError(f"{path}: no line of line_profiler in it that ran")
    table = [("main", *key, hits[key], taken[key], source[key]) for key in sorted(source)]
    frame = pd.DataFrame(table, columns=list(schema.LINES)).astype(dict(schema.LINES))
    facts = {f"profile {path.name}": {"tool": "line_profiler", "unit": "ns"}}
    return Reading({"lines": schema.check("lines", frame)}, facts)


class _Unpickler(pickle._Unpickler):
    """Python's own reader in Python: a number in the file is never the size of what it allocates."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        # A class for this file alone: whatever the file sets on it is gone with it.
        self._stats = type(_CLASS, (), {})

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in of LineStats; raise where the file names anything else."""
        if module in _MODULES and name == _CLASS:
            return self._stats
        raise pickle.UnpicklingError(f"it names {module[:60]}.{name[:60]}, which no file of line_profiler does")

    def get_extension(self, code: int) -> Any:
        """Refuse names that are registered under a number."""
        raise pickle.UnpicklingError(f"it names something under the number {code}")


def _of_pickle(path: Path, data: bytes) -> Iterator[_Row]:
    try:
        stats = _Unpickler(data).load()
        state = dict(vars(stats))
    except _DAMAGED as e:
        raise DlprofError(f"{path}: not a whole .lprof of line_profiler: {str(e)[:200]}") from None
    unit, timings = state.get("unit"), state.get("timings")
    if type(unit) is not float or not 0 < unit <= 1 or not isinstance(timings, dict):
        raise DlprofError(f"{path}: not a .lprof of line_profiler: it has no timings and unit")
    for key, lines in timings.items():
        if not (isinstance(key, tuple) and len(key) == 3 and isinstance(lines, list)):
            continue
        file, _, function = key
        for line in lines if isinstance(file, str) and isinstance(function, str) else ():
            if isinstance(line, tuple) and len(line) == 3 and all(type(n) is int and 0 <= n < 1 << 53 for n in line):
                yield function, file, line[0], line[1], line[2] * unit * 1e9, ""


def _of_text(text: str) -> Iterator[_Row]:
    """Return the lines of what line_profiler prints, in whatever unit it prints them."""
    unit, file, function, begin = 1e-6, "", "", -1
    for line in text.splitlines():
        if found := _UNIT.match(line):
            unit = _float(found[1], unit)
        elif found := _FILE.fullmatch(line):
            file, begin = found[1], -1
        elif found := _FUNCTION.fullmatch(line):
            function, begin = found[1], -1
        elif line.startswith("Line #"):
            begin = line.find("Line Contents")
        elif begin >= 0 and (found := _ROW.fullmatch(line)):
            yield function, file, int(found[1]), int(found[2]), _float(found[3], 0.0) * unit * 1e9, line[begin:]
        elif begin >= 0 and (found := _NEVER.fullmatch(line)):
            yield function, file, int(found[1]), 0, 0.0, line[begin:]


def _float(text: str, otherwise: float) -> float:
    try:
        value = float(text)
    except ValueError:
        return otherwise
    return value if math.isfinite(value) and 0 <= value < 1e15 else otherwise


FORMAT = Format(
    name="line_profiler",
    title="times of lines of line_profiler",
    recognised="a pickle of line_profiler's LineStats; or text with `Timer unit:`",
    recognise=beginning(begins, rank_in),
    read=read,
    tables=("lines",),
    brings="the time of each line of the functions that were chosen",
    record="kernprof -l train.py, with @profile on the functions",
)
