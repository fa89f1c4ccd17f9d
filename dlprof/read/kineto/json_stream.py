"""Reads a trace file as a stream of lists of events: unpacked, cut at event boundaries, decoded, and never held whole.

A file may be gigabytes of JSON, may be cut off anywhere, and may hold bytes that JSON forbids. Events are decoded in
chunks of a few megabytes. A chunk ends at `}`, a comma and `{`. Decoding proves that this is the end of an event, and
not in a text or a nested object: only then is what comes before it a JSON array. If that fails, brackets are counted.
Everything before a cut is used.
"""

from __future__ import annotations

import importlib
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import msgspec

from dlprof.errors import DlprofError
from dlprof.read.limits import MOST_UNPACKED, limited, most_unpacked
from dlprof.read.opening import open_file

try:
    _inflate: Any = importlib.import_module("isal.isal_zlib")
except ImportError:  # no wheel for this machine: the standard library's is slower, with the same results
    _inflate = zlib

# What a gzip of a trace holds, in its own bytes (seen on real traces).
BYTES_PER_GZIP_BYTE = 15

CHUNK = 1 << 20  # fits into a processor's cache with its events: a fifth faster than 4 MB
LONGEST = 16 << 20  # a larger value counts as damage, like one nested too deep for JSON decoders
DEEPEST = 1000
_GZIP = b"\x1f\x8b"  # the first bytes of a gzip file
_PACKED = 64 << 10  # bytes of a packed file read at once
BLOCK = 1 << 20
# How many boundaries are tried as the end of a chunk, and how far before its end they may be.
_TRIED = 3
_WINDOWS = (4 << 10, 64 << 10)

_OPEN, _CLOSE = b"[]"
_END = -1
_CUT_OUTSIDE = "the file is cut off or damaged outside its events"

NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*("?)|[][{}]', re.DOTALL)
_KEY = re.compile(rb'[\s,]*"([^"\\]*(?:\\.[^"\\]*)*)"\s*:\s*', re.DOTALL)
_SCALAR = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[^\s,\]}"[{]+(?=\s*[,}\]])', re.DOTALL)
_BOUNDARY = re.compile(rb"\}\s*,\s*(?=\{)")
_SPACE = re.compile(rb"[\s,]*")

E = TypeVar("E")


def unpacked_bytes(path: Path) -> int:
    """Return the estimated bytes of a file's JSON; 0 if there is no file."""
    try:
        return path.stat().st_size * (BYTES_PER_GZIP_BYTE if path.suffix == ".gz" else 1)
    except OSError:
        return 0


