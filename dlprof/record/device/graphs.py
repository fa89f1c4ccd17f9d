"""What a CUDA graph holds, noted while it is captured, so that replaying it counts as the work that it is.

A job that replays one graph a step calls no module, no backward and no optimizer after the capture. So what ran during
the capture is kept for each graph and is added to the step that replays it: a graph in which an optimizer has stepped
marks a step exactly as that optimizer would have done.

A capture runs nothing on the device and is no step: the phases in it count for the graph alone, and no step ends in it.
A graph that is replayed inside a module's call or a backward pass, as those of torch.compile(mode="reduce-overhead")
and make_graphed_callables are, changes nothing.
"""

from __future__ import annotations

import weakref
from threading import get_ident
from time import perf_counter_ns
from typing import Any, NamedTuple

from dlprof.record import guarded
from dlprof.record.recorder import Recorder
from dlprof.record.step_clock import FORWARD, Row


class Held(NamedTuple):
    """How often each phase ran while a graph was captured."""

    forwards: int
    backwards: int
    optimizer_steps: int


# A graph whose capture was not seen: its replay is work of an unknown kind.
_UNKNOWN = Held(1, 0, 0)


class Graphs:
    """The graphs of this process. hooks.py calls it; what fails in it switches the recorder off."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._clock = recorder.clock
        self._held: weakref.WeakKeyDictionary[Any, Held] = weakref.WeakKeyDictionary()
        self._captured: dict[int, weakref.ref[Any]] = {}  # graphs that are being captured, on any thread
        self._row: Row | None = None  # the step's own, while another one replaces it
        self._noted = 0  # the graph that the other row counts for

    def fail(self, error: Exception) -> None:
        """Switch the recording off, since a hook failed."""
        self._recorder.fail(error)

    @guarded
    def begin_capture(self, graph: Any) -> None:
        """Note that a capture has begun: the phases that follow on the training thread are the graph's."""
        recorder, clock, name = self._recorder, self._clock, id(graph)
        if clock.off:
            return
        # A capture that is given up without an end, with its graph, must not be waited for.
        self._captured[name] = weakref.ref(graph, lambda _: self._end(name))
        recorder.device.captures = len(self._captured)
        if self._row is None and (get_ident() == clock.owner or clock.owns(FORWARD)):
            self._noted, self._row = name, clock.row
            clock.row = Row(clock.row.number, clock.row.start_ns)
            clock.capturing = True

    @guarded
    def end_capture(self, graph: Any) -> None:
        """Note that a capture has ended, well or not."""
        held = self._end(id(graph))
        if held is not None:
            self._held[graph] = held
            observed = self._recorder.observed
            observed.graphs += 1
            observed.news = True

    def _end(self, name: int) -> Held | None:
        """Put the step's own row back, and return what the other one has; None: nothing was noted."""
        clock, row = self._clock, self._row
        self._captured.pop(name, None)
        self._recorder.device.captures = len(self._captured)
        if row is None or name != self._noted:
            return None
        inner, clock.row, self._row = clock.row, row, None
        clock.capturing = False
        # The host's time was the step's, whatever it was spent on.
        row.parts[:] = [own + more for own, more in zip(row.parts, inner.parts, strict=True)]
        return Held(inner.forwards, inner.backwards, inner.optimizer_steps)

    def begin_replay(self) -> bool:
        """Prepare for a replay; False: it is no work of its own, and end_replay must not be called."""
        clock = self._clock
        try:
            if clock.off or clock.phases or clock.capturing:
                return False
            if get_ident() != clock.owner and not clock.owns(FORWARD):
                return False
            row = clock.row
            if not row.worked:
                row.lead_ns = perf_counter_ns() - row.start_ns - sum(row.parts)
        except Exception as e:  # noqa: BLE001 - the script goes on
            self.fail(e)
            return False
        return True

    def end_replay(self, graph: Any) -> None:
        """Count what was replayed; where no loader marks the steps, a graph with an optimizer's step in it ends one."""
        try:
            if not self._clock.off:
                self._clock.replayed(*self._held.get(graph, _UNKNOWN))
        except Exception as e:  # noqa: BLE001 - the script goes on
            self.fail(e)
