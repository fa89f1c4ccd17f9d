"""Reads a sampler's log of dlprof (gpu.jsonl, host.jsonl, processes.jsonl) outside its run."""

from __future__ import annotations

import re
from pathlib import Path

from dlprof.read.formats import Format, beginning
from dlprof.read.gpu_logs.readings import ZONE
from dlprof.read.opening import open_file
from dlprof.read.sources import Reading

# A line of a sampler begins with its clock; what else is in it says which sampler it is.
_LINE = re.compile(rb'\s*\{\s*"at_ns"\s*:\s*\d{15,19}\s*,[^\n]*"(busy_share|power_w|core_percent|rss_bytes)"')
_SOURCES = {b"busy_share": "gpu", b"power_w": "gpu", b"core_percent": "host", b"rss_bytes": "processes"}


def begins(head: bytes) -> bool:
    """Return whether a file begins with a line of such a log."""
    return _LINE.match(head) is not None


def read(path: Path, piece: str = "") -> Reading:  # noqa: ARG001 - one piece is all of it
    """Return rows of the table "samples"; raises DlprofError if the file cannot be read or is no such log."""
    from dlprof.read import logs  # with pandas, which opening a run does not wait for

    with open_file(path) as file:
        found = _LINE.match(file.read(1 << 16))
    source = _SOURCES[found[1]] if found else "gpu"
    reading = logs.samples(path, source)
    facts = {f"log {path.name}": {"sources": [source], "times": ZONE}}
    return Reading(reading.tables, facts, reading.warnings)


FORMAT = Format(
    name="sampled",
    title="samples of dlprof",
    recognised="lines of JSON with at_ns and a metric of a sampler",
    recognise=beginning(begins),
    read=read,
    tables=("samples",),
    brings="what dlprof sampled of GPUs, host or processes, outside its run",
    record="dlprof wrap train.py",
    of_host=True,
)
