"""The step log: one line per step for the whole job, so that steps outside the trace can be judged too."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from dlprof.record.device.gpu import UNKNOWN, DeviceClock
from dlprof.record.log import WRITE_EVERY_NS, Part
from dlprof.record.recorder import Recorder
from dlprof.record.step_clock import Step, kind_of

# A rank may write 50 MB an hour, and steps of a millisecond would write 900 MB. So this many steps have a line each.
# After that, short steps share lines of this duration: 25 lines a second, or 23 MB an hour. Longer steps do not share.
_EACH_STEPS = 10_000
_SHARED_NS = 40_000_000

# In %-format, which takes half the time that f-strings take.
_LINE = (
    '{"step":%s,"kind":"%s","start_ns":%s,"dur_ns":%s,"lead_ns":%s,"fetch_ns":%s,"forward_ns":%s,"backward_ns":%s,'
    '"optimizer_ns":%s,"device_step_ns":%s,"fetches":%s,"forwards":%s,"backwards":%s,'
    '"optimizer_steps":%s,"unused_forward_ns":%s,"samples":%s,"inputs":%s,"tokens":%s,"profiled":%s,"first":%s%s}\n'
)

# The most steps that wait for their device time. If the device is further behind, a step is written without it. About
# 1,024 launches fit into a stream's queue before the host must wait, and a step has at least a launch and an event. So
# even a job that replays one graph per step, whose device is furthest behind, does not reach this number.
_MAX_WAITING = 1_024

# A step whose device time is unknown is saved with this mark, and written again once the time is known. The marked line
# counts only if no other line of the step follows, as when the job ended before.
_OUTSTANDING = ',"outstanding":1'


class Steps:
    """Writes the log `steps`: keys and units as in the table `steps`."""

    name = "steps"
    _device: DeviceClock

    def __init__(self) -> None:
        self._log: Part | None = None
        self._lines: list[str] = []
        self._written_ns = 0
        self._offset_ns = 0
        self._waiting: deque[Step] = deque()
        # The steps that share the next line with their device times, their duration, and what they have in common.
        self._shared: list[tuple[Step, int]] = []
        self._shared_ns = 0
        self._alike: tuple[Any, ...] = ()
        # Guards the fields above: the training thread and the thread that saves use them. It is reentrant because a
        # signal handler may interrupt the training thread here.
        self._lock = threading.RLock()
        self._seen = -1  # the number of the last step that was added
        self._saved = -1  # the number of the last step that was saved without its device time

    def start(self, recorder: Recorder) -> None:
        """Begin the log."""
        self._log = recorder.log("steps")
        self._offset_ns = recorder.unix(0)
        self._device = DeviceClock(recorder.clock, recorder.device, recorder.warn)

    def step(self, done: Sequence[Step]) -> None:
        """Add the line of each step once its device time is known, and write the lines from time to time."""
        with self._lock:
            self._take(done)
            self._drain(len(self._waiting) - _MAX_WAITING)
            now = done[-1].end_ns
            if now - self._written_ns >= WRITE_EVERY_NS:
                self._written_ns = now
                self._write()

    def save(self, done: Sequence[Step]) -> None:
        """Write all steps that have ended; a step whose device time is unknown is written without it."""
        with self._lock:
            self._take(done)
            self._share()
            unsaved = [step for step in self._waiting if step.number > self._saved]
            self._write([self._line(step, _figures(step, UNKNOWN), _OUTSTANDING) for step in unsaved])
            if unsaved:
                self._saved = unsaved[-1].number

    def stop(self) -> None:
        """Write the rest. Device times that are unknown now stay unknown."""
        with self._lock:
            self._drain(len(self._waiting))
            self._share()
            self._write()
            self._log = None

    def _take(self, done: Sequence[Step]) -> None:
        """Add the steps that are new."""
        for step in done:
            if step.number <= self._seen:
                continue
            self._seen = step.number
            if step.device is None and not self._waiting:
                self._add(step, UNKNOWN)
            else:
                self._waiting.append(step)

    def _drain(self, overdue: int) -> None:
        """Add the waiting steps in order while their device times are known; the first `overdue` are added without."""
        while self._waiting:
            step = self._waiting[0]
            measured = UNKNOWN if step.device is None else self._device.measure(step.device)
            if measured is None and overdue <= 0:
                return
            overdue -= 1
            self._waiting.popleft()
            self._add(step, UNKNOWN if measured is None else measured)

    def _add(self, step: Step, device: int) -> None:
        """Add a step with its time on the device. In a job of many steps, similar short steps share a line."""
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
        """Complete the line that short steps share."""
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
    """Return the figures that a line of several steps sums, in the order of the line; −1 if not measured."""
    _, _, *times, fetches, forwards, backwards, steps, _, _, _, unused, samples, inputs, tokens = step
    return (*times, device, fetches, forwards, backwards, steps, unused, samples, inputs, tokens)
