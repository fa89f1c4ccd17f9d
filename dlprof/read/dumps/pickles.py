"""Reads what both dumps of PyTorch are: pickles of plain data, and stacks in them.

A pickle is a program that may call any function. This reader knows dicts, lists, tuples, texts, bytes, numbers, truth
values and None, and implements no instruction that calls anything, so it can only refuse a hostile file. It reads a
file that is cut off up to the cut; the reader of Python cannot.

A stack is a list of dicts of function, file and line, the innermost first. It may have C++ frames between and below the
Python frames. Work on a thread of the autograd engine has only C++ frames.
"""

from __future__ import annotations

import pickletools
import re
import zlib
from pathlib import Path
from struct import Struct, error
from typing import TYPE_CHECKING, Any, NamedTuple

from dlprof import schema
from dlprof.errors import DlprofError
from dlprof.read.limits import (
    MOST_CONTAINERS,
    MOST_INTEGER,
    MOST_MARKS,
    MOST_MEMO,
    MOST_WHOLE,
    limit,
    most_unpacked,
)
from dlprof.read.opening import read_file

if TYPE_CHECKING:
    import pandas as pd

# A list of references only, like a stack. Most of a snapshot is such lists; each is made once and reused.
_REFERENCES = re.compile(rb"\](\x94?)\(((?:j[\s\S]{4}|h[\s\S]){1,2000})e(?!\()")
_REFERENCE = re.compile(rb"j([\s\S]{4})|h([\s\S])")

_I4, _U2, _U4, _U8, _F8 = Struct("<i"), Struct("<H"), Struct("<I"), Struct("<Q"), Struct(">d")

# Instructions with a text or bytes: the position of the length, and whether it is text.
_TEXTS = {0x8C: (Struct("<B"), True), 0x58: (_U4, True), 0x8D: (_U8, True), 0x55: (Struct("<B"), True)}
_BYTES = {0x43: (Struct("<B"), False), 0x42: (_U4, False), 0x8E: (_U8, False)}
_STRINGS = {**_TEXTS, **_BYTES, 0x54: (_U4, True)}

_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False}  # NONE, NEWTRUE, NEWFALSE
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_KEYS = (str, int, float, bytes, type(None))


class NotPlain(DlprofError):  # noqa: N818 - what a file is
    """The pickle holds more than plain data, or the file is no pickle; the message has the details."""


def bytes_of(path: Path) -> tuple[bytes, bool]:
    """Return what a file holds, unpacked if it is a gzip file, and whether its end is missing.

    Raises DlprofError if it cannot be read, is larger than MOST_WHOLE, or unpacks to far more than real dumps do.
    """
    raw = read_file(path, MOST_WHOLE)
    if not raw.startswith(b"\x1f\x8b"):
        return raw, False
    most = min(limit(MOST_WHOLE), most_unpacked(len(raw)))
    unpacker = zlib.decompressobj(wbits=31)
    try:
        data = unpacker.decompress(raw, most + 1 if most < 1 << 60 else 0)
    except zlib.error as e:
        raise DlprofError(f"{path}: broken gzip file ({e})") from None
    if len(data) > most:
        raise DlprofError(f"{path}: unpacks to more than {most >> 20} MB: not read (--no-limits reads it)")
    return data, not unpacker.eof


def is_pickle(start: bytes) -> bool:
    """Return whether a file begins as a pickle of protocol 2 to 5 does."""
    return len(start) > 2 and start[0] == 0x80 and 2 <= start[1] <= 5


def load(data: bytes) -> tuple[Any, bool]:
    """Return the value of a pickle of plain data, and whether its end is missing.

    A pickle that is cut off is read up to the cut. Lists with the same items may be one object. Raises NotPlain if it
    holds anything but plain data, or is no pickle.
    """
    if not is_pickle(data[:4]):
        raise NotPlain("no pickle of protocol 2 to 5")
    return _Machine(data).run()


