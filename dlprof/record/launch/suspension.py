"""Notices that this process was suspended without a signal, as `docker pause` and schedulers freeze a control group.

A thread sleeps, and is woken far too late, though it has not waited for a core: for that time it could not run. A
virtual machine that stood still shows as well, and a busy host does not.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time

# A suspension that is longer than both together is seen.
_EVERY_S = 2.0
_LATE_S = 1.5


class Suspensions:
    """Watches this process from its start() to its end()."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dlprof suspensions", daemon=True)
        self._resumed: list[int] = []

    def start(self) -> None:
        """Begin; where no thread more is allowed, nothing will be seen."""
        with contextlib.suppress(RuntimeError):
            self._thread.start()

    def end(self) -> list[int]:
        """Return when this process went on again after each suspension, Unix ns."""
        self._over.set()
        return self._resumed

    def _watch(self) -> None:
        with contextlib.suppress(OSError, ValueError, IndexError):  # this kernel does not say who waits for a core
            fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            try:
                due, waited = time.monotonic() + _EVERY_S, _waited_s(fd)
                while not self._over.wait(due - time.monotonic()):
                    late, before = time.monotonic() - due, waited
                    due, waited = time.monotonic() + _EVERY_S, _waited_s(fd)
                    if late > _LATE_S and waited - before < late / 2:
                        self._resumed.append(time.time_ns())
            finally:
                os.close(fd)


def _waited_s(fd: int) -> float:
    """Return how long a thread has been ready to run and had no core, in seconds."""
    return int(os.pread(fd, 100, 0).split()[1]) / 1e9
