"""Which GPU a rank trains on, timing events on it that disturb nothing, and what a CUDA graph holds.

A GPU that the script does not use must stay asleep: recording an event there, or asking it for its memory, makes a CUDA
context of some hundred megabytes. So the device is that of the model's parameters and not the current one, which is 0
in every rank of a script that never calls `torch.cuda.set_device`. On ROCm torch calls its devices "cuda" as well.

A job that replays one CUDA graph a step calls no module, no backward and no optimizer after the capture. So what ran
during the capture is kept for each graph and is added to the step that replays it: a graph in which an optimizer has
stepped marks a step exactly as that optimizer would have done. A capture runs nothing on the device and is no step: the
phases in it count for the graph alone, and no step ends in it. A graph that is replayed inside a module's call or a
backward pass, as those of torch.compile(mode="reduce-overhead") and make_graphed_callables are, changes nothing.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from dlprof.plain import words_of
from dlprof.record import guarded
from dlprof.record.model.names import alive, parameters_of
from dlprof.record.step_clock import FORWARD, Row, StepClock

if TYPE_CHECKING:
    from dlprof.record.recorder import Recorder

UNKNOWN = -1

# Types of devices that are no accelerator of another kind.
_KNOWN = ("cpu", "cuda", "meta")

# CUPTI takes memory on the device, which a job would miss whose GPU has less of it than this share.
_FREE = 0.02

# A weak reference to a model or an optimizer of the script's.
Reference = Callable[[], Any]


class RankDevice:
    """The GPU that holds most of what a rank trains. A process that drives several (nn.DataParallel) has one, too."""

    __slots__ = ("_seen", "captures", "index", "other")

    def __init__(self) -> None:
        self.index: int | None = None  # None: no parameter was seen on a GPU
        self.other: str | None = None  # an accelerator that is none of CUDA's or ROCm's: xpu, hpu, mtia, ...
        self.captures = 0  # CUDA graphs that threads of this process are capturing, as far as PyTorch's class captures
        self._seen = (0, 0)  # models and optimizers

    def look(self, models: Sequence[Reference], optimizers: Sequence[Reference]) -> None:
        """Look at the parameters again if there is a model or an optimizer more than last time."""
        if (len(models), len(optimizers)) == self._seen:
            return
        self._seen = (len(models), len(optimizers))
        trained = (p for model in alive(models) for p in parameters_of(model))
        stepped = (p for one in alive(optimizers) for group in one.param_groups for p in group["params"])
        # A job without modules has the tensors that its optimizers step.
        for parameters in map(list, (trained, stepped)):
            self.other = self.other or next((kind for p in parameters if (kind := _type_of(p)) not in _KNOWN), None)
            index = most_on(parameters)
            if index is not None:
                self.index = index
                return

    def is_full(self) -> str:
        """Say that hardly any of the GPU's memory is free, where it is so; "" elsewhere."""
        import torch

        index = self.in_use()
        if index is None or self.capturing():
            return ""
        cuda: Any = torch.cuda
        try:
            free, whole = cuda.mem_get_info(index)
        except Exception:  # noqa: BLE001 - what is not known is no reason
            return ""
        return f"{free / 2**20:,.0f} of {whole / 2**20:,.0f} MiB of the GPU are free" if free < _FREE * whole else ""

    def in_use(self) -> int | None:
        """Return the index of the GPU to measure; None: the script uses none, and a query would wake one.

        The current device where the parameters are on none, as those that are offloaded to the host are.
        """
        import torch

        cuda: Any = torch.cuda
        if not cuda.is_initialized():
            return None
        if self.index is not None:
            return self.index
        current: int = cuda.current_device()
        is_awake: Any = getattr(torch._C, "_cuda_hasPrimaryContext", None)
        return current if is_awake is None or is_awake(current) else None

    def capturing(self) -> bool:
        """Return whether a CUDA graph is being captured: any query of a device meanwhile makes the capture fail.

        By default also a query from another thread (cudaStreamCaptureModeGlobal, CUDA Runtime API).
        """
        if self.captures > 0:
            return True
        import torch

        cuda: Any = torch.cuda
        try:
            if not cuda.is_initialized():
                return False
            if self.index is None or cuda.current_device() == self.index:
                return bool(cuda.is_current_stream_capturing())
            with cuda.device(self.index):
                return bool(cuda.is_current_stream_capturing())
        except RuntimeError:  # the next call to the device raises it again
            return False


