"""Reads loading.jsonl: what the training thread waited for in its loaders."""

from __future__ import annotations

from pathlib import Path

from dlprof.readers import Reading
from dlprof.readers.logs import read_log


def read(path: Path) -> Reading:
    """Give the table "loading"; raises DlprofError where the file cannot be read or is no such log."""
    frame, warnings = read_log(path, "loading", ("kind", "start_ns", "dur_ns", "count", "step"))
    return Reading({"loading": frame}, {}, warnings)
