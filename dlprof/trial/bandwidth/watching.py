"""Ends a rank that waits for others in vain: a call into NCCL or gloo may wait for a dead rank longer than anyone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from dlprof.plain import tell

_POLL_S = 0.2


class Watch:
    """A thread that ends this process, with one line, once what it does takes longer than it may.

    Nothing else interrupts a thread that waits in C.
    """

    def __init__(
        self, limit_s: float, say: Callable[[str], None] = tell, end: Callable[[int], None] = os._exit
    ) -> None:
        self._limit_s, self._say, self._end = limit_s, say, end
        self._what, self._until = "", float("inf")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def at(self, what: str, more_s: float = 0.0) -> None:
        """Note what begins now, in words for the user; it may take so much longer than the limit."""
        self._what, self._until = what, time.monotonic() + self._limit_s + more_s

    def still(self) -> None:
        """Note that it goes on: from now it may take as long again."""
        self._until = max(self._until, time.monotonic() + self._limit_s)

    def _look(self) -> None:
        while not self._over.wait(_POLL_S):
            if time.monotonic() > self._until:
                self._say(f"given up after {self._limit_s:g} s: {self._what} (--timeout waits for longer)")
                self._end(1)
                return
