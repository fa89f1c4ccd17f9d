"""The light layer: one line a step for the whole job, so that a run can be judged where nobody traced it."""

from __future__ import annotations

from collections import deque
from typing import Any

from dlprof.log import Log
from dlprof.recorder import BACKWARD, FETCH, FORWARD, OPTIMIZER, Recorder, Step

# Steps are written this often: a crash costs at most so much, and a step of a millisecond pays for no system call.
_WRITE_EVERY_NS = 250_000_000

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

    def start(self, recorder: Recorder) -> None:
        """Open the file."""
        self._log = Log(recorder.folder / "steps.jsonl")
        self._offset_ns = recorder.unix(0)
        self._device = _DeviceClock(recorder)

    def step(self, step: Step) -> None:
        """Add the step's line, once its device time is known, and write what has gathered."""
        device = self._device
        span = device.end_step() if device is not None else None
        if span is None and not self._waiting:
            self._add(step, -1)
        else:
            self._waiting.append((step, span))
            self._drain(len(self._waiting) - _MAX_WAITING)
        if step.start_ns + step.dur_ns - self._written_ns > _WRITE_EVERY_NS:
            self._written_ns = step.start_ns + step.dur_ns
            self._write()

    def stop(self) -> None:
        """Write the rest; a device time that is not known by now never will be."""
        self._drain(len(self._waiting))
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
        parts = step.parts
        self._lines.append(
            f'{{"step":{step.number},"kind":"{step.kind}","start_ns":{step.start_ns + self._offset_ns},'
            f'"dur_ns":{step.dur_ns},"lead_ns":{step.lead_ns},"fetch_ns":{parts[FETCH]},"forward_ns":{parts[FORWARD]},'
            f'"backward_ns":{parts[BACKWARD]},"optimizer_ns":{parts[OPTIMIZER]},"device_ns":{device_ns},'
            f'"fetches":{step.fetches},"backwards":{step.backwards},"optimizer_steps":{step.optimizer_steps},'
            f'"profiled":{step.profiled},"first":{step.first}}}\n'
        )

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
            recorder.first_forward = self._begin_step

    def _begin_step(self) -> None:
        try:
            self._begun = self._record()
        except Exception as e:  # noqa: BLE001 - host times are worth having without the device's
            self._give_up(e)

    def end_step(self) -> tuple[Any, Any] | None:
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
        self._recorder.first_forward = None
        self._begun = None
        self._recorder.warn(f"no device times from here on: {type(error).__name__}: {error}")
