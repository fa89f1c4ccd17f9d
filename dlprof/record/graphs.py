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
from dataclasses import dataclass
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from dlprof.record.recorder import Recorder
from dlprof.record.stepping import FORWARD, Row

# Without a loader and without an optimizer of PyTorch's, replays mark the steps after so many with a backward pass in
# them. Before, they may be the micro-batches of an optimizer's step; see recorder._STEPS_WITHOUT_FETCH.
_REPLAYS_WITHOUT_STEP = 32


@dataclass(frozen=True)
class Held:
    """How often each phase ran while a graph was captured."""

    forwards: int
    backwards: int
    optimizer_steps: int


# A graph that was captured where nobody looked: its replay is work of some kind.
_UNKNOWN = Held(1, 0, 0)


class Graphs:
    """The graphs of this process. What it is told, hooks.py tells it; what fails in it switches the recorder off."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._held: weakref.WeakKeyDictionary[Any, Held] = weakref.WeakKeyDictionary()
        self._captured: dict[int, weakref.ref[Any]] = {}  # that captures are under way of, on any thread
        self._row: Row | None = None  # the step's own, while another stands in for it
        self._noted = 0  # the graph that the other is for

    def begin_capture(self, graph: Any) -> None:
        """Hear that a capture has begun: the phases that follow on the training thread are the graph's."""
        recorder, name = self._recorder, id(graph)
        try:
            if recorder.off:
                return
            # A capture that is given up without an end, with its graph, must not be waited for.
            self._captured[name] = weakref.ref(graph, lambda _: self._end(name))
            recorder.device.captures = len(self._captured)
            if self._row is None and (get_ident() == recorder._owner or recorder._mine(FORWARD)):
                self._noted, self._row = name, recorder.row
                recorder.row = Row(recorder.row.number, recorder.row.start_ns)
                recorder.capturing = True
        except Exception as e:  # noqa: BLE001 - the script goes on
            recorder._fail(e)

    def end_capture(self, graph: Any) -> None:
        """Hear that a capture has ended, well or not."""
        recorder = self._recorder
        try:
            held = self._end(id(graph))
            if held is not None:
                self._held[graph] = held
                recorder.graphs += 1
                recorder.news = True
        except Exception as e:  # noqa: BLE001 - the script goes on
            recorder._fail(e)

    def _end(self, name: int) -> Held | None:
        """Put the step's own row back, and return what the other one has; None: nothing was noted."""
        recorder, row = self._recorder, self._row
        self._captured.pop(name, None)
        recorder.device.captures = len(self._captured)
        if row is None or name != self._noted:
            return None
        inner, recorder.row, self._row = recorder.row, row, None
        recorder.capturing = False
        # The host's time was the step's, whatever it was spent on.
        row.parts[:] = [own + more for own, more in zip(row.parts, inner.parts, strict=True)]
        return Held(inner.forwards, inner.backwards, inner.optimizer_steps)

    def begin_replay(self) -> bool:
        """Hear that a graph is about to be replayed; False: that is no work of its own, and end_replay is not due."""
        recorder = self._recorder
        try:
            if recorder.off or recorder._phases or recorder.capturing:
                return False
            if get_ident() != recorder._owner and not recorder._mine(FORWARD):
                return False
            row = recorder.row
            if not row.worked:
                row.lead_ns = perf_counter_ns() - row.start_ns - sum(row.parts)
        except Exception as e:  # noqa: BLE001 - the script goes on
            recorder._fail(e)
            return False
        return True

    def end_replay(self, graph: Any) -> None:
        """Count what was replayed; where no loader marks the steps, a graph with an optimizer's step in it ends one."""
        recorder = self._recorder
        try:
            if recorder.off:
                return
            held = self._held.get(graph, _UNKNOWN)
            if (held.backwards or held.optimizer_steps) and not recorder.started:
                recorder._start()
            row = recorder.row
            row.backwards += held.backwards
            row.forwards += held.forwards
            if not row.worked and not held.optimizer_steps:
                row.forwards = 1
            if held.optimizer_steps:
                row.optimizer_steps += held.optimizer_steps - 1
                recorder._stepped()
                return
            if recorder.mark is None and not recorder._fetched and row.backwards > _REPLAYS_WITHOUT_STEP:
                recorder.mark = "replay"
            if recorder.mark == "replay" and held.backwards:
                recorder._end_step(perf_counter_ns())
        except Exception as e:  # noqa: BLE001 - the script goes on
            recorder._fail(e)
