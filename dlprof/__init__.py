"""dlprof: where does the time of a training step go, and what would you gain by changing what?

`open(path)` opens a recorded run or a folder of traces. `profile()` records the training loop in its block and says
where the time goes; `record()` only records. dlprof.callbacks does so for transformers' Trainer and for Lightning, and
`%load_ext dlprof` for a notebook's cells. `step()` and `annotate(name)` let a script mark its own steps and ranges, and
cost next to nothing when nobody records.
"""

from __future__ import annotations

import importlib
import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from dlprof.errors import DlprofError, DoesNotApply, NotMeasured
from dlprof.marks import __version__, annotate, step

if TYPE_CHECKING:
    from dlprof.api import Run
    from dlprof.profiling import Profile

__all__ = [
    "DlprofError",
    "DoesNotApply",
    "NotMeasured",
    "__version__",
    "annotate",
    "open",
    "profile",
    "record",
    "step",
]


def __dir__() -> list[str]:
    return __all__


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

    `path` is the run folder; by default a new one under runs/, named after the script or notebook. Where that holds a
    run, or cannot be written, it is another one, as with `dlprof wrap`. The options are
    those of `dlprof wrap`: `window=(10, 2, 5)`, the steps to skip, to warm up and to trace; `ranks="0,1,last"`,
    which ranks record a trace; `trace=False`, without any; `flops="auto"`, "on" or "off"; `lines`, one or several of
    "module:function", or "auto"; `shapes=True`; `memory=True`; `nvtx=True`; `stacks="on"`, "off" or how many a second;
    `sample="auto"`, "off" or the seconds between two readings of the host and its GPUs. `set={"loader.num_workers": 4}`
    overrides settings of the objects that the block makes, as `--set` does; those with which the job computes other
    numbers need `allow_numerics=True`. `keep_arguments=True` records the whole command line, but for what is named like
    a secret.

    Raises TypeError or ValueError for options that make no sense, and nothing else: where this process cannot be
    recorded, one line on stderr says so, and the block runs unrecorded.
    """
    block: AbstractContextManager[Any] = importlib.import_module("dlprof.record.in_process").record(
        open, path, **options
    )
    return block


def profile(
    path: str | os.PathLike[str] | None = None, *, quiet: bool = False, log: Any = False, **options: Any
) -> Profile:
    """Record a training loop and say where its time goes: `with dlprof.profile() as p:`, then `p.result`, `p.report`.

    As the block ends, rank 0 prints the verdict, unless `quiet`, and logs it and its figures: with `log=True` to the
    active runs of W&B and MLflow, or to a SummaryWriter, `log=writer`. `path` and the options are those of `record`. In
    a process that is recorded already, as by `dlprof wrap`, the block is part of that recording, and has no verdict.

    Raises TypeError or ValueError for options that make no sense, and nothing else: what fails is one line on stderr.
    """
    made: type[Profile] = importlib.import_module("dlprof.profiling").Profile
    return made(importlib.import_module("dlprof.record.in_process").record(open, path, **options), quiet=quiet, log=log)


def load_ipython_extension(shell: Any) -> None:
    """Add `%dlprof` and `%%dlprof` to a notebook: `%load_ext dlprof`."""
    importlib.import_module("dlprof.magic").load(shell)


# Importing the package dlprof.record puts it in the place of the function. It can be called too, and calls this.
_record = record
