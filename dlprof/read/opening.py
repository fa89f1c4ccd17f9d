"""Opens files from untrusted sources: only regular files inside the given folder, up to a size.

Such a folder may hold links to the user's own files, endless pipes and devices, and a megabyte that unpacks to
gigabytes. Each skipped file makes a warning. `--no-limits` lifts the sizes, not the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from dlprof.errors import DlprofError
from dlprof.read.limits import LEAST_UNPACKED, MOST_LINE, MOST_TEXT, limit, limited, most_unpacked
from dlprof.units import few

_BATCH = 4 << 20

NO_LINE = b"\0"  # no valid line for any reader

# What text in UTF-16 begins with.
UTF16 = (b"\xff\xfe", b"\xfe\xff")


def as_utf8(data: bytes) -> bytes:
    """Return text that PowerShell wrote, in UTF-16, as UTF-8; other data as they are."""
    return data[: len(data) & ~1].decode("utf-16", errors="replace").encode() if data.startswith(UTF16) else data


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; raise a one-line DlprofError if that fails."""
    try:
        # Without O_NONBLOCK, opening a pipe that has no writer blocks forever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise DlprofError(f"{path}: not a regular file")
            yield file
    except FileNotFoundError:
        raise DlprofError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise DlprofError(f"{path}: a folder, not a file") from None
    except OSError as e:
        raise DlprofError(f"{path}: cannot be read: {e.strerror or e}") from e


def read_file(path: Path) -> bytes:
    """Return all of a small file; raise DlprofError if it is larger than MOST_TEXT."""
    with open_file(path) as file:
        data = file.read(MOST_TEXT + 1 if limited() else -1)
    if len(data) > limit(MOST_TEXT):
        raise DlprofError(f"{path}: larger than {MOST_TEXT >> 20} MB: not read (--no-limits reads it)")
    return data


def read_object(path: Path) -> dict[str, Any]:
    """Return the object of a small JSON file; raise DlprofError if it cannot be read or holds none."""
    try:
        data = json.loads(read_file(path))
    except (ValueError, RecursionError) as e:
        raise DlprofError(f"{path.name} is broken ({str(e)[:120]})") from None
    if not isinstance(data, dict):
        raise DlprofError(f"{path.name} is broken (it holds no object)")
    return data


def unpacked(packed: bytes, most: int) -> bytes:
    """Return the first `most` bytes that gzip data unpack to, as far as they are whole; other data as they are."""
    if not packed.startswith(b"\x1f\x8b"):
        return packed[:most]
    parts, left = [], most
    while packed and left > 0:
        member = zlib.decompressobj(wbits=31)
        try:
            parts.append(member.decompress(packed, left))
        except zlib.error:
            break
        left -= len(parts[-1])
        packed = member.unused_data.lstrip(b"\0")
    return b"".join(parts)


def read_unpacked(path: Path) -> bytes:
    """Return all of a small file, unpacked; raise DlprofError if it, or what it unpacks to, is too large."""
    data = read_file(path)
    most = min(most_unpacked(len(data)), limit(LEAST_UNPACKED))
    whole = unpacked(data, most + 1)
    if len(whole) > most:
        raise DlprofError(f"{path}: unpacks to more than {most >> 20} MB: not read (--no-limits reads it)")
    return whole


def lines_of(file: BinaryIO) -> Iterator[list[bytes]]:
    """Return a log's lines, thousands at a time. Stop with NO_LINE at one that is longer than MOST_LINE."""
    held = b""
    while block := file.read(_BATCH):
        *lines, held = (held + block).split(b"\n")
        if lines:
            yield lines
        if len(held) > limit(MOST_LINE):
            yield [NO_LINE]
            return
    if held:
        yield [held]


class Inside:
    """Decides which files of a folder may be read: regular ones inside it. `warnings` names links that lead out."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._real = root.resolve()
        self._folders: dict[Path, bool] = {}  # whether they are inside it; a job has thousands of files in few folders
        self._out: dict[str, None] = {}

    def holds(self, path: Path) -> bool:
        """Return whether a path is a regular file inside the folder."""
        return self._is(path, stat.S_ISREG)

    def holds_folder(self, path: Path) -> bool:
        """Return whether a path is a folder inside the folder."""
        return self._is(path, stat.S_ISDIR)

    def text(self, path: Path) -> str:
        """Return the text of a small file; "" if it is outside the folder or cannot be read."""
        if not self.holds(path):
            return ""
        try:
            return read_file(path).decode(errors="replace")
        except DlprofError:
            return ""

    @property
    def warnings(self) -> list[str]:
        """One line that names links which were not followed; none if there were none."""
        out = few(list(self._out), 4)
        return [f"links that lead out of the folder are not followed: {out}"] if out else []

    def _is(self, path: Path, kind: Callable[[int], bool]) -> bool:
        try:
            mode = os.lstat(path).st_mode
            if stat.S_ISLNK(mode):
                mode = path.stat().st_mode
                leads_here = path.resolve().is_relative_to(self._real)
            else:
                if path.parent not in self._folders:
                    self._folders[path.parent] = path.parent.resolve().is_relative_to(self._real)
                leads_here = self._folders[path.parent]
        except PermissionError:
            raise
        except (OSError, RuntimeError):  # it does not exist, or links to itself
            return False
        if not leads_here:
            self._out[str(path.relative_to(self.root)) if path.is_relative_to(self.root) else path.name] = None
        return leads_here and kind(mode)
