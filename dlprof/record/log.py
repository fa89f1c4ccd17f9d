"""Appends lines to a file of ours from within the script's process; `run_folder` says how several logs share one.

A script may close descriptors that it never opened, as daemons do, and the next file that it opens then gets the number
of ours. So each write checks first whether the descriptor is still that of our file.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from dlprof import run_folder

# Lines that gather in a rank are written this often: a crash costs at most so much, and a step of a millisecond pays
# for no system call.
WRITE_EVERY_NS = 250_000_000

# A log with a budget may hold so much, and so much more for each second that its rank trains: 14,000 batches in
# detail, then 8 a second. Above that, what one writing has gathered becomes one line of sums.
_BURST_BYTES = 2_000_000
_BYTES_A_SECOND = 1_000

Row = tuple[Any, ...]


class Descriptor:
    """A descriptor of ours, until the script closes it; its number may then be that of another file."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._file = file_of(fd)

    @property
    def is_ours(self) -> bool:
        """Return whether it is still what it was."""
        return self._file is not None and file_of(self.fd) == self._file

    def close(self) -> None:
        """Close it, unless the script has."""
        if self.is_ours:
            os.close(self.fd)
        self._file = None


class Log:
    """Appends to a file: in whole lines, unless the disk is full. What follows a line that is cut off is whole."""

    def __init__(self, path: Path) -> None:
        """Make the file, or go on with the one that is there. Raises OSError where that cannot be."""
        self._path = path
        self._file = Descriptor(_open(path, os.O_CREAT))
        self._cut = self.size > 0  # the last line may be: of a write that failed, or of a process that was killed

    @property
    def size(self) -> int:
        """Return how many bytes the file holds, by whomever they were written; 0 where it is not there any more."""
        return os.fstat(self._file.fd).st_size if self._file.is_ours else 0

    def write(self, lines: str) -> None:
        """Append; raises OSError where the disk is full or the file was deleted."""
        if not self._file.is_ours:
            self._file = Descriptor(_open(self._path, 0))
        elif not os.fstat(self._file.fd).st_nlink:
            raise OSError("the run folder was deleted")
        data = memoryview((("\n" if self._cut else "") + lines).encode())
        self._cut = True
        while data:
            data = data[os.write(self._file.fd, data) :]
        self._cut = False

    def close(self) -> None:
        """Close the file. Nothing may be written any more."""
        self._file.close()


class Part:
    """One log of several in a file. `size`: the bytes that were written of it."""

    def __init__(self, file: Log, log: str, rank: str = "") -> None:
        self._file = file
        self._begins = run_folder.begins(log, rank)
        self.size = 0

    def begin(self, lines: str = "") -> None:
        """Begin the log anew, with lines that take the place of all before: of its readers, each sees both or none."""
        self._append(f"{self._begins[:-1]}}}\n", lines)

    def write(self, lines: str) -> None:
        """Append lines, each an object of JSON that is not empty; raises OSError as `Log.write` does."""
        self._append("", lines)

    def _append(self, first: str, lines: str) -> None:
        text = f"\n{lines}".replace("\n{", f"\n{self._begins}")[1:]
        self.size += len(text)
        self._file.write(first + text)


class BudgetLog:
    """Rows on their way into a log that several processes may append to, each whole lines at a time.

    The log grows no faster than its budget: rows that would exceed it are summed. Rows are summed that are alike in
    their first `keys` cells; the sums are those of the cells from `sums` on, and the cells between are the first row's.
    """

    def __init__(self, line: Callable[[Row], str], keys: int, sums: int) -> None:
        self._line = line
        self._keys = keys
        self._sums = sums
        self.rows: list[Row] = []
        self._log: Log | Part | None = None
        self._begun_ns = 0
        self.written_ns = 0

    @property
    def is_open(self) -> bool:
        """Return whether there is a log."""
        return self._log is not None

    def open(self, log: Log | Part, age_ns: int = 0) -> None:
        """Write to a log from now on; its rank has trained for so long, in which others may have filled it."""
        self._log = log
        self._begun_ns = perf_counter_ns() - age_ns

    def fit(self) -> None:
        """Sum the rows so far, if there is no log yet. Callers append rows without this check, which takes time."""
        if not self.is_open:
            self._sum()

    def write(self, now: int, *, last: bool) -> None:
        """Write what has gathered, as far as the budget allows; the last time in any case."""
        self.written_ns = now
        if not self.rows or self._log is None:
            return
        if self._log.size >= _BURST_BYTES + _BYTES_A_SECOND * (now - self._begun_ns) // 1_000_000_000:
            self._sum()
            if not last:
                return
        lines = "".join(map(self._line, self.rows))
        self.rows.clear()
        self._log.write(lines)

    def forget(self) -> None:
        """Drop rows and log, as a fork's child does: they are its parent's."""
        self.rows.clear()
        self._log = None

    def _sum(self) -> None:
        keys, sums = self._keys, self._sums
        alike: dict[Row, list[Row]] = {}
        for row in self.rows:
            alike.setdefault(row[:keys], []).append(row)
        self.rows = []
        for rows in alike.values():
            columns = list(zip(*rows, strict=True))[sums:]
            self.rows.append((*rows[0][:sums], *(-1 if min(c) < 0 else sum(c) for c in columns)))


def _open(path: Path, create: int) -> int:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | create, 0o666)
    except FileNotFoundError:
        raise OSError("the run folder was deleted") from None
    # The script has closed its stdin, stdout or stderr: whatever prints there must not print into our file.
    return fd if fd > 2 else moved(fd, 3)


def moved(fd: int, least: int) -> int:
    """Give a descriptor the lowest free number that is not below `least`."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, least)
    finally:
        os.close(fd)


def file_of(fd: int) -> tuple[int, int] | None:
    """Return which file a descriptor is of; None: of none."""
    try:
        is_now = os.fstat(fd)
    except OSError:
        return None
    return is_now.st_dev, is_now.st_ino