class _Machine:
    """The state of a pickle while it is read: values on a stack, and where the open collections begin."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.containers = 0

    def run(self) -> tuple[Any, bool]:
        try:
            return self._read(), False
        except error:  # an incomplete instruction
            pass
        except IndexError:  # as well, or one that takes more than there is
            if not self.stack:
                raise NotPlain("it takes what it does not hold") from None
        except KeyError:
            raise NotPlain("it refers to what it does not hold") from None
        except (TypeError, AttributeError):
            raise NotPlain("it adds to what is no collection") from None
        return _folded(self.stack, self.marks), True

    def _read(self) -> Any:
        """Run the instructions, checking for the commonest first; return the top of the stack at STOP."""
        data, stack, memo, marks = self.data, self.stack, self.memo, self.marks
        push = stack.append
        known: dict[bytes, list[Any]] = {}
        most = limit(MOST_CONTAINERS)
        at = 2  # behind PROTO and its number
        while True:
            code = data[at]
            at += 1
            if code == 0x6A:  # LONG_BINGET
                push(memo[_U4.unpack_from(data, at)[0]])
                at += 4
            elif code == 0x68:  # BINGET
                push(memo[data[at]])
                at += 1
            elif code == 0x4B:  # BININT1
                push(data[at])
                at += 1
            elif code == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif code == 0x28:  # MARK
                marks.append(len(stack))
                if len(marks) > MOST_MARKS:
                    raise NotPlain(f"more than {MOST_MARKS} collections within each other")
            elif code == 0x75:  # SETITEMS
                _put(stack, marks.pop())
            elif code == 0x65:  # APPENDS
                mark = marks.pop()
                items = stack[mark:]
                del stack[mark:]
                stack[-1].extend(items)
            elif code == 0x5D:  # EMPTY_LIST
                self.containers += 1
                if self.containers > most:
                    raise NotPlain(f"more than {MOST_CONTAINERS:,} collections (--no-limits reads them)")
                whole = _REFERENCES.match(data, at - 1)
                if whole is None:
                    push([])
                    continue
                body = whole[2]
                made = known.get(body)
                if made is None:
                    made = known[body] = [
                        memo[_U4.unpack(far)[0] if far else near[0]] for far, near in _REFERENCE.findall(body)
                    ]
                if whole[1]:
                    memo[len(memo)] = made
                push(made)
                at = whole.end()
            elif code == 0x7D:  # EMPTY_DICT
                self.containers += 1
                push({})
            elif code == 0x8A:  # LONG1
                size = data[at]
                number = data[at + 1 : at + 1 + size]
                if size > MOST_INTEGER:
                    raise NotPlain("an integer of more than 64 bits")
                if len(number) < size:
                    raise IndexError
                push(int.from_bytes(number, "little", signed=True))
                at += 1 + size
            elif code == 0x4A:  # BININT
                push(_I4.unpack_from(data, at)[0])
                at += 4
            elif code == 0x4D:  # BININT2
                push(_U2.unpack_from(data, at)[0])
                at += 2
            elif code in _CONSTANTS:
                push(_CONSTANTS[code])
            elif code in _STRINGS:
                at = self._string(code, at)
            elif code == 0x71:  # BINPUT
                memo[data[at]] = stack[-1]
                at += 1
            elif code == 0x95:  # FRAME
                at += 8
            elif code == 0x2E:  # STOP
                if len(stack) != 1 or marks:
                    raise NotPlain("it ends amid a value")
                return stack[0]
            else:
                at = self._rarer(code, at)

    def _string(self, code: int, at: int) -> int:
        length, is_text = _STRINGS[code]
        size = length.unpack_from(self.data, at)[0]
        at += length.size
        if size > len(self.data) - at:
            raise IndexError
        piece = self.data[at : at + size]
        self.stack.append(piece.decode(errors="replace") if is_text else piece)
        return int(at + size)

    def _rarer(self, code: int, at: int) -> int:
        """Run one of the other instructions; return the position of the next one."""
        stack, marks = self.stack, self.marks
        if code == 0x72:  # LONG_BINPUT
            place = _U4.unpack_from(self.data, at)[0]
            if place > MOST_MEMO:
                raise NotPlain("it remembers too much")
            self.memo[place] = stack[-1]
            return at + 4
        if code in _TUPLES or code in (0x29, 0x74):  # TUPLE1 to TUPLE3, EMPTY_TUPLE, TUPLE
            first = marks.pop() if code == 0x74 else len(stack) - _TUPLES.get(code, 0)
            if first < 0:
                raise IndexError
            self.containers += 1
            stack[first:] = [tuple(stack[first:])]
        elif code == 0x47:  # BINFLOAT
            stack.append(_F8.unpack_from(self.data, at)[0])
            return at + 8
        elif code == 0x61:  # APPEND
            item = stack.pop()
            stack[-1].append(item)
        elif code == 0x73:  # SETITEM
            _put(stack, len(stack) - 2)
        else:
            name = next((op.name for op in pickletools.opcodes if op.code == chr(code)), f"byte {code:#04x}")
            raise NotPlain(f"more than plain data ({name})")
        return at


def _put(stack: list[Any], mark: int) -> None:
    """Put the pairs on the stack from a mark on into the dict below them."""
    items = stack[mark:]
    del stack[mark:]
    into = stack[-1]
    if type(into) is not dict or len(items) % 2:
        raise TypeError
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, _KEYS):
            raise NotPlain("a key that is no text and no number")
        into[key] = value


def _folded(stack: list[Any], marks: list[int]) -> Any:
    """Return the outermost value read before the cut, with everything that belongs into it."""
    for mark in reversed(marks):
        items = stack[mark:]
        del stack[mark:]
        into = stack[-1] if stack else None
        if isinstance(into, list):
            into.extend(items)
        elif isinstance(into, dict):
            _paired(into, items)
    return stack[0] if stack else None


def _paired(into: dict[Any, Any], items: list[Any]) -> None:
    """Put keys and values into a dict; a value behind a value was to be added to that one."""
    left = iter(items)
    key = next(left, None)
    while isinstance(key, _KEYS):
        value = next(left, into)  # none is left: itself stands for that
        if value is into:
            return
        into[key] = value
        key = next(left, None)
        while isinstance(key, (list, dict)):
            if isinstance(value, list):
                value.append(key)
            key = next(left, None)


# Files of Python itself, of installed packages, and of code that a compiler wrote.
_INSTALLED = re.compile(
    r"[/\\](site|dist)-packages[/\\]|[/\\]lib(64)?[/\\]python3[^/\\]*[/\\]|[/\\]torch[/\\](_|nn|optim|autograd|utils|"
    r"distributed|cuda|fx|ao|jit|library|overrides|functional)|[/\\]torchinductor_|^<|\.cpython-"
)
_TORCH = re.compile(r"[/\\]torch[/\\]|[/\\]torchinductor_|^<")
_PYTHON = re.compile(r"\.py$|^<(?!built-in)")
_NODE = re.compile(r"(\w+Backward\d*|AccumulateGrad)::(?:apply|operator)\b")
_ENGINE = "torch::autograd::Engine::"

MOST_FRAMES = 400
_LONGEST = 300  # characters of a function's or a file's name

NO_FRAME = ""


class Site(NamedTuple):
    """Where something was called: `line`, the user's, as "function (file:line)"; `via`, what that called in PyTorch.

    Without a line of the user's, the innermost one of a library, or "backward of NODE"; "": no frame is known.
    """

    line: str
    via: str


class Sites:
    """Finds the site of each stack, each distinct stack once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Site]] = {}  # keeps the stack alive, so that no other one gets its id

    def of(self, frames: Any) -> Site:
        """Return the site of a stack."""
        found = self._known.get(id(frames))
        if found is None:
            found = self._known[id(frames)] = frames, site_of(frames)
        return found[1]


