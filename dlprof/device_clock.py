"""How long each step takes on the device's own clock, from events that are asked later and never waited for."""

from __future__ import annotations

from typing import Any

from dlprof.device import Events
from dlprof.recorder import Recorder

UNKNOWN = (-1, -1)

# Of one step: whose events they are; the end of the step before, its first forward, its end. None: no such event.
Span = tuple[Events, Any, Any, Any]


class DeviceClock:
    """Records an event before each step's first forward and one at its end, which is also where the next step begins.

    So a job that never synchronises is timed as its device works, however far the host runs ahead.
    """

    def __init__(self, recorder: Recorder) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._recorder = recorder
        self._events: Events | None = None
        self._begun: Any = None  # at the first forward of the step that is under way
        self._ended: Any = None  # at the end of the step before it
        if torch.version.cuda is not None or torch.version.hip is not None:
            recorder.first_forward, recorder.end_of_step = self._begin_step, self._end_step

    def _begin_step(self) -> None:
        try:
            self._begun = self._record()
        except Exception as e:  # noqa: BLE001 - host times are worth having without the device's
            self._give_up(e)

    def _end_step(self) -> Span | None:
        """Return the events of the step that ends here; None: it has no end on a device."""
        try:
            ended = self._record()
        except Exception as e:  # noqa: BLE001 - see _begin_step
            self._give_up(e)
            return None
        before, self._ended = self._ended, ended
        begun, self._begun = self._begun, None
        return None if ended is None or self._events is None else (self._events, before, begun, ended)

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
            self._begun = self._ended = None
        return self._events.record()

    def measure(self, span: Span) -> tuple[int, int] | None:
        """Return the ns from the first forward, and from the end of the step before, to the end of this one.

        None: the device has not come so far. -1: not known. Spans are measured in order, each once: the events with
        which this one began are then free, and its end is the next one's beginning.
        """
        events, before, begun, ended = span
        try:
            if not all(event.query() for event in (ended, begun, before) if event is not None):
                return None
            since_begun = _between(begun, ended)
            since_before = _between(before, ended)
        except Exception as e:  # noqa: BLE001 - see _begin_step
            self._give_up(e)
            return UNKNOWN
        events.release(*(event for event in (begun, before) if event is not None))
        return since_begun, since_before

    def _give_up(self, error: Exception) -> None:
        self._recorder.first_forward = self._recorder.end_of_step = None
        self._begun = self._ended = None
        self._recorder.warn(f"no device times from here on: {type(error).__name__}: {error}")


def _between(begin: Any, end: Any) -> int:
    """Return the ns between two events; -1 where one is missing, or where streams have passed them in another order."""
    if begin is None:
        return -1
    ns: int = round(begin.elapsed_time(end) * 1e6)
    return max(ns, -1)
