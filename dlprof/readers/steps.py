"""Reads steps.jsonl, the light layer: a line a step."""

from __future__ import annotations

from pathlib import Path

from dlprof.readers import Reading
from dlprof.readers.logs import read_log


def read(path: Path) -> Reading:
    """Give the table "steps"; raises DlprofError where the file cannot be read or is no log of steps."""
    frame, warnings = read_log(path, "steps", ("step", "start_ns", "dur_ns"), {"kind": "other"})
    if not len(frame):
        warnings += (f"{path.name}: holds no steps",)
    return Reading({"steps": frame}, {}, warnings)
