"""Reads stalls.jsonl: a line a stall, and none where nothing stalled the job."""

from __future__ import annotations

from pathlib import Path

from dlprof.readers import Reading
from dlprof.readers.logs import read_log


def read(path: Path) -> Reading:
    """Give the table "stalls"; raises DlprofError where the file cannot be read or is no log of stalls."""
    frame, warnings = read_log(path, "stalls", ("kind", "start_ns", "dur_ns", "step"), {"phase": "rest"})
    frame = frame.assign(count=frame["count"].clip(lower=1))
    return Reading({"stalls": frame}, {}, warnings)
