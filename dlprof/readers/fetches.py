"""Reads fetches.jsonl, which all the workers of a rank append to."""

from __future__ import annotations

from pathlib import Path

from dlprof.readers import Reading
from dlprof.readers.logs import read_log


def read(path: Path) -> Reading:
    """Give the table "fetches"; raises DlprofError where the file cannot be read or is no such log."""
    frame, warnings = read_log(path, "fetches", ("pid", "start_ns", "dur_ns", "count"))
    return Reading({"fetches": frame}, {}, warnings)
