"""Reads gpu.jsonl: what was sampled of the GPU that a rank trains on."""

from __future__ import annotations

from pathlib import Path

from dlprof.readers import Reading
from dlprof.readers.samples import read_samples


def read(path: Path) -> Reading:
    """Give rows of the table "samples"; raises DlprofError where the file cannot be read or holds no samples."""
    frame, warnings = read_samples(path, "gpu")
    return Reading({"samples": frame}, {}, warnings)
