"""Reads host.jsonl: what was sampled of a host as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dlprof.readers import Reading
from dlprof.readers.samples import read_samples

# A core that computes for more of the time than this has nothing left to give.
_BUSY_PERCENT = 90


def read(path: Path) -> Reading:
    """Give rows of the table "samples"; raises DlprofError where the file cannot be read or holds no samples."""
    frame, warnings = read_samples(path, "host", _cores)
    return Reading({"samples": frame}, {}, warnings)


def _cores(row: dict[str, Any]) -> dict[str, Any]:
    """Tell of the cores what a table can hold: how many there are, are in use and are busy, and the busiest one."""
    cores = row.get("core_percent")
    if not cores:
        return row
    return row | {
        "cores": len(cores),
        "cpu_cores": sum(cores) / 100,
        "busy_cores": sum(core > _BUSY_PERCENT for core in cores),
        "busiest_core_share": max(cores) / 100,
    }
