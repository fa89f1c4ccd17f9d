"""Reads chunks.jsonl: a line a schedule.step() of a pipeline, and a line a chunk of some of them."""

from __future__ import annotations

from pathlib import Path

from dlprof.readers import Reading
from dlprof.readers.logs import read_log


def read(path: Path) -> Reading:
    """Give the table "chunks"; raises DlprofError where the file cannot be read or is no log of chunks."""
    frame, warnings = read_log(path, "chunks", ("step", "action", "start_ns", "dur_ns"))
    return Reading({"chunks": frame}, {}, warnings)
