"""Opens what may come from a stranger: plain files, below the folder that was named, and of each no more than is sane.

A folder that somebody sends may hold links to the reader's own files, pipes and devices that never end, and a megabyte
that unpacks to gigabytes. What is left out for such a reason is told as a warning; `--no-limits` reads as much as there
is, of plain files below the folder still.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from dlprof.errors import DlprofError

NO_LIMITS = "DLPROF_NO_LIMITS"  # in the environment, so that the processes that read have it too

# Of what is read at once (facts, run.json, warnings), and of one line of a log: far more than dlprof ever writes.
MOST_TEXT = 64 << 20
MOST_LINE = 16 << 20

# Of a trace's events and a log's rows: 10 million events are some 2 GB of JSON, and take as much memory. Of a packed
# file's bytes: real traces hold 10 to 20 bytes in one.
MOST_ROWS = 10_000_000
MOST_UNPACKED, LEAST_UNPACKED = 100, 256 << 20

_BATCH = 4 << 20

NO_LINE = b"\0"  # what no reader takes for a line


def limited() -> bool:
    """Tell whether limits hold; `--no-limits` lifts them."""
    return not os.environ.get(NO_LIMITS)


def most_rows() -> int:
    """Give how many rows of one file are read."""
    return MOST_ROWS if limited() else 1 << 62


def too_many(path: Path, what: str) -> str:
    """Warn that a file holds more rows than are read."""
    return f"{path.name}: holds more than {MOST_ROWS:,} {what}: those before are used (--no-limits reads all)"


def most_unpacked(packed: int) -> int:
    """Give how many bytes a file of so many packed ones may unpack to."""
    return max(MOST_UNPACKED * packed, LEAST_UNPACKED) if limited() else 1 << 62


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; whatever the operating system says about it becomes one clear line."""
    try:
        # Without waiting: a pipe that nobody writes to would keep us for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        with os.fdopen(fd, "rb") as file:
            kind = os.fstat(fd).st_mode
            if not stat.S_ISREG(kind):
                what = "a folder, not a file" if stat.S_ISDIR(kind) else "not a regular file"
                raise DlprofError(f"{path}: {what}")
            yield file
    except FileNotFoundError:
        raise DlprofError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise DlprofError(f"{path}: a folder, not a file") from None
    except OSError as e:
        raise DlprofError(f"{path}: cannot be read: {e.strerror or e}") from e


def read_file(path: Path) -> bytes:
    """Give all of a small file; raises DlprofError where it is larger than such a file can be."""
    with open_file(path) as file:
        data = file.read(MOST_TEXT + 1 if limited() else -1)
    if limited() and len(data) > MOST_TEXT:
        raise DlprofError(f"{path}: larger than {MOST_TEXT >> 20} MB: not read (--no-limits reads it)")
    return data


def lines_of(file: BinaryIO) -> Iterator[list[bytes]]:
    """Give a log's lines, some thousands at a time. One that is longer than MOST_LINE is no line, and the last."""
    held = b""
    while block := file.read(_BATCH):
        *lines, held = (held + block).split(b"\n")
        if lines:
            yield lines
        if len(held) > MOST_LINE and limited():
            yield [NO_LINE]
            return
    if held:
        yield [held]


class Inside:
    """What of a folder may be read: regular files below it. Links that lead out of it are told of in `warnings`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._real = root.resolve()
        self._folders: dict[Path, bool] = {}  # whether they are below it: a job has thousands of files in few folders
        self._out: dict[str, None] = {}

    def holds(self, path: Path) -> bool:
        """Tell whether a path is a regular file below the folder."""
        return self._is(path, stat.S_ISREG)

    def holds_folder(self, path: Path) -> bool:
        """Tell whether a path is a folder below the folder."""
        return self._is(path, stat.S_ISDIR)

    def text(self, path: Path) -> str:
        """Give the text of a small file; "" where it is none of the folder's, or cannot be read."""
        if not self.holds(path):
            return ""
        try:
            return read_file(path).decode(errors="replace")
        except DlprofError:
            return ""

    @property
    def warnings(self) -> list[str]:
        """Tell which links were not followed."""
        few = ", ".join(list(self._out)[:4]) + (" …" if len(self._out) > 4 else "")
        return [f"links that lead out of the folder are not followed: {few}"] if self._out else []

    def _is(self, path: Path, kind: Callable[[int], bool]) -> bool:
        try:
            mode = os.lstat(path).st_mode
            if stat.S_ISLNK(mode):
                mode = path.stat().st_mode
                leads_here = path.resolve().is_relative_to(self._real)
            else:
                parent = path.parent
                if parent not in self._folders:
                    self._folders[parent] = parent.resolve().is_relative_to(self._real)
                leads_here = self._folders[parent]
        except PermissionError:
            raise
        except (OSError, RuntimeError):  # not there, or a link to itself
            return False
        if not leads_here:
            self._out[str(path.relative_to(self.root)) if path.is_relative_to(self.root) else path.name] = None
        return leads_here and kind(mode)
