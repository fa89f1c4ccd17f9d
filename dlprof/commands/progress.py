"""Shows the progress of long work on stderr: one line, rewritten, on a terminal; a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from dlprof.plain import plain
from dlprof.units import count, size

if TYPE_CHECKING:
    from dlprof.analysis.engine import Done

OFTEN_S = 0.1  # interval between updates of a terminal's line
LINES = 10  # written in all, if stderr is no terminal
ENOUGH = 0.05  # of the work must be done before the time left is estimated: earlier, it is a guess


class Progress:
    """Prints the progress of work on a run. `label`: names the run if there are several. Prints nothing if quiet."""

    def __init__(
        self,
        label: str = "",
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label = label
        self._quiet = quiet
        self._stream = stream or sys.stderr
        self._clock = clock
        self._start = clock()
        self._written = -OFTEN_S
        self._width = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the line from a terminal."""
        self._clear()

    def __call__(self, done: Done) -> None:
        """Print the progress if an update is due."""
        if self._quiet:
            return
        tenth = max(1, done.of_ranks // LINES)
        if self._stream.isatty():
            now = self._clock()
            if now - self._written >= OFTEN_S or done.ranks in (0, done.of_ranks):
                self._written = now
                text = self._line(done)
                self._write("\r" + text.ljust(self._width))
                self._width = len(text)
        elif done.of_ranks > 1 and done.ranks in (*range(tenth, done.of_ranks, tenth), done.of_ranks):
            self._write(f"{self._line(done)}\n")

    def tell(self, line: str) -> None:
        """Print a line that stays."""
        if not self._quiet:
            self._clear()
            self._write(f"{plain(line)}\n")

    def _clear(self) -> None:
        if self._width:
            self._write("\r" + " " * self._width + "\r")
            self._width = 0

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def _line(self, done: Done) -> str:
        parts = [f"{self._label}read {done.ranks} of {count(done.of_ranks, 'rank')}"]
        if done.of_files:
            parts.append(f"{done.files} of {count(done.of_files, 'file')}")
        seconds = self._clock() - self._start
        if done.of_bytes:
            parts.append(f"{size(done.bytes)} of {size(done.of_bytes)}")
            if done.bytes > done.known_bytes and seconds > 0:
                parts.append(f"{size((done.bytes - done.known_bytes) / seconds)}/s")
        share = _share(done)
        if ENOUGH <= share < 1:
            parts.append(f"{_time(seconds / share * (1 - share))} left")
        return " · ".join(parts)


def _share(done: Done) -> float:
    """Return the share of the work that is done, without what was known before."""
    if done.of_bytes > done.known_bytes:
        return (done.bytes - done.known_bytes) / (done.of_bytes - done.known_bytes)
    return (done.ranks - done.known_ranks) / max(done.of_ranks - done.known_ranks, 1)


def _time(seconds: float) -> str:
    """Write seconds as 8 s, 2 min 5 s or 1 h 12 min."""
    minutes, rest = divmod(max(round(seconds), 1), 60)
    hours, left = divmod(minutes, 60)
    return f"{hours} h {left} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