def site_of(frames: Any) -> Site:
    """Return the site of a stack; Site("", "") if it is malformed."""
    library = inner = node = ""
    engine = False
    for frame in frames[:MOST_FRAMES] if isinstance(frames, list) else ():
        if not isinstance(frame, dict):
            continue
        name, file, line = frame.get("name"), frame.get("filename"), frame.get("line")
        if not isinstance(name, str) or not isinstance(file, str):
            continue
        if not _PYTHON.search(file[:4096]):
            if not node and (named := _NODE.search(name[:4096])):
                node = named[1]
            engine = engine or name.startswith(_ENGINE)
            continue
        place = f"{name[:_LONGEST]} ({file[-_LONGEST:]}:{line if isinstance(line, int) else 0})"
        if not _INSTALLED.search(file):
            return Site(place, inner or library)
        if not _TORCH.search(file):
            library = library or place
        inner = inner or place
    if library:
        return Site(library, inner)
    return Site(f"backward of {node or 'some node'}" if node or engine else inner, inner)


class Columns:
    """Collects the rows of a table, column by column."""

    def __init__(self, table: str) -> None:
        self.table = table
        self._rows: list[list[Any]] = [[] for _ in schema.TABLES[table]]
        self._add = [rows.append for rows in self._rows]
        self.count = 0

    def add(self, row: tuple[Any, ...]) -> None:
        """Add a row, a value for each column."""
        for add, value in zip(self._add, row, strict=True):
            add(value)
        self.count += 1

    def frame(self) -> pd.DataFrame:
        """Return the table."""
        import pandas as pd

        if not self.count:
            return schema.empty(self.table)
        columns = dict(zip(schema.TABLES[self.table], self._rows, strict=True))
        return schema.check(self.table, pd.DataFrame(columns).astype(dict(schema.TABLES[self.table])))