class TraceFile(Generic[E]):
    """One file being read. `decode` turns the bytes of a JSON array into a list of events, or raises one of NOT_JSON.

    `keys`: the keys next to the events; complete when `events` has ended. `cut`: where the file is cut off; "": it is
    not. `unreadable`: how many events could not be decoded.
    """

    def __init__(self, path: Path, decode: Callable[[bytes | memoryview], list[E]], limit: int | None = None) -> None:
        self.path = path
        self.keys: dict[str, Any] = {}
        self.cut = ""
        self.unreadable = 0
        self.is_list = False
        self._decode = decode
        self._repair = False
        self._buffer = bytearray()
        self._ended = False
        self.is_packed = False
        self.stops = ""  # why the packed bytes end before the file does
        self._limit = limit
        self._taken = 0
        self.blocks = self.unpacked()

    def header(self) -> bool:
        """Read up to the first event. Return False if the file ends earlier; raise DlprofError if it is no trace."""
        self._fill(BLOCK)
        self._drop(3 if self._buffer.startswith(b"\xef\xbb\xbf") else 0)
        self._drop(_SPACE.match(self._buffer).end())  # type: ignore[union-attr]
        if not self._buffer:
            raise self._error(self.stops or "the file is empty")
        self.is_list = self._buffer.startswith(b"[")
        if not self._buffer.startswith((b"[", b"{")):
            raise self._error("not JSON")
        self._drop(1)
        return self.is_list or self._to_array()

    def events(self) -> Iterator[list[E]]:
        """Return the events in their order, some thousands at a time; call `header` before."""
        yield from self._array()
        # Keys may also follow the events; in concatenated files, further events do.
        while not self.cut and not self.is_list and self._to_array():
            yield from self._array()
        if self.cut and self.stops:
            self.cut = self.stops

    def go_on(self, blocks: Iterator[bytes], stops: str = "") -> None:
        """Continue with these blocks, which begin with an event. `stops`: why they end before the file does."""
        self._buffer, self.blocks, self._ended, self.stops = bytearray(), blocks, False, stops

    @property
    def buffered(self) -> bytes:
        """The bytes that were read and not yet decoded."""
        return bytes(self._buffer)

    @property
    def position(self) -> int:
        """The number of unpacked bytes before the first event; valid right after `header`."""
        return self._taken - len(self._buffer)

    @property
    def is_through(self) -> bool:
        """Whether `events` took every byte, and each belongs to the array and its end."""
        self._fill(1)
        return not self.cut and not self._buffer

    def _error(self, what: str) -> DlprofError:
        return DlprofError(f"{self.path}: {what}")

    def unpacked(self, start: int = 0) -> Iterator[bytes]:
        """Yield the file's bytes from there on, unpacked, in blocks."""
        with open_file(self.path) as file:
            magic = file.read(2)
            file.seek(0)
            self.is_packed = magic == _GZIP
            if self.is_packed:
                passed = 0
                for block in self._gunzipped(file):
                    if passed + len(block) > start:
                        yield block[max(start - passed, 0) :]
                    passed += len(block)
            elif self.path.suffix == ".gz" and magic:
                raise self._error(
                    "named .gz but not gzip; a file that was unpacked on its way here is to be named .json"
                )
            else:
                file.seek(start)
                while block := file.read(min(BLOCK, self._limit or BLOCK)):
                    yield block

    def _gunzipped(self, file: BinaryIO) -> Iterator[bytes]:
        unpacker = _inflate.decompressobj(wbits=31)
        left = most_unpacked(os.fstat(file.fileno()).st_size)
        packed = file.read(_PACKED)
        try:
            while packed:
                if block := unpacker.decompress(packed, BLOCK):
                    yield block
                    left -= len(block)
                if left < 0:
                    self.stops = f"it unpacks to more than {MOST_UNPACKED} times its size (--no-limits reads all)"
                    return
                if not unpacker.eof:
                    packed = unpacker.unconsumed_tail or file.read(_PACKED)
                    continue
                # gzip files may be concatenated; some writers pad the last one with zeros.
                packed = (unpacker.unused_data + file.read(_PACKED)).lstrip(b"\0")
                if packed and not packed.startswith(_GZIP):
                    self.stops = "something that is not gzip follows the packed data"
                    return
                if packed:
                    unpacker = _inflate.decompressobj(wbits=31)
            if not unpacker.eof:
                if block := unpacker.flush():
                    yield block
                if not unpacker.eof:
                    self.stops = "the gzip file is cut off"
        except (zlib.error, _inflate.error):
            self.stops = "the gzip data are damaged"

    def _fill(self, size: int, before: bytes = b"") -> None:
        """Buffer at least so many bytes, or all that are left. `before`: put before them if they are events."""
        if self._limit is not None:
            size = min(size, self._limit)
        held = len(self._buffer)
        if (held >= size or self._ended) and not before:
            return
        parts: list[bytes | bytearray] = [before, self._buffer]
        while held < size and not self._ended:
            block = next(self.blocks, b"")
            self._ended = not block
            parts.append(block)
            held += len(block)
            self._taken += len(block)
        self._buffer = bytearray().join(parts)
        if self._limit is not None:
            self._buffer = self._buffer[: self._limit]
            self._ended = True

    def _drop(self, count: int) -> None:
        try:
            del self._buffer[:count]
        except BufferError:  # decoded events refer to it
            self._buffer = self._buffer[count:]

    def _more(self) -> bool:
        """Double the buffered bytes; return False if there are no more, or too many are buffered."""
        before = len(self._buffer)
        if self._ended or (before >= LONGEST and limited()):
            return False
        self._fill(2 * max(before, BLOCK))
        return len(self._buffer) > before

    def _to_array(self) -> bool:
        """Read keys and values up to and into the array of events; return False if the object or the file ends."""
        while True:
            self._fill(BLOCK)
            key = _KEY.match(self._buffer)
            if not key:
                rest = self._buffer[_SPACE.match(self._buffer).end() :]  # type: ignore[union-attr]
                if rest[:1] == b"}":
                    return False
                if rest and rest[:1] != b'"' and not self.keys:
                    raise self._error("not JSON")
                if not self._more():
                    self.cut = _CUT_OUTSIDE
                    return False
                continue
            name = key[1].decode(errors="replace")
            self._drop(key.end())
            if name == "traceEvents":
                self._fill(BLOCK)
                if self._buffer[:1] == b"[":
                    self._drop(1)
                    return True
                if self._buffer:
                    raise self._error("not a trace: its traceEvents are not a list")
            value = self._value()
            if value is None:
                self.cut = _CUT_OUTSIDE
                return False
            self.keys[name] = plain(repaired(value))

    def _value(self) -> bytes | None:
        """Skip one value and return its bytes; None if it has no end."""
        while True:
            if self._buffer.startswith((b"{", b"[")):
                _, end = next(elements(self._buffer), (0, 0))
            else:
                scalar = _SCALAR.match(self._buffer)
                end = scalar.end() if scalar else 0
            if end:
                value = bytes(self._buffer[:end])
                self._drop(end)
                return value
            if not self._more():
                return None

    def _array(self) -> Iterator[list[E]]:
        """Yield the events of the array that begins here, and skip its end."""
        while True:
            self._fill(CHUNK, b" ")
            split = self._split()
            if split is not None:
                yield split
                continue
            found = list(elements(self._buffer))
            closed = bool(found) and found[-1][0] == _END
            end = found[-1][1] if found else 0
            if closed:
                found.pop()
            if found:
                yield self._decoded(found)
            self._drop(end)
            if closed:
                return
            if not found and not self._more():
                self.cut = "the file is cut off or damaged within its events"
                return

    def _split(self) -> list[E] | None:
        """Decode up to the last boundary between two events and drop these bytes; None if no boundary can be proved."""
        buffer = self._buffer
        candidates: list[tuple[int, int]] = []
        for window in _WINDOWS:
            matches = _BOUNDARY.finditer(buffer, max(len(buffer) - window, 0))
            candidates = [(m.start() + 1, m.end()) for m in matches][: -_TRIED - 1 : -1]
            if len(candidates) == _TRIED:
                break
        for repair in (True,) if self._repair else (False, True):
            for end, following in candidates:
                # The array's brackets overwrite the bytes around the events: copying would take longer.
                around, buffer[0], buffer[end] = (buffer[0], buffer[end]), _OPEN, _CLOSE
                array = memoryview(buffer)[: end + 1]
                events = self._try(repaired(bytes(array)) if repair else array)
                buffer[0], buffer[end] = around
                if events is not None:
                    self._repair = repair
                    self._drop(following)
                    return events
        return None

    def _decoded(self, found: list[tuple[int, int]]) -> list[E]:
        """Decode elements known by their brackets, joined if that works, else one by one without the bad ones."""
        joined = b"[" + b",".join(self._buffer[a:b] for a, b in found) + b"]"
        events = self._try(joined) or self._try(repaired(joined))
        if events is not None:
            return events
        alone = [self._try(repaired(b"[" + self._buffer[a:b] + b"]")) for a, b in found]
        self.unreadable += alone.count(None)
        return [event for one in alone if one is not None for event in one]

    def _try(self, array: bytes | memoryview) -> list[E] | None:
        try:
            return self._decode(array)
        except NOT_JSON:
            return None


