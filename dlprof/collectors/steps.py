"""The light layer: one line a step for the whole job, so that a run can be judged where nobody traced it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import add
from typing import Any

from dlprof.log import Log
from dlprof.recorder import Recorder
from dlprof.stepping import Step, kind_of

# Steps are written this often: a crash costs at most so much, and a step of a millisecond pays for no system call.
_WRITE_EVERY_NS = 250_000_000

# A job may write 50 MB an hour and rank, and steps of a millisecond would write 900. So after so many that have a line
# each, short ones share a line until they fill it: 25 lines a second, or 23 MB an hour. A long one keeps its own.
_EACH_STEPS = 10_000
_SHARED_NS = 40_000_000

# In %-format, which takes half the time that f-strings take.
_LINE = (
    '{"step":%s,"kind":"%s","start_ns":%s,"dur_ns":%s,"lead_ns":%s,"fetch_ns":%s,"forward_ns":%s,"backward_ns":%s,'
    '"optimizer_ns":%s,"device_ns":%s,"fetches":%s,"backwards":%s,"optimizer_steps":%s,"profiled":%s,"first":%s%s}\n'
)

# Steps whose device time is still outstanding; a device that is further behind than this loses it, not the step.
_MAX_WAITING = 64


class Steps:
    """Writes steps.jsonl: keys and units as in the table `steps`."""

    name = "steps"

    def __init__(self) -> None:
        self._log: Log | None = None
        self._lines: list[str] = []
        self._written_ns = 0
        self._offset_ns = 0
        self._device: _DeviceClock | None = None
        self._waiting: deque[tuple[Step, Any]] = deque()
        # What the steps have in common that share the next line, how many they are, and what they sum up to.
        self._like = ("", 0, 0, True, True)
        self._steps = self._number = self._start_ns = 0
        self._sums: tuple[int, ...] = ()

    def start(self, recorder: Recorder) -> None:
        """Open the file."""
        self._log = Log(recorder.folder / "steps.jsonl")
        self._offset_ns = recorder.unix(0)
        self._device = _DeviceClock(recorder)

    def step(self, done: Sequence[Step]) -> None:
        """Add each step's line, once its device time is known, and write what has gathered."""
        for step in done:
            if step.device is None and not self._waiting:
                self._add(step, -1)
            else:
                self._waiting.append((step, step.device))
        self._drain(len(self._waiting) - _MAX_WAITING)
        now = done[-1].start_ns + done[-1].dur_ns
        if now - self._written_ns >= _WRITE_EVERY_NS:
            self._written_ns = now
            self._write()

    def stop(self) -> None:
        """Write the rest; a device time that is not known by now never will be."""
        self._drain(len(self._waiting))
        self._share()
        self._write()
        if self._log is not None:
            self._log.close()

    def _drain(self, overdue: int) -> None:
        """Move the waiting steps on whose device time is known, in their order, and the first `overdue` in any case."""
        device = self._device
        while self._waiting:
            step, span = self._waiting[0]
            device_ns = device.measure(span) if device is not None and span is not None else -1
            if device_ns is None:
                if overdue <= 0:
                    return
                device_ns = -1
            overdue -= 1
            self._waiting.popleft()
            self._add(step, device_ns)

    def _add(self, step: Step, device_ns: int) -> None:
        """Add a step to the lines; where there are many, a short one joins those before it that are like it."""
        kind = kind_of(step)
        (
            number,
            start_ns,
            dur,
            lead,
            fetch,
            forward,
            backward,
            optimizer,
            fetches,
            _,
            backwards,
            steps,
            first,
            profiled,
            _,
        ) = step
        sums = (dur, lead, fetch, forward, backward, optimizer, device_ns, fetches, backwards, steps)
        if number < _EACH_STEPS or dur >= _SHARED_NS:
            if self._steps:
                self._share()
            self._lines.append(_LINE % (number, kind, start_ns + self._offset_ns, *sums, profiled, first, ""))
            return
        like = (kind, profiled, first, lead < 0, device_ns < 0)
        if self._steps and like != self._like:
            self._share()
        if not self._steps:
            self._like, self._number, self._start_ns = like, number, start_ns + self._offset_ns
            self._sums = sums
        else:
            self._sums = tuple(map(add, self._sums, sums))
        self._steps += 1
        if self._sums[0] >= _SHARED_NS:
            self._share()

    def _share(self) -> None:
        """End the line that short steps share."""
        if not self._steps:
            return
        kind, profiled, first, no_lead, no_device = self._like
        dur, lead, *parts, device, fetches, backwards, steps = self._sums
        lead, device = -1 if no_lead else lead, -1 if no_device else device
        several = f',"steps":{self._steps}' if self._steps > 1 else ""
        sums = (dur, lead, *parts, device, fetches, backwards, steps)
        self._lines.append(_LINE % (self._number, kind, self._start_ns, *sums, profiled, first, several))
        self._steps = 0

    def _write(self) -> None:
        if not self._lines or self._log is None:
            return
        lines = "".join(self._lines)
        self._lines.clear()
        self._log.write(lines)


class _DeviceClock:
    """Device time of a step on CUDA, from pairs of events that are asked later and never waited for."""

    def __init__(self, recorder: Recorder) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._pool: list[Any] = []
        self._begun: Any = None
        self._recorder = recorder
        if torch.version.cuda is not None or torch.version.hip is not None:
            recorder.first_forward, recorder.end_of_step = self._begin_step, self._end_step

    def _begin_step(self) -> None:
        try:
            self._begun = self._record()
        except Exception as e:  # noqa: BLE001 - host times are worth having without the device's
            self._give_up(e)

    def _end_step(self) -> tuple[Any, Any] | None:
        """Give the step's pair of events; None: nothing ran on a device."""
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        try:
            ended = self._record()
        except Exception as e:  # noqa: BLE001 - see _begin_step
            self._give_up(e)
            return None
        return None if ended is None else (begun, ended)

    def measure(self, span: tuple[Any, Any]) -> int | None:
        """Give the ns between two events; None: not over yet; −1: will never be known."""
        begun, ended = span
        try:
            if not ended.query():
                return None
            ns: int = round(begun.elapsed_time(ended) * 1e6)
        except Exception as e:  # noqa: BLE001 - see _begin_step
            self._give_up(e)
            return -1
        self._pool += span
        return ns

    def _record(self) -> Any:
        # Only where the script itself has woken CUDA, and never into a graph that it captures.
        if not self._cuda.is_initialized() or self._cuda.is_current_stream_capturing():
            return None
        event = self._pool.pop() if self._pool else self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def _give_up(self, error: Exception) -> None:
        self._recorder.first_forward = self._recorder.end_of_step = None
        self._begun = None
        self._recorder.warn(f"no device times from here on: {type(error).__name__}: {error}")
