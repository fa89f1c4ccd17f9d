"""Reads what `python -m cProfile -o FILE` and Profile.dump_stats write: each function's calls and times, by caller.

Such a file knows who calls whom and no stacks. The stacks made of it divide a function's time among its callers, and
below each of them as it is divided on the whole: an estimate, where a function behaves otherwise for another caller.

Reads marshal's data of plain values, in the versions of every Python 3: what a profile of cProfile is written in.

Python's own reader trusts its input: a damaged or hostile file may crash it. This one makes numbers, texts, tuples,
lists and dicts, and nothing else, and never more than the bytes of the file hold.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

from dlprof import schema
from dlprof.errors import DlprofError
from dlprof.read.formats import Format, beginning
from dlprof.read.kineto.patterns import rank_in
from dlprof.read.opening import read_file
from dlprof.read.profiles.frames import MOST_TEXT, Frame, Stacks, placed_file
from dlprof.read.sources import Reading

_SECOND = 1e9
_LONGEST_S = 1e9

# Branches with less of the time than this, and deeper ones, end in their caller.
_LEAST_SHARE = 1e-4
_MOST_DEPTH = 60
_MOST_STACKS = 20_000


class _Call(NamedTuple):
    calls: int
    own_s: float
    total_s: float


class _Function(NamedTuple):
    call: _Call
    callers: dict[Frame, _Call]


def begins(head: bytes) -> bool:
    """Return whether a file begins with a dict in marshal format, with a first key of file, line and name."""
    if len(head) < 8 or head[0] & 0x7F != ord("{"):
        return False
    small = head[1] & 0x7F == ord(")") and head[2] == 3
    return small or (head[1] & 0x7F == ord("(") and head[2:6] == b"\3\0\0\0")


def read(path: Path, piece: str = "") -> Reading:  # noqa: ARG001 - one piece is all of it
    """Return tables "functions" and "stacks"; raises DlprofError if the file is no such profile, or is cut off."""
    import pandas as pd

    try:
        data = loads(read_file(path))
    except DamagedError as e:
        raise DlprofError(f"{path}: not a whole profile of cProfile: {e}") from None
    functions, bad = _functions(data)
    if not functions:
        raise DlprofError(f"{path}: not a profile of cProfile: it holds no function")
    rows = [
        (
            path.name,
            name,
            placed_file(file),
            line,
            f.call.calls,
            round(f.call.own_s * _SECOND),
            round(f.call.total_s * _SECOND),
        )
        for (name, file, line), f in functions.items()
    ]
    table = pd.DataFrame(sorted(rows), columns=list(schema.FUNCTIONS)).astype(dict(schema.FUNCTIONS))
    stacks = Stacks(path, "cProfile", "ns", phases=False)
    _divide(functions, stacks)
    whole = sum(f.call.own_s for f in functions.values())
    facts = {"total": round(whole * _SECOND)}
    if not len(stacks):
        raise DlprofError(f"{path}: a profile of cProfile in which nothing took any time")
    return stacks.reading(bad, facts, {"functions": schema.check("functions", table)})


def _functions(data: Any) -> tuple[dict[Frame, _Function], int]:
    """Return what is sound of a profile, and how many entries are not."""
    functions: dict[Frame, _Function] = {}
    bad = 0
    for key, value in data.items() if isinstance(data, dict) else ():
        name = _name(key)
        sound = isinstance(value, tuple) and len(value) == 5 and isinstance(value[4], dict)
        call = _call(value[1], value[2], value[3]) if sound else None
        if name is None or call is None:
            bad += 1
            continue
        callers = {}
        for caller, of in value[4].items():
            by = _name(caller)
            if type(of) is int:
                # Python's old profiler, in Python, counts the calls alone: their times then are as the calls.
                share = of / max(call.calls, 1)
                edge: _Call | None = _Call(1, call.own_s * share, call.total_s * share)
            else:
                edge = _call(of[0], of[2], of[3]) if isinstance(of, tuple) and len(of) == 4 else None
            if by is not None and edge is not None:
                callers[by] = edge
        functions[name] = _Function(call, callers)
    return functions, bad


def _name(key: Any) -> Frame | None:
    if not (isinstance(key, tuple) and len(key) == 3):
        return None
    file, line, name = key
    if not (isinstance(file, str) and type(line) is int and isinstance(name, str)):
        return None
    file = "<built-in>" if file == "~" else file
    return name[:MOST_TEXT], file[:MOST_TEXT], max(line, 0)


def _call(calls: Any, own: Any, total: Any) -> _Call | None:
    numbers = (calls, own, total)
    if any(type(n) not in (int, float) or not math.isfinite(n) or not -1 < n < _LONGEST_S * 1e3 for n in numbers):
        return None
    return _Call(int(calls), max(float(own), 0.0), max(float(total), 0.0))


def _divide(functions: dict[Frame, _Function], stacks: Stacks) -> None:
    """Add the stacks: from functions without a caller, down to where little time is left."""
    called: dict[Frame, list[tuple[Frame, _Call]]] = {}
    for name, function in functions.items():
        for caller, edge in function.callers.items():
            called.setdefault(caller, []).append((name, edge))
    least = _LEAST_SHARE * sum(f.call.own_s for f in functions.values())
    todo: list[tuple[tuple[Frame, ...], float, float]] = []
    for name, function in functions.items():
        by_others = sum(
            edge.total_s for caller, edge in function.callers.items() if caller != name and caller in functions
        )
        alone = function.call.total_s - by_others
        if alone > max(least, 1e-3 * function.call.total_s):
            todo.append(((name,), alone, function.call.own_s * min(alone / function.call.total_s, 1.0)))
    while todo and len(stacks) < _MOST_STACKS:
        path, total, own = todo.pop()
        here = functions[path[-1]]
        scale = min(total / here.call.total_s, 1.0) if here.call.total_s > 0 else 0.0
        for name, edge in called.get(path[-1], ()):
            part = edge.total_s * scale
            if name in path or part < least or len(path) >= _MOST_DEPTH:
                own += edge.own_s * scale if name != path[-1] else 0.0
                continue
            todo.append(((*path, name), part, edge.own_s * scale))
        stacks.add("", path, round(own * _SECOND))


FORMAT = Format(
    name="cprofile",
    title="profile of cProfile",
    recognised="marshal data whose keys are a file, a line and a name",
    recognise=beginning(begins, rank_in),
    read=read,
    tables=("functions", "stacks"),
    brings="each function's calls and times; a flame graph, estimated from who calls whom",
    record="python -m cProfile -o profile.prof train.py",
)

_REFERENCED = 0x80

_END = object()
_PLAIN = {"N": None, "T": True, "F": False, "0": _END}
_NUMBERS = {"i": "<i", "I": "<q", "g": "<d"}
_TEXTS = {**dict.fromkeys("uts", "utf-8"), **dict.fromkeys("aA", "latin-1")}
_DEEPEST = 50


class DamagedError(Exception):
    """The bytes are not marshal's, or hold something else than plain data."""


