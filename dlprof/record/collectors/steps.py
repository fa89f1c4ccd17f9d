"""The step log: one line a step for the whole job, so that a run can be judged where nobody traced it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from dlprof.record.device.device import UNKNOWN, DeviceClock
from dlprof.record.log import WRITE_EVERY_NS, Log
from dlprof.record.recorder import Recorder
from dlprof.record.stepping import Step, kind_of

# A job may write 50 MB an hour and rank, and steps of a millisecond would write 900. So after so many that have a line
# each, short ones share a line until they fill it: 25 lines a second, or 23 MB an hour. A long one keeps its own.
_EACH_STEPS = 10_000
_SHARED_NS = 40_000_000

# In %-format, which takes half the time that f-strings take.
_LINE = (
    '{"step":%s,"kind":"%s","start_ns":%s,"dur_ns":%s,"lead_ns":%s,"fetch_ns":%s,"forward_ns":%s,"backward_ns":%s,'
    '"optimizer_ns":%s,"device_step_ns":%s,"fetches":%s,"forwards":%s,"backwards":%s,'
    '"optimizer_steps":%s,"unused_forward_ns":%s,"samples":%s,"inputs":%s,"tokens":%s,"profiled":%s,"first":%s%s}\n'
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
    _device: DeviceClock

    def __init__(self) -> None:
        self._log: Log | None = None
        self._lines: list[str] = []
        self._written_ns = 0
        self._offset_ns = 0
        self._waiting: deque[Step] = deque()
        # The steps that share the next line, with their times on the device, and what they have in common.
        self._shared: list[tuple[Step, int]] = []
        self._shared_ns = 0
        self._alike: tuple[Any, ...] = ()
        # What is above belongs to whoever holds this: the training thread, or the one that saves. Reentrant, for a
        # signal's handler may come upon the training thread in here.
        self._lock = threading.RLock()
        self._seen = -1  # the number of the last step that was taken in
        self._saved = -1  # and that of the last one that was saved without its device time

    def start(self, recorder: Recorder) -> None:
        """Open the file."""
        self._log = Log(recorder.folder / "steps.jsonl")
        self._offset_ns = recorder.unix(0)
        self._device = DeviceClock(recorder.clock, recorder.device, recorder.warn)

    def step(self, done: Sequence[Step]) -> None:
        """Add each step's line, once its device time is known, and write what has gathered."""
        with self._lock:
            self._take(done)
            self._drain(len(self._waiting) - _MAX_WAITING)
            now = done[-1].end_ns
            if now - self._written_ns >= WRITE_EVERY_NS:
                self._written_ns = now
                self._write()

    def save(self, done: Sequence[Step]) -> None:
        """Write all steps that have ended, those whose device time is outstanding without it."""
        with self._lock:
            self._take(done)
            self._share()
            unsaved = [step for step in self._waiting if step.number > self._saved]
            self._write([self._line(step, _figures(step, UNKNOWN), _OUTSTANDING) for step in unsaved])
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
        """Take in the steps that are new."""
        for step in done:
            if step.number <= self._seen:
                continue
            self._seen = step.number
            if step.device is None and not self._waiting:
                self._add(step, UNKNOWN)
            else:
                self._waiting.append(step)

    def _drain(self, overdue: int) -> None:
        """Move the waiting steps on whose device time is known, in their order, and the first `overdue` in any case."""
        while self._waiting:
            step = self._waiting[0]
            measured = UNKNOWN if step.device is None else self._device.measure(step.device)
            if measured is None and overdue <= 0:
                return
            overdue -= 1
            self._waiting.popleft()
            self._add(step, UNKNOWN if measured is None else measured)

    def _add(self, step: Step, device: int) -> None:
        """Add a step and its time on the device; where there are many steps, short ones that are alike share a line."""
        if step.number < _EACH_STEPS or step.dur_ns >= _SHARED_NS:
            self._share()
            self._lines.append(self._line(step, _figures(step, device)))
            return
        alike = (kind_of(step), step.profiled, step.first, step.lead_ns < 0, device < 0)
        if alike != self._alike:
            self._share()
            self._alike = alike
        self._shared.append((step, device))
        self._shared_ns += step.dur_ns
        if self._shared_ns >= _SHARED_NS:
            self._share()

    def _share(self) -> None:
        """End the line that short steps share."""
        if not self._shared:
            return
        shared, self._shared, self._shared_ns = self._shared, [], 0
        columns = zip(*(_figures(step, device) for step, device in shared), strict=True)
        sums = [-1 if min(column) < 0 else sum(column) for column in columns]
        self._lines.append(self._line(shared[0][0], sums, f',"steps":{len(shared)}' if len(shared) > 1 else ""))

    def _line(self, step: Step, figures: Sequence[int], more: str = "") -> str:
        start_ns = step.start_ns + self._offset_ns
        return _LINE % (step.number, kind_of(step), start_ns, *figures, step.profiled, step.first, more)

    def _write(self, outstanding: Sequence[str] = ()) -> None:
        lines, self._lines = [*self._lines, *outstanding], []
        if lines and self._log is not None:
            self._log.write("".join(lines))


def _figures(step: Step, device: int) -> tuple[int, ...]:
    """Return what a line of several steps has the sums of, in its order; −1: not measured."""
    _, _, *times, fetches, forwards, backwards, steps, _, _, _, unused, samples, inputs, tokens = step
    return (*times, device, fetches, forwards, backwards, steps, unused, samples, inputs, tokens)
