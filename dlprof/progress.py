"""How far long work is, on stderr: one line that is written anew on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from dlprof.units import count, size

# A terminal's line is written anew so often, seconds; elsewhere a line stands for a tenth of the work.
OFTEN_S = 0.1
LINES = 10

# What is left is told once this much of the work is done: earlier, it is a guess.
ENOUGH = 0.05


@dataclass(frozen=True)
class Done:
    """How much is done, and of how much: ranks, their files, and the bytes of these."""

    ranks: int
    of_ranks: int
    files: int = 0
    of_files: int = 0
    bytes: int = 0
    of_bytes: int = 0


class Progress:
    """Tells how far work on a run is; `label` names the run where there are several. Says nothing where quiet."""

    def __init__(
        self,
        label: str = "",
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label = label
        self._stream = None if quiet else stream or sys.stderr
        self._clock = clock
        self._start = clock()
        self._written = -OFTEN_S
        self._width = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing of it on a terminal: what was read is in what is printed next."""
        if self._width and self._stream is not None:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0

    def __call__(self, done: Done) -> None:
        """Say how far it is."""
        if self._stream is None:
            return
        if self._stream.isatty():
            now = self._clock()
            if now - self._written >= OFTEN_S or done.ranks in (0, done.of_ranks):
                self._written = now
                self._rewrite(self._told(done))
        elif done.of_ranks > 1 and done.ranks and self._is_due(done):
            self._stream.write(f"{self._told(done)}\n")
            self._stream.flush()

    def _is_due(self, done: Done) -> bool:
        return done.ranks == done.of_ranks or done.ranks % max(1, done.of_ranks // LINES) == 0

    def _rewrite(self, text: str) -> None:
        assert self._stream is not None
        self._stream.write("\r" + text + " " * (self._width - len(text)))
        self._stream.flush()
        self._width = len(text)

    def _told(self, done: Done) -> str:
        parts = [f"{self._label}read {done.ranks} of {count(done.of_ranks, 'rank')}"]
        if done.of_files:
            parts.append(f"{done.files} of {count(done.of_files, 'file')}")
        seconds = self._clock() - self._start
        if done.of_bytes:
            parts.append(f"{size(done.bytes)} of {size(done.of_bytes)}")
            if done.bytes and seconds > 0:
                parts.append(f"{size(done.bytes / seconds)}/s")
        share = done.bytes / done.of_bytes if done.of_bytes else done.ranks / max(done.of_ranks, 1)
        if ENOUGH <= share < 1:
            parts.append(f"{_time(seconds / share * (1 - share))} left")
        return " · ".join(parts)


def _time(seconds: float) -> str:
    """Write seconds as a person counts them: 8 s, 2 min 5 s, 1 h 12 min."""
    whole = max(round(seconds), 1)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
