"""Finds the user's line that a call comes from: the innermost frame that is not Python's, a package's or dlprof's."""

from __future__ import annotations

import functools
import hashlib
import linecache
import os
import re
import stat
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

from dlprof import redaction

MOST_FRAMES = 64  # that are walked: a script deeper in libraries is not named
MOST_FILE_BYTES = 2 << 20
MOST_SOURCE = 300  # characters of a call's text
_MOST_LINES = 12


_OURS = __file__.rpartition("record/")[0]  # as co_filename is written


@dataclass(frozen=True)
class Place:
    """A call in the user's code. `file` is relative to the working directory if it is below it.

    `end_line`, `column`, `end_column`: the last line and the columns of the call's text, in bytes of UTF-8; 0: unknown.
    `source`: what is kept of that text. `digest`: SHA-256 of the whole file; "": unknown. `via`: the function of a
    library that made the call for the user's line; "": that line made it.
    """

    file: str
    line: int
    function: str
    end_line: int = 0
    column: int = 0
    end_column: int = 0
    source: str = ""
    digest: str = ""
    via: str = ""


class Frames:
    """Finds the user's frame below a call, and names it.

    `directory`: the one that files are named from, with its slash. `since`: when the process had not yet imported most
    of its files (Unix time, s): one that was written later may not be what it runs.
    """

    def __init__(self, directory: str, since: float) -> None:
        self._here = directory
        self._since = since
        self._is_own = own_files()
        self._read: dict[str, tuple[str, list[bytes]]] = {}  # file → its digest and lines

    def forget_sources(self) -> None:
        """Drop the text of the files, which is read anew where another call is seen."""
        self._read.clear()

    def find(self, frame: FrameType | None) -> tuple[FrameType | None, FrameType | None]:
        """Return the innermost frame of the user's at or below this one, and the innermost of a library above it."""
        library = None
        for _ in range(MOST_FRAMES):
            if frame is None:
                break
            file = frame.f_code.co_filename
            if self._is_own(file):
                return (None, None) if _is_compiled(frame) else (frame, library)
            if "/torch/_dynamo/symbolic_convert.py" in file:
                break  # a call that is read, and not made
            if library is None and "-packages/" in file and "/torch/" not in file and not file.startswith(_OURS):
                library = frame
            frame = frame.f_back
        return None, None

    def calls_module(self, frame: FrameType | None) -> bool:
        """Return whether the user's line below a frame of ours calls the module itself, with no function between."""
        while frame is not None and (
            (file := frame.f_code.co_filename).startswith(_OURS) or file.endswith("/torch/nn/modules/module.py")
        ):
            frame = frame.f_back
        return frame is not None and self._is_own(frame.f_code.co_filename)

    def place(self, frame: FrameType, library: FrameType | None = None, *, is_call: bool = True) -> Place:
        """Return where a frame of the user's is now; `is_call`: in a call, and not in the first line of a loop."""
        code = frame.f_code
        line, end_line, column, end_column = _position(frame) if is_call else (frame.f_lineno, 0, 0, 0)
        path = os.path.join(self._here, code.co_filename)  # noqa: PTH118
        digest, lines = self._source(path)
        if not lines and code.co_filename in linecache.cache:  # of a cell of a notebook, which is no file
            lines, end_line = _kept("".join(linecache.getlines(code.co_filename))), line
        text = b"".join(lines[line - 1 : min(max(line, end_line), line + _MOST_LINES)]).decode()
        return Place(
            file=path.removeprefix(self._here),
            line=line,
            function=getattr(code, "co_qualname", code.co_name).replace(".<locals>", ""),
            end_line=end_line,
            column=column,
            end_column=end_column,
            source=" ".join(text.split())[:MOST_SOURCE],
            digest=digest,
            via=_library(library) if library is not None else "",
        )

    def written(self, path: str, pattern: str) -> list[Place]:
        """Return the lines of a file that match a regular expression, comments aside."""
        path = os.path.join(self._here, path)  # noqa: PTH118
        digest, lines = self._source(path)
        # What is kept of them lacks strings.
        whole = Path(path).read_text(errors="replace").splitlines() if lines else []
        return [
            Place(
                path.removeprefix(self._here), n, "<module>", source=kept.decode().strip()[:MOST_SOURCE], digest=digest
            )
            for n, (text, kept) in enumerate(zip(whole, lines, strict=False), start=1)
            if re.search(pattern, text.partition("#")[0])
        ]

    def _source(self, path: str) -> tuple[str, list[bytes]]:
        """Return digest of a file as Python read it, and what is kept of its lines; none where it may differ."""
        if path not in self._read:
            data = read_source(path, self._since)
            found = (
                ("", []) if data is None else (hashlib.sha256(data).hexdigest(), _kept(data.decode(errors="replace")))
            )
            self._read[path] = found
        return self._read[path]


def read_source(path: str, since: float) -> bytes | None:
    """Return a file as Python read it; None where it may differ, as it is newer than `since` (Unix time, s)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        known = os.fstat(fd)
        if not stat.S_ISREG(known.st_mode) or known.st_size > MOST_FILE_BYTES or known.st_mtime > since:
            return None
        with open(fd, "rb", closefd=False) as file:
            return file.read(MOST_FILE_BYTES)
    finally:
        os.close(fd)


def _kept(text: str) -> list[bytes]:
    """Return the lines that are kept of a whole source: one line alone does not show whether it is inside a string."""
    return redaction.source(text).encode(errors="replace").splitlines(keepends=True)


def _position(frame: FrameType) -> tuple[int, int, int, int]:
    """Return the lines and columns of what a frame is at; (line, 0, 0, 0) where Python knows no more."""
    line = frame.f_lineno
    positions = getattr(frame.f_code, "co_positions", None)
    if positions is not None:
        known: tuple[Any, ...] = next(islice(positions(), frame.f_lasti // 2, None), (None,))
        if None not in known:
            first, last, column, end = known
            return first, last, column, end
    return line, 0, 0, 0


def _is_compiled(frame: FrameType) -> bool:
    """Return whether a frame runs what Dynamo made of the user's function: it has the first line, and no columns."""
    code = frame.f_code
    return code.co_name != "<module>" and frame.f_lineno == code.co_firstlineno and _position(frame)[1:] == (0, 0, 0)


def _library(frame: FrameType) -> str:
    code = frame.f_code
    function = getattr(code, "co_qualname", code.co_name).replace(".<locals>", "")
    return f"{function} ({code.co_filename.rpartition('-packages/')[2]}:{frame.f_lineno})"


# The last one is where torch.compile keeps what it generates.
_INSTALLED = ("/site-packages/", "/dist-packages/", "/torchinductor_")


def own_files() -> Callable[[str], bool]:
    """Return whether a file is the user's own, and not Python's, an installed package's or dlprof's, as a function."""
    paths = sysconfig.get_paths()
    places = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    places.add(_OURS)
    installed = ("<", *(os.path.join(place, "") for place in places))  # noqa: PTH118

    @functools.cache
    def is_own(file: str) -> bool:
        return not (file.startswith(installed) or any(part in file for part in _INSTALLED))

    return is_own
