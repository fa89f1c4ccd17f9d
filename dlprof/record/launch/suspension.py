"""Notices that this process was suspended without a signal, as `docker pause` and schedulers freeze a control group.

A thread sleeps, and is woken far too late, though it has not waited for a core: for that time it could not run. A
virtual machine that stood still shows as well, and a busy host does not.
"""

from __future__ import annotations

import contextlib
import threading
import time

from dlprof.record.device.kernel_counters import KernelCounters

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
        counters = KernelCounters(whole_process=False)  # of this thread: among them how long it waited for a core
        due, waited_ns = time.monotonic() + _EVERY_S, counters.cores()[1]
        # −1: this kernel does not say it.
        while waited_ns >= 0 and not self._over.wait(due - time.monotonic()):
            late, before_ns = time.monotonic() - due, waited_ns
            due, waited_ns = time.monotonic() + _EVERY_S, counters.cores()[1]
            if late > _LATE_S and waited_ns - before_ns < late / 2 * 1e9:
                self._resumed.append(time.time_ns())
        counters.close()
