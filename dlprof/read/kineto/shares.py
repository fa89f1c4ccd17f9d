"""Decides how many processes decode one trace: its share of the cores, if all traces of a run are read at once."""

from __future__ import annotations

import math
import multiprocessing
import os
import threading
from collections.abc import Mapping
from pathlib import Path

# Bytes of JSON. Splitting a smaller trace gains less than 0.1 s.
LEAST_BYTES = 96 << 20
# Memory of a decoding process: the rows of a span and, for a packed file, the span itself.
PROCESS_BYTES = 120 << 20
# A further core is used only if the share has at least this fraction of it.
_ROUNDED_OFF = 0.2

_cores: dict[Path, int] = {}


def share_out(bytes_of: Mapping[Path, int], of_bytes: int, jobs: int | None = None) -> None:
    """Divide the cores, or `jobs` of them, among traces, for this process and those that are forked from it.

    `bytes_of`: their unpacked bytes; `of_bytes`: those of all that is read at once.
    """
    cores = jobs or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    _cores.clear()
    for path, size in bytes_of.items():
        if size >= LEAST_BYTES:
            _cores[path] = math.ceil(cores * size / of_bytes - _ROUNDED_OFF)


def workers_for(path: Path) -> int:
    """Return how many processes may decode a trace; below 2: do not split it."""
    # Forking is safe while this process has no thread of its own; daemons have no children.
    can_fork = threading.active_count() == 1 and hasattr(os, "memfd_create")
    if path not in _cores or not can_fork or multiprocessing.current_process().daemon:
        return 0
    free = free_bytes()
    return _cores[path] if free is None else min(_cores[path], free // 2 // PROCESS_BYTES)


def free_bytes() -> int | None:
    """Return the available memory of this machine in bytes; None: unknown."""
    try:
        with open("/proc/meminfo") as f:  # noqa: PTH123 - a line of the kernel's
            return next(int(line.split()[1]) << 10 for line in f if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None
