"""Reads what `nvidia-smi --query-gpu=timestamp,pci.bus_id,utilization.gpu,... --format=csv -l 1` has logged.

With or without units and header, of one GPU or several, once or repeated, with -l, -lms or in a loop of the user's.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from dlprof.errors import DlprofError
from dlprof.read.formats import Format, beginning
from dlprof.read.gpu_logs.readings import Readings, lines_in, number, scaled, time_of
from dlprof.read.sources import Reading

# Property → metric of the table "samples", and its scale. With --format=csv,nounits the values are in the same units.
_METRICS: Mapping[str, tuple[str, float]] = {
    "utilization.gpu": ("busy_share", 0.01),
    "utilization.memory": ("memory_busy_share", 0.01),
    "memory.used": ("memory_used_bytes", 1 << 20),
    "memory.total": ("memory_total_bytes", 1 << 20),
    "power.draw": ("power_w", 1),
    "power.draw.average": ("power_w", 1),
    "power.draw.instant": ("power_w", 1),
    "temperature.gpu": ("temperature_c", 1),
    "temperature.memory": ("memory_temperature_c", 1),
    "clocks.sm": ("sm_clock_mhz", 1),
    "clocks.current.sm": ("sm_clock_mhz", 1),
    "clocks.max.sm": ("sm_clock_max_mhz", 1),
    "power.default_limit": ("power_limit_default_w", 1),
    "power.limit": ("power_limit_w", 1),
    "enforced.power.limit": ("power_limit_w", 1),
    "clocks_event_reasons.active": ("clock_reasons_bits", 1),
    "clocks_throttle_reasons.active": ("clock_reasons_bits", 1),
    "clocks.mem": ("memory_clock_mhz", 1),
    "clocks.current.memory": ("memory_clock_mhz", 1),
}

# A property for each reason, "Active" or "Not Active", and the bit that it is in the mask of all (nvml.h).
_REASONS: Mapping[str, int] = {
    f"clocks_{kind}_reasons.{name}": bit
    for kind in ("event", "throttle")
    for name, bit in {
        "gpu_idle": 0x1,
        "applications_clocks_setting": 0x2,
        "sw_power_cap": 0x4,
        "hw_slowdown": 0x8,
        "sw_thermal_slowdown": 0x20,
        "hw_thermal_slowdown": 0x40,
        "hw_power_brake_slowdown": 0x80,
    }.items()
}

# What identifies a GPU, the best first.
_NAMES = ("pci.bus_id", "gpu_bus_id", "index", "uuid", "gpu_uuid")

# The command that records every metric that a rule needs.
_RECORD = (
    "nvidia-smi --query-gpu=timestamp,index,utilization.gpu,utilization.memory,memory.used,memory.total,power.draw,"
    "enforced.power.limit,power.default_limit,temperature.gpu,clocks.sm,clocks.max.sm,clocks_event_reasons.active"
    " --format=csv -lms 500 > gpus.csv"
)

# nvidia-smi knows fewer properties.
_MOST_COLUMNS = 300

# Units in the values of a log without a header, and the only property that each can be.
_BY_UNIT: Mapping[str, tuple[str, ...]] = {
    "%": ("utilization.gpu", "utilization.memory"),
    "W": ("power.draw", "power.limit"),
    "MHz": ("clocks.sm",),
}


def begins(head: bytes) -> bool:
    """Return whether a file begins as such a log does, with a header or, where units and a time say enough, without."""
    lines = head.decode(errors="replace").splitlines()[:8]
    return any(_is_header(line) for line in lines) or bool(lines and _headless(_split(lines[0])))


def read(path: Path, piece: str = "") -> Reading:  # noqa: ARG001 - one piece is all of it
    """Return rows of the table "samples", each GPU a source; raises DlprofError if the file is no such log.

    Times have no zone. Without a header, the units of the values decide the columns, with a warning.
    """
    names: Sequence[str] = ()
    found: Readings | None = None
    warnings: list[str] = []
    for line in lines_in(path):
        if _is_header(line):
            names = _header(line)
            found = found or Readings(path, "nvidia-smi", timed="timestamp" in names)
            continue
        words = _split(line)
        if found is None:
            if not (names := _headless(words)):
                continue  # what a script printed before
            found = Readings(path, "nvidia-smi", timed="timestamp" in names)
            known = ", ".join(f"{name.partition('.')[0]}={words[i]}" for i, name in enumerate(names) if name)
            warnings.append(f"{path.name}: has no header; its columns are taken for {known} (--format=csv names them)")
        if len(words) != len(names):
            found.bad += 1
            continue
        row = dict(zip(names, words, strict=True))
        gpu = next((row[name] for name in _NAMES if row.get(name)), "")
        found.add(gpu, row.get("timestamp", ""), _values(row).items())
    if found is None:
        raise DlprofError(f"{path}: not a log of nvidia-smi --query-gpu --format=csv")
    reading = found.reading()
    return Reading(reading.tables, reading.facts, (*warnings, *reading.warnings))


def _split(line: str) -> list[str]:
    try:
        return [word.strip() for word in next(csv.reader([line], skipinitialspace=True), [])]
    except csv.Error:
        return []


def _header(line: str) -> list[str]:
    """Return the properties that a header names, without their units."""
    return [word.partition("[")[0].strip() for word in line.split(",")]


def _is_header(line: str) -> bool:
    names = _header(line)
    known = sum(name in _METRICS or name in _REASONS for name in names)
    return known > 0 and ("timestamp" in names or any("." in name for name in names))


def _headless(words: Sequence[str]) -> list[str]:
    """Return what the columns of a row without a header are, "" if that is not known; [] where too little is."""
    names: list[str] = []
    for word in words if len(words) <= _MOST_COLUMNS else ():
        unit = word.rpartition(" ")[2]
        free = [name for name in _BY_UNIT.get(unit, ()) if name not in names]
        if "timestamp" not in names and "/" in word and time_of(word) is not None:
            names.append("timestamp")
        elif "pci.bus_id" not in names and len(word) == 16 and word.count(":") == 2:
            names.append("pci.bus_id")
        else:
            names.append(free[0] if free and number(word) is not None else "")
    return names if "timestamp" in names and "utilization.gpu" in names else []


def _values(row: Mapping[str, str]) -> Mapping[str, float]:
    values = dict(scaled(row.items(), _METRICS))
    flags = {name: row[name].lower() for name in _REASONS if row.get(name, "").lower() in ("active", "not active")}
    if flags:
        values.setdefault("clock_reasons_bits", sum(_REASONS[name] for name, word in flags.items() if word == "active"))
    return values


FORMAT = Format(
    name="nvidia_smi",
    title="log of nvidia-smi",
    recognised="CSV with properties of --query-gpu as its header; without one, a time and values with units",
    recognise=beginning(begins),
    read=read,
    tables=("samples",),
    brings="each GPU's use, power, clocks and what holds them down, temperature and memory over time",
    record=_RECORD,
    of_host=True,
    seen=False,
)
