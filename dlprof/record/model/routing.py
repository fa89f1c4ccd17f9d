"""Records the sizes of all-to-alls as ranges in the trace: torch's profiler does not record them for gloo.

Only while the profiler records. "dlprof::all_to_all 3,5>4,1": 3 and 5 rows go to the ranks, 4 and 1 come from them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

from dlprof.record.calls.attribution import passing
from dlprof.record.captured import capture_test, unseen_range
from dlprof.record.hooks import hidden, put
from dlprof.record.recorder import Recorder
from dlprof.record.step_clock import Step

# Names take memory and time. Larger groups use NCCL, whose sizes are in the trace anyway.
_MOST_RANKS = 64


class Routing:
    """Opens a range around each all_to_all_single in the trace's window."""

    name = "routing"

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        # Now, when torch was just imported: later the script may have imported the original under its own name.
        self._wrap()

    def start(self, recorder: Recorder) -> None:
        """Record sizes from now on, while the profiler records."""
        self._recorder = recorder

    def step(self, done: Sequence[Step]) -> None:
        """Do nothing: the ranges are in the trace."""

    def stop(self) -> None:
        """Stop recording."""
        self._recorder = None

    def _wrap(self) -> None:
        import torch
        import torch.distributed as distributed

        original: Callable[..., Any] | None = getattr(distributed, "all_to_all_single", None)
        if original is None:  # a torch without torch.distributed
            return
        profiler: Any = torch.autograd.profiler
        is_compiling, is_captured, named = torch.compiler.is_compiling, capture_test(), unseen_range()

        @functools.wraps(original)
        def all_to_all_single(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or self._recorder is None or not profiler._is_profiler_enabled or is_captured():
                return original(*args, **kwargs)
            name = self._name(*args, **kwargs)
            with passing, contextlib.nullcontext() if name is None else named(name):
                return original(*args, **kwargs)

        wrapped = hidden(all_to_all_single)
        put(distributed, "all_to_all_single", wrapped)
        put(distributed.distributed_c10d, "all_to_all_single", wrapped)

    def _name(
        self, _output: Any = None, _input: Any = None, takes: Any = None, gives: Any = None, *_: Any, **more: Any
    ) -> str | None:
        """Return the name of a call's range; None if its sizes are unknown."""
        try:
            takes = more.get("output_split_sizes", takes) or ()
            gives = more.get("input_split_sizes", gives) or ()
            if len(takes) > _MOST_RANKS or not all(type(n) is int for n in (*takes, *gives)):
                return None
            return f"dlprof::all_to_all {','.join(map(str, gives))}>{','.join(map(str, takes))}"
        except Exception as e:  # noqa: BLE001 - the script goes on
            if self._recorder is not None:
                self._recorder.drop(self, e)
            return None