def _type_of(parameter: Any) -> str:
    try:
        return str(parameter.device.type)
    except Exception:  # noqa: BLE001 - raised by the script's own classes
        return "cpu"


def most_on(parameters: Iterable[Any]) -> int | None:
    """Return the index of the GPU that most elements of these tensors are on; None: none is on a GPU."""
    elements: Counter[int] = Counter()
    try:
        for tensor in parameters:
            if tensor.device.type == "cuda":
                elements[tensor.device.index] += tensor.numel()
    except Exception:  # noqa: BLE001 - raised by the script's own classes; what was counted so far is kept
        pass
    return max(elements, key=lambda index: (elements[index], -index)) if elements else None


# All events of ours that exist.
_events: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by id


def _leak() -> None:
    """Run in a fork's child: let no event be destroyed there, not even as the child ends.

    Where CUDA cannot be used, as in a fork of a process that has used it, torch 2.11's destructor of an event throws
    (c10/cuda/CUDAEvent.h), and what a destructor throws ends the process: a loader's worker, in the second epoch.
    """
    for event in _events.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(event))


os.register_at_fork(after_in_child=_leak)  # before what drops them there, which the recorder registers


class Events:
    """Timing events of one GPU, from a pool. An event is recorded on the stream that the calling thread uses there."""

    __slots__ = ("_cuda", "_pool", "index")

    def __init__(self, index: int) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._pool: list[Any] = []
        self.index = index

    def record(self) -> Any:
        """Record an event and return it; None while the stream is captured into a CUDA graph."""
        cuda = self._cuda
        if cuda.current_device() != self.index:
            # Stream and capture are those of the current device. Leaving this block wakes no device that was asleep:
            # torch only remembers its number.
            with cuda.device(self.index):
                return self.record()
        if cuda.is_current_stream_capturing():
            return None
        if self._pool:
            event = self._pool.pop()
        else:
            event = cuda.Event(enable_timing=True)
            _events[id(event)] = event
        event.record()
        return event

    def release(self, *events: Any) -> None:
        """Take back events that are no longer needed."""
        self._pool += events


# Of one step: whose events they are, and those at the end of the step before and at its own.
Span = tuple[Events, Any, Any]


class DeviceClock:
    """Measures steps on the device's own clock, with events that are queried later and never waited for.

    An event is recorded at the end of each step, which is also where the next one begins. So a job that never
    synchronises is timed as its device works, however far the host runs ahead.
    """

    def __init__(self, clock: StepClock, device: RankDevice, warn: Callable[[str], None]) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._clock, self._device, self._warn = clock, device, warn
        self._events: Events | None = None
        self._ended: Any = None  # at the end of the step before the one that is under way
        if torch.version.cuda is not None or torch.version.hip is not None:
            clock.end_of_step = self._end_step

    def _end_step(self) -> Span | None:
        """Return the events of the step that ends here; None: one of them is missing."""
        try:
            ended = self._record()
        except RuntimeError as e:  # CUDA's; host times are worth having without the device's
            self._give_up(e)
            return None
        before, self._ended = self._ended, ended
        return None if before is None or ended is None or self._events is None else (self._events, before, ended)

    def _record(self) -> Any:
        # Only where the script itself has woken CUDA.
        if not self._cuda.is_initialized():
            return None
        index = self._device.index
        if self._events is None or (index is not None and index != self._events.index):
            used = self._device.in_use()
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
        except RuntimeError as e:  # see _end_step
            self._give_up(e)
            return UNKNOWN
        events.release(before)
        return max(ns, UNKNOWN)

    def _give_up(self, error: Exception) -> None:
        self._clock.end_of_step = self._ended = None
        self._warn(f"no device times from here on: {words_of(error)}")


class GraphWork(NamedTuple):
    """How often each phase ran while a graph was captured."""

    forwards: int
    backwards: int
    optimizer_steps: int


# A graph whose capture was not seen: its replay is work of an unknown kind.
_UNKNOWN = GraphWork(1, 0, 0)


class Graphs:
    """The graphs of this process. hooks.py calls it; what fails in it switches the recorder off."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._clock = recorder.clock
        self._held: weakref.WeakKeyDictionary[Any, GraphWork] = weakref.WeakKeyDictionary()
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

    def _end(self, name: int) -> GraphWork | None:
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
        return GraphWork(inner.forwards, inner.backwards, inner.optimizer_steps)

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
