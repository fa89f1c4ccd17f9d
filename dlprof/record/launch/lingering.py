"""Says which processes of a command still run some seconds after it was told to end; a shell waits for it as well.

A parent that waits for its children, as multiprocessing's does at its end, outlives a Ctrl-C that reached it alone; and
a child that is blocked in C never gets as far as Python's handler.
"""

from __future__ import annotations

import contextlib
import threading

from dlprof.plain import tell
from dlprof.record.launch.process import family, running

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
        processes = family([self._pid], running())
        named = ", ".join(map(str, processes[:_MOST_NAMED]))
        more = f" and {len(processes) - _MOST_NAMED} more" if len(processes) > _MOST_NAMED else ""
        tell(
            f"the command was told to end {self._patience_s:.0f} s ago and still runs"
            f" (processes {named}{more}); dlprof waits for it and ends nothing: a second Ctrl-C, or kill, does"
        )
