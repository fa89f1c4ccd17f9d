"""Reads what DCGM's `dcgmi dmon` prints: columns of text under a header.

Its rows have no time: they count as one a second.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from dlprof.read.formats import Format, beginning
from dlprof.read.gpu_logs.readings import Readings, lines_in, number
from dlprof.read.sources import Reading

# Column, as `dcgmi dmon -l` lists them → metric of the table "samples", and its scale.
_METRICS: Mapping[str, tuple[str, float]] = {
    "gputl": ("busy_share", 0.01),
    "mcutl": ("memory_busy_share", 0.01),
    "power": ("power_w", 1),
    "tmptr": ("temperature_c", 1),
    "mmtmp": ("memory_temperature_c", 1),
    "smclk": ("sm_clock_mhz", 1),
    "mmclk": ("memory_clock_mhz", 1),
    "fbusd": ("memory_used_bytes", 1 << 20),
    "gract": ("engine_busy_share", 1),
    "smact": ("sm_busy_share", 1),
    "smocc": ("sm_occupancy_share", 1),
    "tenso": ("tensor_busy_share", 1),
    "drama": ("dram_share", 1),
    "pcitx": ("pcie_sent_bytes_per_s", 1),
    "pcirx": ("pcie_received_bytes_per_s", 1),
    "nvltx": ("nvlink_sent_bytes_per_s", 1),
    "nvlrx": ("nvlink_received_bytes_per_s", 1),
}
_ENTITY = re.compile(r"(?:GPU|GPU-[IC])\s+([\d/]+)\s+(.*)", re.I)


def begins(head: bytes) -> bool:
    """Return whether a file has DCGM's header among its first lines."""
    return any(_header(line) for line in head.decode(errors="replace").splitlines()[:8])


def read(path: Path, piece: str = "") -> Reading:  # noqa: ARG001 - one piece is all of it
    """Return rows of the table "samples", each GPU a source; raises DlprofError if the file is no log of DCGM."""
    names: list[str] = []
    found = Readings(path, "dcgm", timed=False)
    for line in lines_in(path):
        names = _header(line) or names
        row = _ENTITY.fullmatch(line.strip())
        if not row or not names:
            continue
        words = row[2].split()
        if len(words) != len(names):
            found.bad += 1
            continue
        values = [(_METRICS[n], number(word)) for n, word in zip(names, words, strict=True) if n in _METRICS]
        found.add(row[1], "", [(metric, v * scale) for (metric, scale), v in values if v is not None])
    return found.reading()


def _header(line: str) -> list[str]:
    words = line.lstrip("\ufeff").replace("#", "# ").lower().split()
    known = words[:2] == ["#", "entity"] and set(words) & set(_METRICS)
    return words[2:] if known else []


FORMAT = Format(
    name="dcgm_dmon",
    title="log of DCGM's dcgmi dmon",
    recognised="a line `#Entity ...` with columns such as GPUTL or TENSO",
    recognise=beginning(begins),
    read=read,
    tables=("samples",),
    brings="each GPU's use, power, clocks, temperature and memory, and how long its tensor cores were busy",
    record="dcgmi dmon -e 203,155,100,252,1002,1004,1005 -d 1000 > gpus.txt",
    of_host=True,
    seen=False,
)
