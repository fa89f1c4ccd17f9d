"""What NVIDIA's tools see of a rank: NVTX ranges, and the steps that nsys records.

With --nvtx or --nsys, steps, their phases and collectives are NVTX ranges, for the whole job. They go through PyTorch's
own binding, or through the package nvtx if PyTorch was built without CUDA. They cost little while no tool listens. Two
things have no range: work before the first backward pass, and collectives that DistributedDataParallel issues from C++
(NCCL names those itself).

With --nsys on a machine with a GPU, nsys records a few steps instead of the whole job: cudaProfilerStart before them,
cudaProfilerStop after them. It records everything between the two calls. This includes the step before the window,
which is not marked as traced: there the device waits for the first launches, as it does when any profiler starts. If
several ranks run under one nsys, the first rank to stop ends the recording for all of them, and their last step may be
incomplete.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dlprof.record.attribution import passing
from dlprof.record.captured import capture_test
from dlprof.record.hooks import hidden, put
from dlprof.record.recorder import Recorder
from dlprof.record.step_clock import Step

_GATHERING = ("all_gather", "all_gather_into_tensor", "all_gather_object", "gather")
_REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
_SPREADING = ("all_to_all", "all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "scatter")
_POINT_TO_POINT = ("batch_isend_irecv", "irecv", "isend", "recv", "send")


class Library(NamedTuple):
    """The functions of an NVTX library. Pushed ranges nest within their thread; started ranges need not."""

    push: Callable[[str], Any]
    pop: Callable[[], Any]
    start: Callable[[str], Any]
    end: Callable[[Any], Any]


class Nvtx:
    """Opens the ranges dlprof::step N, dlprof::fetch, forward, backward, optimizer and dlprof::COLLECTIVE."""

    name = "nvtx"

    def __init__(self) -> None:
        self._library: Library | None = None
        self._step: Any = None  # the range of the current step
        self._wanted = os.environ.get("DLPROF_NVTX") == "on"
        if self._wanted:
            # Now, when torch was just imported: later the script may hold the originals by names of its own.
            self._watch_collectives()

    def start(self, recorder: Recorder) -> None:
        """Open a range for the current step, and from now on one for each phase."""
        if not self._wanted:
            return
        self._library = library = _library()
        if library is None:
            recorder.warn("no NVTX ranges: this PyTorch was built without CUDA, and the package nvtx is not installed")
            return
        recorder.clock.ranges.append(functools.partial(_Range, library))
        self._step = library.start(f"dlprof::step {recorder.clock.row.number}")

    def step(self, done: Sequence[Step]) -> int | None:
        """End the range of a step and start the next one. Phases and the script's own ranges may overlap its ends."""
        if self._library is None:
            return None
        begun = done[-1].number + 1
        self._library.end(self._step)
        self._step = self._library.start(f"dlprof::step {begun}")
        return begun + 1

    def stop(self) -> None:
        """End the last step's range."""
        library, self._library = self._library, None
        if library is not None:
            library.end(self._step)

    def _watch_collectives(self) -> None:
        import torch
        import torch.distributed as distributed

        if not distributed.is_available():
            return
        is_compiling, is_captured = torch.compiler.is_compiling, capture_test()

        def named(name: str, original: Callable[..., Any]) -> Any:
            @functools.wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                library = self._library
                if library is None or is_compiling() or is_captured():
                    return original(*args, **kwargs)
                library.push(name)
                try:
                    with passing:
                        return original(*args, **kwargs)
                finally:
                    library.pop()

            return hidden(call)

        for name in (*_GATHERING, *_REDUCING, *_SPREADING, *_POINT_TO_POINT):
            original = getattr(distributed, name, None)
            if original is not None:
                wrapper = named(f"dlprof::{name}", original)
                put(distributed, name, wrapper)
                put(distributed.distributed_c10d, name, wrapper)


class _Range(NamedTuple):
    """A pushed range, as a context."""

    library: Library
    name: str

    def __enter__(self) -> None:
        self.library.push(self.name)

    def __exit__(self, *_: object) -> None:
        self.library.pop()


def _library() -> Library | None:
    """Return PyTorch's NVTX or else that of the package nvtx; None if neither is installed."""
    import torch

    ours: Any = getattr(torch._C, "_nvtx", None)
    if ours is not None:
        return Library(ours.rangePushA, ours.rangePop, ours.rangeStartA, ours.rangeEnd)
    try:
        nvtx: Any = importlib.import_module("nvtx")
    except ImportError:
        return None
    return Library(nvtx.push_range, nvtx.pop_range, nvtx.start_range, nvtx.end_range)


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
