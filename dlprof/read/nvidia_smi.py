"""Reads what `nvidia-smi --query-gpu=timestamp,pci.bus_id,utilization.gpu,... --format=csv -l 1` has logged."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from dlprof.errors import DlprofError
from dlprof.read.formats import WHOLE, Format, Head, Part
from dlprof.read.opening import read_file
from dlprof.read.sources import Reading

if TYPE_CHECKING:
    from dlprof.read.logs import Series

# Property → metric of the table "samples", and its scale. With --format=csv,nounits the values are in the same units.
_METRICS: Mapping[str, tuple[str, float]] = {
    "utilization.gpu": ("busy_share", 0.01),
    "utilization.memory": ("memory_busy_share", 0.01),
    "memory.used": ("memory_used_bytes", 1 << 20),
    "memory.total": ("memory_total_bytes", 1 << 20),
    "power.draw": ("power_w", 1),
    "temperature.gpu": ("temperature_c", 1),
    "clocks.sm": ("sm_clock_mhz", 1),
    "clocks.current.sm": ("sm_clock_mhz", 1),
    "clocks.max.sm": ("sm_clock_max_mhz", 1),
    "power.default_limit": ("power_limit_default_w", 1),
    "enforced.power.limit": ("power_limit_w", 1),
    "clocks_event_reasons.active": ("clock_reasons_bits", 1),
    "clocks_throttle_reasons.active": ("clock_reasons_bits", 1),
    "clocks.mem": ("memory_clock_mhz", 1),
    "clocks.current.memory": ("memory_clock_mhz", 1),
}

# What identifies a GPU, the best first.
_NAMES = ("pci.bus_id", "gpu_bus_id", "uuid", "gpu_uuid", "index")


def recognise(head: Head) -> Sequence[Part]:
    """Return one part where a file begins as such a log does."""
    names = _header(head.start.partition(b"\n")[0].decode(errors="replace"))
    return WHOLE if "timestamp" in names and any(name in _METRICS for name in names) else ()


def read(path: Path, piece: str = "") -> Reading:  # noqa: ARG001 - one piece is all of it
    """Return rows of the table "samples", each GPU a source; raises DlprofError where the file is no such log.

    Its times have no zone: they are taken for times of the machine that reads them.
    """
    from dlprof.read.logs import samples_frame  # with pandas, which opening a run does not wait for

    lines = read_file(path).decode(errors="replace").splitlines()
    names = _header(lines[0]) if lines else []
    if "timestamp" not in names:
        raise DlprofError(f"{path}: not a log of nvidia-smi with a timestamp: begins with {lines[:1]}")
    columns = [(i, *_METRICS[name]) for i, name in enumerate(names) if name in _METRICS]
    identity = next((names.index(name) for name in _NAMES if name in names), None)
    found: Series = {}
    bad = 0
    for words in csv.reader(lines[1:], skipinitialspace=True):
        at = _time(words[names.index("timestamp")]) if len(words) == len(names) else None
        if at is None:
            bad += 1
            continue
        gpu = f"nvidia-smi {words[identity]}" if identity is not None else "nvidia-smi"
        for i, metric, scale in columns:
            if (value := _number(words[i])) is not None:
                times, values = found.setdefault((gpu, metric), ([], []))
                times.append(at)
                values.append(value * scale)
    warnings = [f"{path.name}: its times have no zone: taken for this machine's"]
    # The last line of a log that still grew is cut.
    if bad > 1:
        warnings.append(f"{path.name}: {bad:,} malformed lines are left out")
    return Reading({"samples": samples_frame(found)}, {}, tuple(warnings))


def _header(line: str) -> list[str]:
    """Return the properties that a header names, without their units."""
    return [word.partition("[")[0].strip() for word in line.split(",")]


def _time(word: str) -> int | None:
    try:
        return int(datetime.strptime(word.strip(), "%Y/%m/%d %H:%M:%S.%f").timestamp() * 1e3) * 1_000_000
    except (ValueError, OverflowError, OSError):
        return None


def _number(word: str) -> float | None:
    """Return the number of "87 %", "612.34 W", "87" or "0x04"; None where a GPU has none ([N/A])."""
    try:
        first = word.split()[0]
        value = float(int(first, 16)) if first.startswith("0x") else float(first)
    except (ValueError, IndexError):
        return None
    return value if math.isfinite(value) else None


FORMAT = Format(
    name="nvidia_smi",
    title="log of nvidia-smi",
    recognised="CSV whose header has `timestamp` and properties of `nvidia-smi --query-gpu`",
    recognise=recognise,
    read=read,
    tables=("samples",),
    brings="use, memory, power, temperature and clocks of each GPU, above the steps",
    record="nvidia-smi --query-gpu=timestamp,pci.bus_id,utilization.gpu,utilization.memory --format=csv -l 1",
    of_host=True,
)
