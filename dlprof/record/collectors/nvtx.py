"""Names what a rank does for NVIDIA's tools: steps, their phases and collectives as NVTX ranges, for the whole job.

Only where asked for (--nvtx, --nsys). The ranges go through PyTorch's own binding, or through the package nvtx where
PyTorch was built without CUDA; they cost little while nobody listens. Not named: what runs before the first backward
pass, and collectives that DistributedDataParallel issues from C++ (NCCL names those itself).
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dlprof.record.hooks import hidden, put
from dlprof.record.recorder import Recorder
from dlprof.record.stepping import Step

_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)


@dataclass(frozen=True)
class Library:
    """What speaks NVTX. Ranges that are pushed nest in their thread; those that are started need not."""

    push: Callable[[str], Any]
    pop: Callable[[], Any]
    start: Callable[[str], Any]
    end: Callable[[Any], Any]


class Nvtx:
    """Opens the ranges dlprof::step N, dlprof::fetch, forward, backward, optimizer and dlprof::COLLECTIVE."""

    name = "nvtx"

    def __init__(self) -> None:
        self._library: Library | None = None
        self._step: Any = None
        self._asked = os.environ.get("DLPROF_NVTX") == "on"
        if self._asked:
            # Now, when torch was just imported: later the script may hold the originals by names of its own.
            self._watch_collectives()

    def start(self, recorder: Recorder) -> None:
        """Open a range for the step that is under way, and from now on one for each phase."""
        if not self._asked:
            return
        self._recorder = recorder
        library = _library()
        if library is None:
            recorder.warn("no NVTX ranges: this PyTorch was built without CUDA, and the package nvtx is not installed")
            return
        self._library = library
        recorder.clock.ranges.append(functools.partial(_Range, library))
        self._step = library.start(f"dlprof::step {recorder.clock.row.number}")

    def step(self, done: Sequence[Step]) -> int | None:
        """End a step's range and start the next one's: phases and the script's own ranges may cross its ends."""
        library = self._library
        if library is None:
            return None
        library.end(self._step)
        begun = done[-1].number + 1
        self._step = library.start(f"dlprof::step {begun}")
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
        is_compiling = torch.compiler.is_compiling

        def named(name: str, original: Callable[..., Any]) -> Any:
            @functools.wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                library = self._library
                if library is None or is_compiling():
                    return original(*args, **kwargs)
                library.push(name)
                try:
                    return original(*args, **kwargs)
                finally:
                    library.pop()

            return hidden(call)

        for name in _COLLECTIVES:
            original = getattr(distributed, name, None)
            if original is not None:
                watched = named(f"dlprof::{name}", original)
                put(distributed, name, watched)
                put(distributed.distributed_c10d, name, watched)


class _Range:
    """A pushed range, as a context."""

    __slots__ = ("_library", "_name")

    def __init__(self, library: Library, name: str) -> None:
        self._library = library
        self._name = name

    def __enter__(self) -> None:
        self._library.push(self._name)

    def __exit__(self, *_: object) -> None:
        self._library.pop()


def _library() -> Library | None:
    """Return PyTorch's NVTX, else the package's; None: there is neither."""
    import torch

    ours: Any = getattr(torch._C, "_nvtx", None)
    if ours is not None:
        return Library(ours.rangePushA, ours.rangePop, ours.rangeStartA, ours.rangeEnd)
    try:
        nvtx: Any = importlib.import_module("nvtx")
    except ImportError:
        return None
    return Library(nvtx.push_range, nvtx.pop_range, nvtx.start_range, nvtx.end_range)
