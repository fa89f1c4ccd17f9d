"""The light layer: one line a step for the whole job, so that a run can be judged where nobody traced it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from operator import add

from dlprof.record.device.device_clock import UNKNOWN, DeviceClock, Span
from dlprof.record.log import Log
from dlprof.record.recorder import Recorder
from dlprof.record.stepping import Step, kind_of

# Steps are written this often: a crash costs at most so much, and a step of a millisecond pays for no system call.
_WRITE_EVERY_NS = 250_000_000

# A job may write 50 MB an hour and rank, and steps of a millisecond would write 900. So after so many that have a line
# each, short ones share a line until they fill it: 25 lines a second, or 23 MB an hour. A long one keeps its own.
_EACH_STEPS = 10_000
_SHARED_NS = 40_000_000

# In %-format, which takes half the time that f-strings take.
_LINE = (
    '{"step":%s,"kind":"%s","start_ns":%s,"dur_ns":%s,"lead_ns":%s,"fetch_ns":%s,"forward_ns":%s,"backward_ns":%s,'
    '"optimizer_ns":%s,"device_step_ns":%s,"fetches":%s,"backwards":%s,"optimizer_steps":%s,'
    '"profiled":%s,"first":%s%s}\n'
)

# Steps whose device time is still outstanding; a device that is further behind than this loses it, not the step. About
# 1,024 launches fit into a stream's queue before the host must wait, and a step is at least a launch and an event: one
# that replays a graph a step is further behind than any other, and never so far.
_MAX_WAITING = 1_024

# A step whose device time is outstanding is saved without it, and written again once that is known, unless the job ends
# before: such a line counts where none of another kind follows.
_OUTSTANDING = ',"outstanding":1'


class Steps:
    """Writes steps.jsonl: keys and units as in the table `steps`."""

    name = "steps"

    def __init__(self) -> None:
        self._log: Log | None = None
        self._lines: list[str] = []
        self._written_ns = 0
        self._offset_ns = 0
        self._device: DeviceClock | None = None
        self._waiting: deque[tuple[Step, Span | None]] = deque()
        # What the steps have in common that share the next line, how many they are, and what they sum up to.
        self._like = ("", 0, 0, True, True)
        self._steps = self._number = self._start_ns = 0
        self._sums: tuple[int, ...] = ()
        # What is above belongs to whoever holds this: the training thread, or the one that saves. Reentrant, for a
        # signal's handler may come upon the training thread in here.
        self._lock = threading.RLock()
        self._heard = -1  # the number of the last step that was taken in
        self._saved = -1  # and that of the last one that was saved without its device time

    def start(self, recorder: Recorder) -> None:
        """Open the file."""
        self._log = Log(recorder.folder / "steps.jsonl")
        self._offset_ns = recorder.unix(0)
        self._device = DeviceClock(recorder)

    def step(self, done: Sequence[Step]) -> None:
        """Add each step's line, once its device time is known, and write what has gathered."""
        with self._lock:
            self._take(done)
            self._drain(len(self._waiting) - _MAX_WAITING)
            now = done[-1].start_ns + done[-1].dur_ns
            if now - self._written_ns >= _WRITE_EVERY_NS:
                self._written_ns = now
                self._write()

    def save(self, done: Sequence[Step]) -> None:
        """Write all steps that have ended, those whose device time is outstanding without it."""
        with self._lock:
            self._take(done)
            self._share()
            unsaved = [step for step, _ in self._waiting if step.number > self._saved]
            outstanding = [self._line(step, UNKNOWN, _OUTSTANDING) for step in unsaved]
            self._write(outstanding)
            if unsaved:
                self._saved = unsaved[-1].number

    def stop(self) -> None:
        """Write the rest; a device time that is not known by now never will be."""
        with self._lock:
            self._drain(len(self._waiting))
            self._share()
            self._write()
            if self._log is not None:
                self._log.close()
                self._log = None

    def _take(self, done: Sequence[Step]) -> None:
        """Take in the steps that have not been heard of."""
        for step in done:
            if step.number <= self._heard:
                continue
            self._heard = step.number
            if step.device is None and not self._waiting:
                self._add(step, UNKNOWN)
            else:
                self._waiting.append((step, step.device))

    def _drain(self, overdue: int) -> None:
        """Move the waiting steps on whose device time is known, in their order, and the first `overdue` in any case."""
        device = self._device
        while self._waiting:
            step, span = self._waiting[0]
            measured = device.measure(span) if device is not None and span is not None else UNKNOWN
            if measured is None:
                if overdue <= 0:
                    return
                measured = UNKNOWN
            overdue -= 1
            self._waiting.popleft()
            self._add(step, measured)

    def _add(self, step: Step, device: int) -> None:
        """Add a step to the lines, with the device's time of it.

        Where there are many steps, a short one joins those before it that are like it.
        """
        number, start_ns, dur, lead, *_ = step
        if number < _EACH_STEPS or dur >= _SHARED_NS:
            if self._steps:
                self._share()
            self._lines.append(self._line(step, device))
            return
        sums = _sums(step, device)
        like = (kind_of(step), step.profiled, step.first, lead < 0, device < 0)
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
        lead, device = -1 if no_lead else lead, UNKNOWN if no_device else device
        several = f',"steps":{self._steps}' if self._steps > 1 else ""
        sums = (dur, lead, *parts, device, fetches, backwards, steps)
        self._lines.append(_LINE % (self._number, kind, self._start_ns, *sums, profiled, first, several))
        self._steps = 0

    def _line(self, step: Step, device: int, more: str = "") -> str:
        sums = _sums(step, device)
        return _LINE % (
            step.number,
            kind_of(step),
            step.start_ns + self._offset_ns,
            *sums,
            step.profiled,
            step.first,
            more,
        )

    def _write(self, outstanding: Sequence[str] = ()) -> None:
        if not (self._lines or outstanding) or self._log is None:
            return
        lines = "".join((*self._lines, *outstanding))
        self._lines.clear()
        self._log.write(lines)


def _sums(step: Step, device: int) -> tuple[int, ...]:
    """Return what the line of several steps has the sums of, in its order, with the device's time."""
    _, _, dur, lead, fetch, forward, backward, optimizer, fetches, _, backwards, steps, *_ = step
    return (dur, lead, fetch, forward, backward, optimizer, device, fetches, backwards, steps)
