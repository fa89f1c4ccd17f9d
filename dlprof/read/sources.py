"""Lists what dlprof itself records that is read for a rank; each source is read into a Reading.

Formats of other tools are in formats.py. logs.py reads logs, and facts.py JSON objects. Any other format has its
own module with `read(path)`, which imports no other reader.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlprof.run_folder import RECORDS, SAMPLES, STACKS

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Reading:
    """The contents of one file of one rank.

    `tables`: names and columns as in dlprof/schema.py, checked. `facts`: everything but rows (rank, world_size, host,
    devices, backend, groups, base_time_ns, schema); an unknown one is absent. `warnings`: a line for each problem.
    `lacks`: tables that the file could hold and does not, each with the tool's option that records it.
    """

    tables: Mapping[str, pd.DataFrame]
    facts: Mapping[str, Any]
    warnings: tuple[str, ...] = ()
    lacks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """What a rank leaves on disk of one kind: a log among others in a file, or a file of its own; and its tables.

    `files`: its names (the first that exists is read); of a log `within` a file, those of older recordings, named after
    the log. Several sources may have rows of one table. That of a host is read with its first rank.
    """

    name: str
    files: tuple[str, ...]
    tables: tuple[str, ...]
    absent: str  # why the file may be missing, in words for the user
    # Raises DlprofError if the file cannot be read or is no such log. With a path, and what the log's lines begin with.
    read: Callable[..., Reading]
    within: str = ""
    of_host: bool = False

    @property
    def log(self) -> str:
        """The name of its log."""
        return self.files[0].partition(".")[0]

    @property
    def place(self) -> str:
        """Where it is recorded, in words."""
        return f"{self.log} in {self.within}" if self.within else self.files[0]

    @property
    def recorder(self) -> str:
        """The module below dlprof/record that writes it."""
        return _RECORDERS[self.name]


def lazily(module: str, function: str = "read", *args: Any) -> Callable[..., Reading]:
    """Return a function of a module below dlprof.read that is imported, with pandas, when the first file is read.

    It is called with the path, the piece where there is one, `args`, and names that the caller gives.
    """
    return partial(_read, module, function, args)


def _read(module: str, function: str, args: tuple[Any, ...], path: Path, *piece: str, **more: str) -> Reading:
    reading: Reading = getattr(importlib.import_module(f"dlprof.read.{module}"), function)(path, *piece, *args, **more)
    return reading


def _log(table: str, absent: str, *required: str, name: str = "", file: str = "", **default: str | int) -> Source:
    """Describe a log of a table's rows; `required` and `default`: see `logs.rows`."""
    files, within = (f"{file or table}.jsonl",), "" if file else RECORDS
    return Source(name or table, files, (table,), absent, lazily("logs", "rows", table, required, default), within)


def _samples(name: str, *, of_host: bool = False) -> Source:
    """Describe a sampler's log, read into rows of the table "samples" with its name as their source."""
    read = lazily("logs", "samples", name)
    return Source(name, (f"{name}.jsonl",), ("samples",), _NOT_SAMPLED, read, SAMPLES, of_host)


# By the name of a source.
_RECORDERS = {
    "compiled": "collectors/compiled.py",
    "fetches": "collectors/loader.py",
    "flight_recorder": "still.py",
    "gpu": "samplers/gpu.py",
    "held": "collectors/held.py",
    "host": "samplers/host.py",
    "lines": "collectors/lines.py",
    "loading": "collectors/loader.py",
    "loss_scale": "collectors/losses.py",
    "losses": "collectors/losses.py",
    "memory": "collectors/memory.py",
    "modules": "collectors/trace.py",
    "overrides": "collectors/overrides.py",
    "pipeline": "collectors/pipeline.py",
    "processes": "samplers/host.py",
    "stacks": "samplers/stacks.py",
    "stalls": "collectors/stalls.py",
    "steps": "collectors/steps.py",
    "torch_trace": "collectors/trace.py",
}

_ONLY = "(only `dlprof wrap` and `dlprof run` leave one)"
_NO_LOADING = f"no record of every batch {_ONLY}"
_NOT_SAMPLED = "nothing was sampled next to the job (only `dlprof wrap` and `dlprof run` do, without --no-sample)"

# To add a source: a line here, its tables in dlprof/schema.py, and a reader, unless it is a log of rows or of samples.
SOURCES: tuple[Source, ...] = (
    _log(
        "compiled",
        "no graph of torch.compile was recorded (a job with torch.compile under `dlprof wrap` leaves them)",
        *("graph", "operator", "module"),
    ),
    # What workers write of the table "loading".
    _log("loading", _NO_LOADING, "pid", "start_ns", "dur_ns", "count", name="fetches", file="fetches", kind="fetch"),
    Source(
        "flight_recorder",
        ("flight_recorder.json",),
        ("recorder_calls",),
        "no dump of PyTorch's flight recorder (a recorded rank leaves one when it stands still)",
        lazily("dumps.flight_recorder"),
    ),
    _samples("gpu"),
    Source(
        "held",
        ("held.json",),
        ("held",),
        "it was not counted what memory holds (`dlprof wrap` and `dlprof run` do, in the tenth step or a later one)",
        lazily("facts", "read_held"),
        RECORDS,
    ),
    _samples("host", of_host=True),
    Source(
        "lines",
        ("lines.jsonl",),
        ("lines",),
        "no lines were counted (`--lines MODULE:FUNCTION` counts them)",
        lazily("logs", "read_lines"),
    ),
    _log("loading", _NO_LOADING, "kind", "start_ns", "dur_ns", "count", "step"),
    _log(
        "loss_scale",
        "no record of a gradient scaler (a job with torch.amp.GradScaler under `dlprof wrap` leaves one)",
        *("at_ns", "step", "kind"),
        count=1,
    ),
    _log("losses", "losses were not recorded (`dlprof wrap --losses SEED` does that)", "step"),
    _log(
        "memory",
        "the CUDA allocator was not sampled (`dlprof wrap` does that where a job uses a GPU)",
        *("at_ns", "step", "allocated_bytes", "reserved_bytes"),
    ),
    _log("modules", f"the model's modules were not recorded {_ONLY}", "parameters", "parameter_bytes"),
    Source(
        "overrides",
        ("overrides.json",),
        ("overrides",),
        "no setting was overridden (`--set NAME=VALUE` does that)",
        lazily("facts", "read_overrides"),
        RECORDS,
    ),
    _log(
        "chunks",
        "no pipeline stages were recorded (a job with torch.distributed.pipelining under `dlprof wrap` leaves them)",
        *("step", "action", "start_ns", "dur_ns"),
        name="pipeline",
    ),
    _samples("processes"),
    Source(
        "stacks",
        ("stacks.txt.gz", "stacks.part"),
        ("stacks",),
        "no Python stacks were seen (py-spy was off, not there, not permitted, or had no time)",
        lazily("stacks"),
        STACKS,
    ),
    _log(
        "stalls",
        f"no record of garbage collection, checkpoints and compiling {_ONLY}",
        *("kind", "start_ns", "dur_ns", "step"),
        phase="rest",  # an older dlprof writes neither phase nor count
        count=1,
    ),
    Source(
        "steps",
        ("steps.jsonl",),
        ("steps",),
        f"no record of every step {_ONLY}",
        lazily("logs", "read_steps"),
        RECORDS,
    ),
    Source(
        "torch_trace",
        ("trace.json.gz", "trace.json"),
        ("spans", "traced_steps"),
        "no torch-profiler trace of this rank",
        lazily("kineto.torch_trace"),
    ),
)
