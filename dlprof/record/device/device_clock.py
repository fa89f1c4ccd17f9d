"""How long each step takes on the device's own clock, from events that are asked later and never waited for."""

from __future__ import annotations

from typing import Any

from dlprof.record.device.device import Events
from dlprof.record.recorder import Recorder

UNKNOWN = -1

# Of one step: whose events they are, and those at the end of the step before and at its own.
Span = tuple[Events, Any, Any]


class DeviceClock:
    """Records an event at the end of each step, which is also where the next one begins.

    So a job that never synchronises is timed as its device works, however far the host runs ahead.
    """

    def __init__(self, recorder: Recorder) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._recorder = recorder
        self._events: Events | None = None
        self._ended: Any = None  # at the end of the step before the one that is under way
        if torch.version.cuda is not None or torch.version.hip is not None:
            recorder.clock.end_of_step = self._end_step

    def _end_step(self) -> Span | None:
        """Return the events of the step that ends here; None: one of them is missing."""
        try:
            ended = self._record()
        except Exception as e:  # noqa: BLE001 - host times are worth having without the device's
            self._give_up(e)
            return None
        before, self._ended = self._ended, ended
        return None if before is None or ended is None or self._events is None else (self._events, before, ended)

    def _record(self) -> Any:
        # Only where the script itself has woken CUDA.
        if not self._cuda.is_initialized():
            return None
        index = self._recorder.device.index
        if self._events is None or (index is not None and index != self._events.index):
            used = self._recorder.device.in_use()
            if used is None:
                return None
            # Events are of one device: those of another cannot be compared with them.
            self._events = Events(used)
            self._ended = None
        return self._events.record()

    def measure(self, span: Span) -> int | None:
        """Return the ns from the end of the step before to the end of this one; None: the device has not come so far.

        UNKNOWN also where streams have passed the events in another order. Spans are measured in order, each once: the
        event with which this one began is then free, and its end is the next one's beginning.
        """
        events, before, ended = span
        try:
            if not (ended.query() and before.query()):
                return None
            ns: int = round(before.elapsed_time(ended) * 1e6)
        except Exception as e:  # noqa: BLE001 - see _end_step
            self._give_up(e)
            return UNKNOWN
        events.release(before)
        return max(ns, UNKNOWN)

    def _give_up(self, error: Exception) -> None:
        self._recorder.clock.end_of_step = self._ended = None
        self._recorder.warn(f"no device times from here on: {type(error).__name__}: {error}")
