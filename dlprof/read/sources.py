"""The raw formats, each read into a Reading, and the list of what is read of a rank.

Logs of lines that are rows are read by logs.py, samplers' by samples.py. Any other format has a file of its own with
`read(path)`, which imports no other reader.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Reading:
    """What one file says about one rank.

    `tables`: names and columns of dlprof/schema.py, checked. `facts`: what stands beside the rows (rank, world_size,
    host, devices, backend, groups, base_time_ns, schema); one that the file does not say is absent. `warnings`: one
    line each, what was lost or is odd.
    """

    tables: Mapping[str, pd.DataFrame]
    facts: Mapping[str, Any]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """One thing that a rank leaves on disk: its files (the first that is there is read), and the tables they hold.

    Several sources may give rows of one table. What is a host's lies in its folder and is read with its first rank.
    """

    name: str
    files: tuple[str, ...]
    tables: tuple[str, ...]
    absent: str  # why there is none, in words for the user
    read: Callable[[Path], Reading]  # raises DlprofError where the file cannot be read or is no such log
    of_host: bool = False


# Reading needs pandas, and who only wants to know which files there are does not wait for its import. So what follows
# imports a format's module with the first file that is read.


def _module(name: str) -> Callable[[Path], Reading]:
    """Return the `read` of a module of the package `dlprof.read`."""

    def read(path: Path) -> Reading:
        reading: Reading = importlib.import_module(f"dlprof.read.{name}").read(path)
        return reading

    return read


def _log(table: str, *required: str, **default: str | int) -> Callable[[Path], Reading]:
    """Return what reads a log of the table's rows; `required` and `default`: see `logs.read_log`."""

    def read(path: Path) -> Reading:
        from dlprof.read import logs

        frame, warnings = logs.read_log(path, table, required, default)
        return Reading({table: frame}, {}, warnings)

    return read


def _samples(source: str) -> Callable[[Path], Reading]:
    """Return what reads a sampler's log into rows of the table "samples", with this as their source."""

    def read(path: Path) -> Reading:
        from dlprof.read import samples

        frame, warnings = samples.read_samples(path, source)
        return Reading({"samples": frame}, {}, warnings)

    return read


_NOT_SAMPLED = "nothing was sampled beside the job (only `dlprof wrap` and `dlprof run` do, without --no-sample)"

# What is read of a rank. To add a source: its line here, its tables in dlprof/schema.py, and its reader where it is
# neither a log of rows nor one of samples.
SOURCES: tuple[Source, ...] = (
    Source(
        "fetches",
        ("fetches.jsonl",),
        ("fetches",),
        "no record of what fetching a batch takes (only `dlprof wrap` and `dlprof run` leave one)",
        _log("fetches", "pid", "start_ns", "dur_ns", "count"),
    ),
    Source("gpu", ("gpu.jsonl",), ("samples",), _NOT_SAMPLED, _samples("gpu")),
    Source("host", ("host.jsonl",), ("samples",), _NOT_SAMPLED, _samples("host"), of_host=True),
    Source(
        "lines",
        ("lines.jsonl",),
        ("lines",),
        "no lines were counted (`--lines MODULE:FUNCTION` counts them)",
        _module("lines"),
    ),
    Source(
        "loading",
        ("loading.jsonl",),
        ("loading",),
        "no record of every batch (only `dlprof wrap` and `dlprof run` leave one)",
        _log("loading", "kind", "start_ns", "dur_ns", "count", "step"),
    ),
    Source(
        "memory",
        ("memory.jsonl",),
        ("memory",),
        "nothing was asked of the CUDA allocator (a job on a GPU under `dlprof wrap` leaves its answers)",
        _log("memory", "at_ns", "step", "allocated_bytes", "reserved_bytes"),
    ),
    # Its file is of any name: dlprof/read/run.py looks for it.
    Source("nvidia_smi", (), ("samples",), _NOT_SAMPLED, _module("nvidia_smi")),
    Source(
        "pipeline",
        ("chunks.jsonl",),
        ("chunks",),
        "no pipeline stages were recorded (a job with torch.distributed.pipelining under `dlprof wrap` leaves them)",
        _log("chunks", "step", "action", "start_ns", "dur_ns"),
    ),
    Source("processes", ("processes.jsonl",), ("samples",), _NOT_SAMPLED, _samples("processes")),
    Source(
        "stacks",
        ("stacks.txt.gz", "stacks.part"),
        ("stacks",),
        "no Python stacks were seen (py-spy was off, not there, not permitted, or had no time)",
        _module("stacks"),
    ),
    Source(
        "stalls",
        ("stalls.jsonl",),
        ("stalls",),
        "no record of garbage collection, checkpoints and compiling (only `dlprof wrap` and `dlprof run` leave one)",
        # An older dlprof leaves out the phase and the count.
        _log("stalls", "kind", "start_ns", "dur_ns", "step", phase="rest", count=1),
    ),
    Source(
        "steps",
        ("steps.jsonl",),
        ("steps",),
        "no record of every step (only `dlprof wrap` and `dlprof run` leave one)",
        _module("steps"),
    ),
    Source(
        "torch_trace",
        ("trace.json.gz", "trace.json"),
        ("spans", "traced_steps"),
        "no torch-profiler trace of this rank",
        _module("kineto.torch_trace"),
    ),
)
