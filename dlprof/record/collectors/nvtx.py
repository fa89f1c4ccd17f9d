"""Names what a rank does for NVIDIA's tools: steps, their phases and collectives as NVTX ranges, for the whole job.

Used only with --nvtx or --nsys. The ranges go through PyTorch's own binding, or through the package nvtx if PyTorch was
built without CUDA. They cost little while no tool listens. Two things have no range: work before the first backward
pass, and collectives that DistributedDataParallel issues from C++ (NCCL names those itself).
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dlprof.record.calls.attribution import passing
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
                watched = named(f"dlprof::{name}", original)
                put(distributed, name, watched)
                put(distributed.distributed_c10d, name, watched)


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
