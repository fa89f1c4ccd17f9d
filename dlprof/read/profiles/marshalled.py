"""Reads marshal's data of plain values, in the versions of every Python 3: what a profile of cProfile is written in.

Python's own reader trusts its input: a damaged or hostile file may crash it. This one makes numbers, texts, tuples,
lists and dicts, and nothing else, and never more than the bytes of the file hold.
"""

from __future__ import annotations

import struct
from typing import Any

_REFERENCED = 0x80
_END = object()
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
        if kind in "NTF":
            return {"N": None, "T": True, "F": False}[kind]
        if kind == "0":
            return _END
        if kind == "i":
            return self._int()
        if kind == "I":
            return int.from_bytes(self._take(8), "little", signed=True)
        if kind == "g":
            return struct.unpack("<d", self._take(8))[0]
        if kind == "f":
            return float(self._take(self._take(1)[0]))
        if kind == "l":
            return self._long()
        if kind in "uts":
            return self._take(self._int()).decode(errors="replace")
        if kind in "aA":
            return self._take(self._int()).decode("latin-1")
        if kind in "zZ":
            return self._take(self._take(1)[0]).decode("latin-1")
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
