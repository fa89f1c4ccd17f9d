"""Makes nsys record a few steps instead of the whole job: cudaProfilerStart before them, cudaProfilerStop after them.

Used only with --nsys on a machine with a GPU. nsys records everything between the two calls. This includes the step
before the window, which is not marked as traced: there the device waits for the first launches, as it does when any
profiler starts. If several ranks run under one nsys, the first rank to stop ends the recording for all of them, and
their last step may be incomplete.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from dlprof.record.recorder import Recorder
from dlprof.record.step_clock import Step

_DEFAULT = "10,2,5"

# If the user gave no window and steps are slow, the window begins after this many steps and this much time, and ends
# after this much time.
_SKIP_LEAST, _SKIP_NS, _RECORD_NS = 3, 3_000_000_000, 5_000_000_000


class Capture:
    """Opens and closes nsys' capture range. It is called after Nvtx, when the range of the last step has ended."""

    name = "capture"
    _recorder: Recorder

    def __init__(self) -> None:
        given = os.environ.get("DLPROF_CAPTURE", "")
        self._wanted = bool(given)
        self._by_time = given == "on"
        skip, warmup, self._active = map(int, (_DEFAULT if self._by_time or not given else given).split(","))
        self._skip = max(skip + warmup - 1, 0)  # steps before the first recorded one, which is not marked
        self._first_ns = self._opened_ns = 0  # when the first training step ended, and when the window began
        self._opened = False
        self._first = -1  # the first step of the window

    def start(self, recorder: Recorder) -> None:
        """Keep the recorder."""
        self._recorder = recorder

    def step(self, done: Sequence[Step]) -> int | None:
        """Open or close the window if it is time."""
        clock = self._recorder.clock
        if not self._wanted:
            return None
        now = done[-1].start_ns + done[-1].dur_ns
        self._first_ns = self._first_ns or now
        if clock.capturing or self._recorder.device.capturing():
            return clock.row.number + 1
        if not self._opened:
            passed = now - self._first_ns >= _SKIP_NS
            # Steps that do not train may be a validation before training.
            due = clock.position >= self._skip and (clock.trains or passed)
            if due or (self._by_time and clock.trains and clock.position >= _SKIP_LEAST and passed):
                self._call("start")
                self._opened, self._opened_ns, self._first = True, now, clock.row.number + 1
                clock.row.profiled = 1
            return clock.row.number + 1
        clock.row.profiled = 1
        steps = clock.row.number - self._first
        if steps >= self._active or (self._by_time and steps > 0 and now - self._opened_ns >= _RECORD_NS):
            self.stop()
            return None
        return clock.row.number + 1

    def stop(self) -> None:
        """Close the window if it is open, even if it is incomplete."""
        if not self._opened or not self._wanted:
            return
        self._wanted = False
        self._call("stop")
        self._recorder.window |= {"first_step": self._first, "last_step": self._recorder.clock.row.number - 1}

    def _call(self, what: str) -> None:
        """Call CUDA once the device's queue is empty: nsys drops what still runs when it stops."""
        import torch

        cuda: Any = torch.cuda
        try:
            if not cuda.is_available() or not cuda.is_initialized():
                raise RuntimeError("the job uses no GPU of NVIDIA")
            index = self._recorder.device.index
            cuda.synchronize(index) if index is not None else cuda.synchronize()
            getattr(cuda.profiler, what)()
        except Exception:
            self._wanted = False
            raise
