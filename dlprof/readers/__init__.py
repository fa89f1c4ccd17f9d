"""One file a raw format: each has `read(path)`, which gives a Reading, and imports no other reader."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Reading:
    """What one file says about one rank.

    `tables`: names and columns of dlprof/tables.py, checked. `facts`: what stands beside the rows (rank, world_size,
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

    reader: str  # module of this package
    files: tuple[str, ...]
    tables: tuple[str, ...]
    absent: str  # why there is none, in words for the user
    of_host: bool = False

    def read(self, path: Path) -> Reading:
        """Read a file of this source; raises DlprofError where it cannot be read."""
        reading: Reading = importlib.import_module(f"{__name__}.{self.reader}").read(path)
        return reading


_NOT_SAMPLED = "nothing was sampled beside the job (only `dlprof wrap` and `dlprof run` do, without --no-sample)"

# What is read of a rank. To add a source: its reader, its line here, its tables in dlprof/tables.py.
SOURCES: tuple[Source, ...] = (
    Source(
        "fetches",
        ("fetches.jsonl",),
        ("fetches",),
        "no record of what fetching a batch takes (only `dlprof wrap` and `dlprof run` leave one)",
    ),
    Source("gpu", ("gpu.jsonl",), ("samples",), _NOT_SAMPLED),
    Source("host", ("host.jsonl",), ("samples",), _NOT_SAMPLED, of_host=True),
    Source("lines", ("lines.jsonl",), ("lines",), "no lines were counted (`--lines MODULE:FUNCTION` counts them)"),
    Source(
        "loading",
        ("loading.jsonl",),
        ("loading",),
        "no record of every batch (only `dlprof wrap` and `dlprof run` leave one)",
    ),
    Source(
        "memory",
        ("memory.jsonl",),
        ("memory",),
        "nothing was asked of the CUDA allocator (a job on a GPU under `dlprof wrap` leaves its answers)",
    ),
    Source("nvidia_smi", (), ("samples",), _NOT_SAMPLED),  # of any name: dlprof/run.py looks for it
    Source(
        "pipeline",
        ("chunks.jsonl",),
        ("chunks",),
        "no pipeline stages were recorded (a job with torch.distributed.pipelining under `dlprof wrap` leaves them)",
    ),
    Source("processes", ("processes.jsonl",), ("samples",), _NOT_SAMPLED),
    Source(
        "stacks",
        ("stacks.txt.gz", "stacks.part"),
        ("stacks",),
        "no Python stacks were seen (py-spy was off, not there, not permitted, or had no time)",
    ),
    Source(
        "stalls",
        ("stalls.jsonl",),
        ("stalls",),
        "no record of garbage collection, checkpoints and compiling (only `dlprof wrap` and `dlprof run` leave one)",
    ),
    Source(
        "steps", ("steps.jsonl",), ("steps",), "no record of every step (only `dlprof wrap` and `dlprof run` leave one)"
    ),
    Source(
        "torch_trace",
        ("trace.json.gz", "trace.json"),
        ("spans", "traced_steps"),
        "no torch-profiler trace of this rank",
    ),
)