def loads(data: bytes) -> Any:
    """Return the value that the bytes hold; raise DamagedError where they are no such data."""
    reader = _Reader(data)
    try:
        return reader.value(0)
    except (struct.error, IndexError, TypeError, ValueError, OverflowError, RecursionError) as e:
        raise DamagedError(str(e)[:120]) from None


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self._seen: list[Any] = []

    def _take(self, size: int) -> bytes:
        if size < 0 or self._at + size > len(self._data):
            raise DamagedError("cut off")
        self._at += size
        return self._data[self._at - size : self._at]

    def _int(self) -> int:
        return int.from_bytes(self._take(4), "little", signed=True)

    def value(self, depth: int) -> Any:
        """Return the next value; _END at the end of a dict."""
        if depth > _DEEPEST:
            raise DamagedError("nested too deep")
        code = self._take(1)[0]
        kind, place = chr(code & ~_REFERENCED), -1
        if code & _REFERENCED:
            place = len(self._seen)
            self._seen.append(None)
        made = self._made(kind, depth)
        if place >= 0:
            self._seen[place] = made
        return made

    def _made(self, kind: str, depth: int) -> Any:
        if kind in _PLAIN:
            return _PLAIN[kind]
        if kind in _TEXTS:
            return self._take(self._int()).decode(_TEXTS[kind], errors="replace")
        if kind in _NUMBERS:
            (number,) = struct.unpack(_NUMBERS[kind], self._take(struct.calcsize(_NUMBERS[kind])))
            return number
        if kind in "fzZ":
            text = self._take(self._take(1)[0])
            return float(text) if kind == "f" else text.decode("latin-1")
        if kind == "l":
            return self._long()
        if kind == "r":
            return self._seen[self._int()]
        if kind in "()[":
            size = self._take(1)[0] if kind == ")" else self._int()
            if size > len(self._data) - self._at:
                raise DamagedError("cut off")
            parts = [self.value(depth + 1) for _ in range(size)]
            return parts if kind == "[" else tuple(parts)
        if kind == "{":
            return self._dict(depth)
        raise DamagedError(f"a value of type {kind!r}")

    def _long(self) -> int:
        size = self._int()
        if abs(size) > 10:
            raise DamagedError("a number that no count or time is")
        digits = [int.from_bytes(self._take(2), "little") for _ in range(abs(size))]
        value = sum(digit << (15 * n) for n, digit in enumerate(digits))
        return -value if size < 0 else value

    def _dict(self, depth: int) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        while (key := self.value(depth + 1)) is not _END:
            made[key] = self.value(depth + 1)
        return made
