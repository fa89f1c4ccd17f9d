"""Has nsys record a few steps and not the whole job: cudaProfilerStart before them, cudaProfilerStop behind them.

Only where asked for (--nsys on a machine with a GPU). nsys listens from the one call to the other. The step before the
window is heard too, and not marked: the device waits there for the first launches, as at the start of any profiler.
Where several ranks run under one nsys, the first to stop ends it for all; their last step may then be incomplete.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from dlprof.record.recorder import Recorder
from dlprof.record.stepping import Step

_DEFAULT = "10,2,5"

# Unless a window was asked for, one of slow steps begins sooner, and ends once it has been open for so long.
_SKIP_LEAST, _SKIP_NS, _RECORD_NS = 3, 3_000_000_000, 5_000_000_000


class Capture:
    """Opens and closes nsys' capture range. It is called behind Nvtx: the last step's range has then ended."""

    name = "capture"
    _recorder: Recorder

    def __init__(self) -> None:
        asked = os.environ.get("DLPROF_CAPTURE", "")
        self._asked = bool(asked)
        self._by_time = asked == "on"
        skip, warmup, self._active = map(int, (_DEFAULT if self._by_time or not asked else asked).split(","))
        self._skip = max(skip + warmup - 1, 0)  # steps before that which is heard and not marked
        self._first_ns = self._opened_ns = 0  # when training's first step had ended, and when the window began
        self._opened = False
        self._first = -1  # the first step of the window

    def start(self, recorder: Recorder) -> None:
        """Remember who asks."""
        self._recorder = recorder

    def step(self, done: Sequence[Step]) -> int | None:
        """Open or close the window if it is time."""
        clock = self._recorder.clock
        if not self._asked:
            return None
        now = done[-1].start_ns + done[-1].dur_ns
        self._first_ns = self._first_ns or now
        if clock.capturing or self._recorder.device.capturing():
            return clock.row.number + 1
        if not self._opened:
            passed = now - self._first_ns >= _SKIP_NS
            # What does not train may be a validation before training.
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
        """Close an open window, with what it has."""
        if not self._opened or not self._asked:
            return
        self._asked = False
        self._call("stop")
        self._recorder.window |= {"first_step": self._first, "last_step": self._recorder.clock.row.number - 1}

    def _call(self, what: str) -> None:
        """Call CUDA, with nothing left in the device's queue: what runs when nsys stops is not recorded."""
        import torch

        cuda: Any = torch.cuda
        try:
            if not cuda.is_available() or not cuda.is_initialized():
                raise RuntimeError("the job uses no GPU of NVIDIA")
            index = self._recorder.device.index
            cuda.synchronize(index) if index is not None else cuda.synchronize()
            getattr(cuda.profiler, what)()
        except Exception:
            self._asked = False
            raise
