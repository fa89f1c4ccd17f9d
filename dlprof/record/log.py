"""A file of ours that grows inside somebody else's process, by lines and only while it is certainly ours.

A script may close descriptors that it never opened, as daemons do, and the next file that it opens then gets the number
of ours. So the descriptor is asked who it is before each write.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

# Lines that gather in a rank are written this often: a crash costs at most so much, and a step of a millisecond pays
# for no system call.
WRITE_EVERY_NS = 250_000_000


class Log:
    """Appends to a file: in whole lines, unless the disk is full."""

    def __init__(self, path: Path) -> None:
        """Make the file, or go on with the one that is there. Raises OSError where that cannot be."""
        self._path = path
        self._fd = _open(path, os.O_CREAT)
        self._file = file_of(self._fd)

    @property
    def size(self) -> int:
        """Return how many bytes the file holds, by whomever they were written; 0 where it is not there any more."""
        return os.fstat(self._fd).st_size if file_of(self._fd) == self._file else 0

    def write(self, lines: str) -> None:
        """Append; raises OSError where the disk is full or the file was deleted."""
        if file_of(self._fd) != self._file:
            # Not closed: it is no longer ours to close.
            self._fd = _open(self._path, 0)
            self._file = file_of(self._fd)
        elif not os.fstat(self._fd).st_nlink:
            raise OSError("the run folder was deleted")
        data = memoryview(lines.encode())
        while data:
            data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        """Close the file. Nothing may be written any more."""
        if file_of(self._fd) == self._file:
            os.close(self._fd)
        self._fd = -1


def _open(path: Path, create: int) -> int:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | create, 0o666)
    except FileNotFoundError:
        raise OSError("the run folder was deleted") from None
    if fd > 2:
        return fd
    # The script has closed its stdin, stdout or stderr: whatever prints there must not print into our file.
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


def file_of(fd: int) -> tuple[int, int] | None:
    """Return which file a descriptor is of; None: of none."""
    try:
        is_now = os.fstat(fd)
    except OSError:
        return None
    return is_now.st_dev, is_now.st_ino
