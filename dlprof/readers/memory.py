"""Reads memory.jsonl: what the CUDA allocator held, a few lines a second."""

from __future__ import annotations

from pathlib import Path

from dlprof.readers import Reading
from dlprof.readers.logs import read_log


def read(path: Path) -> Reading:
    """Give the table "memory"; raises DlprofError where the file cannot be read or is no log of memory."""
    frame, warnings = read_log(path, "memory", ("at_ns", "step", "allocated_bytes", "reserved_bytes"))
    return Reading({"memory": frame}, {}, warnings)
