"""dlprof: where does the time of a training step go, and what would you gain by changing what?

`open(path)` opens a recorded run or a folder of traces. `record()` records what a block of a script or a notebook
trains. `step()` and `annotate(name)` let a script mark its own steps and ranges, and cost next to nothing when nobody
records.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from dlprof.api import Run

__version__ = "0.1.0"

_F = TypeVar("_F", bound=Callable[..., Any])

# Set by hooks.py, in a process that is watched. Nothing here imports it, so that a script may always call us.
_recorder: Any = None


def open(path: str | os.PathLike[str]) -> Run:  # noqa: A001 - dlprof.open, as gzip.open
    """Open a recorded run, a folder of torch-profiler traces from anywhere, or one trace file.

    Nothing is read yet but which files there are: `result`, `frame("breakdown")`, `figure("timeline")` read them.

    Raises dlprof.errors.DlprofError where there is nothing to report on.
    """
    from dlprof.api import Run
    from dlprof.read.run import open_run

    return Run(open_run(path))


def record(path: str | os.PathLike[str] | None = None, **options: Any) -> AbstractContextManager[Any]:
    """Record what is trained inside a block: `with dlprof.record() as run: train()`. Then `run` is the opened run.

    `path` is the run folder; by default a new one under runs/, named after the script or notebook. The options are
    those of `dlprof wrap`: `window=(10, 2, 5)`, the steps to skip, to warm up and to trace; `trace=False`, without a
    trace; `flops="auto"`, "on" or "off"; `lines`, one or several of "module:function", or "auto"; `shapes=True`;
    `memory=True`; `nvtx=True`; `stacks="on"`, "off" or how many a second; `sample="auto"`, "off" or the seconds between
    two readings of the host and its GPUs.

    Raises TypeError or ValueError for options that make no sense, and nothing else: where this process cannot be
    recorded, one line on stderr says so, and the block runs unrecorded.
    """
    # Importing the package dlprof.record puts it in the place of this function; it can be called in the same way.
    block: AbstractContextManager[Any] = importlib.import_module("dlprof.record.in_process").record(path, **options)
    return block


def step() -> None:
    """Say that a step of the training loop has ended; from the first call on, steps end here and nowhere else."""
    if _recorder is not None:
        _recorder.clock.user_step()


def annotate(name: str) -> _Annotation:
    """Name a part of the script, as a context manager or a decorator; the name shows in the recorded trace."""
    return _Annotation(name)


class _Annotation:
    """A named range of the script; one entry at a time."""

    __slots__ = ("_name", "_range")

    def __init__(self, name: str) -> None:
        self._name = name
        self._range: Any = None

    def __enter__(self) -> None:
        if _recorder is not None:
            self._range = _recorder.clock.open_range(self._name)

    def __exit__(self, *_: object) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def __call__(self, function: _F) -> _F:
        name = self._name

        @functools.wraps(function)
        def annotated(*args: Any, **kwargs: Any) -> Any:
            # A range of its own for each call: the function may recurse or run in several threads.
            with _Annotation(name):
                return function(*args, **kwargs)

        return annotated  # type: ignore[return-value]