def elements(buffer: bytes | bytearray, start: int = 0) -> Iterator[tuple[int, int]]:
    """Find the bracketed elements of an array's inside; where the array is closed, the last is (_END, its end)."""
    depth = begin = 0
    for token in _TOKEN.finditer(buffer, start):
        sign = token[0]
        if sign in b"{[":
            begin = begin if depth else token.start()
            depth += 1
            if depth > DEEPEST:
                return
        elif sign in b"}]":
            if not depth:
                yield _END, token.end()
                return
            depth -= 1
            if not depth:
                yield begin, token.end()
        elif not token[1]:  # a text that has no end here
            return


def plain(raw: Any) -> Any:
    """Return the value of a piece of JSON; None if it is invalid."""
    try:
        return msgspec.json.decode(raw)
    except NOT_JSON:
        return None


_CONTROL = bytes(range(32))
_SPACES = bytes.maketrans(_CONTROL, b" " * 32)
_NO_NUMBER = re.compile(rb"[:\[,]\s*[-+]?(?:nan(?:\([^)]*\))?|inf(?:inity)?)\s*[,}\]]", re.I)
_TEXT_OR_NO_NUMBER = re.compile(
    rb'("[^"\\]*(?:\\.[^"\\]*)*")|[-+]?\b(?:nan(?:\([^)]*\))?|inf(?:inity)?)(?![\w.])', re.I | re.DOTALL
)
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|u[0-9a-fA-F]{4}"
    rb'|["\\/bfnrt]|())'
)


def _escape(found: re.Match[bytes]) -> bytes:
    if found[1]:  # half of a surrogate pair
        return b"\\ufffd"
    return found[0] if found[2] is None else b"\\\\"


def repaired(array: bytes) -> bytes:
    """Return the same JSON with what writers put into it and JSON forbids made harmless; its structure stays as it was.

    Control characters become spaces, invalid UTF-8 the replacement character, NaN and Infinity null, stray backslashes
    themselves.
    """
    array = array.translate(_SPACES)
    try:
        array.decode()
    except UnicodeDecodeError:
        array = array.decode(errors="replace").encode()
    if b"\\" in array:
        array = _ESCAPE.sub(_escape, array)
    if _NO_NUMBER.search(array):
        array = _TEXT_OR_NO_NUMBER.sub(lambda found: found[1] or b"null", array)
    return array
