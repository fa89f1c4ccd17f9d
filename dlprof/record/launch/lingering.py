"""Says which processes of a command still run some seconds after it was told to end; a shell waits for it as well.

A parent that waits for its children, as multiprocessing's does at its end, outlives a Ctrl-C that reached it alone; and
a child that is blocked in C never gets as far as Python's handler.
"""

from __future__ import annotations

import contextlib
import os
import threading

from dlprof.plain import plain
from dlprof.record.launch.process import stat_of

# As long as a script may take to save a checkpoint before it ends.
_PATIENCE_S = 15.0
_MOST_NAMED = 8


class Lingering:
    """Watches one command from the first signal that tells it to end."""

    def __init__(self, pid: int, patience_s: float = _PATIENCE_S) -> None:
        self._pid, self._patience_s = pid, patience_s
        self._timer: threading.Timer | None = None

    def told_to_end(self) -> None:
        """Start the clock, unless it runs."""
        if self._timer is None:
            self._timer = threading.Timer(self._patience_s, self._say)
            self._timer.daemon = True
            with contextlib.suppress(RuntimeError):  # no thread more is allowed here
                self._timer.start()

    def ended(self) -> None:
        """Say nothing any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _say(self) -> None:
        running = [self._pid, *below(self._pid)]
        named = ", ".join(map(str, running[:_MOST_NAMED]))
        more = f" and {len(running) - _MOST_NAMED} more" if len(running) > _MOST_NAMED else ""
        text = (
            f"dlprof: the command was told to end {self._patience_s:.0f} s ago and still runs"
            f" (processes {named}{more}); dlprof waits for it and ends nothing: a second Ctrl-C, or kill, does"
        )
        with contextlib.suppress(OSError):
            os.write(2, plain(text).encode(errors="replace") + b"\n")


def below(pid: int) -> list[int]:
    """List the processes that a process has started, and those that these have, as far as they still run."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        stat = stat_of(entry.name) if entry.name.isdigit() else []
        if stat and stat[0] not in (b"Z", b"X"):
            children.setdefault(int(stat[1]), []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += sorted(children.get(one, ()))
    return found[1:]
