"""Reads what rocm-smi and amd-smi print as CSV or JSON: once, with `-w 1`, or repeated by a script."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dlprof.errors import DlprofError
from dlprof.read.formats import Format, beginning
from dlprof.read.gpu_logs.readings import Readings, number
from dlprof.read.opening import as_utf8, read_file
from dlprof.read.sources import Reading

_MB = 1 << 20

# Names as both tools' CSV and JSON have them, in small letters without units → metric of "samples", and its scale.
# Where a row has several of one metric, the first of this list counts.
_METRICS: Mapping[str, tuple[str, float]] = {
    "gpu use (%)": ("busy_share", 0.01),
    "gfx_activity": ("busy_share", 0.01),
    "gfx": ("busy_share", 0.01),
    "gfx%": ("busy_share", 0.01),
    "umc_activity": ("memory_busy_share", 0.01),
    "gpu memory read/write activity (%)": ("memory_busy_share", 0.01),
    "gpu memory use (%)": ("memory_busy_share", 0.01),
    "socket_power": ("power_w", 1),
    "power_usage": ("power_w", 1),
    "power": ("power_w", 1),
    "current socket graphics package power (w)": ("power_w", 1),
    "average graphics package power (w)": ("power_w", 1),
    "hotspot": ("temperature_c", 1),
    "hotspot_temperature": ("temperature_c", 1),
    "temperature (sensor junction) (c)": ("temperature_c", 1),
    "edge": ("temperature_c", 1),
    "temperature (sensor edge) (c)": ("temperature_c", 1),
    "gfx_0_clk": ("sm_clock_mhz", 1),
    "gfx_clk": ("sm_clock_mhz", 1),
    "gfx_clock": ("sm_clock_mhz", 1),
    "sclk clock speed:": ("sm_clock_mhz", 1),
    "gfx_0_max_clk": ("sm_clock_max_mhz", 1),
    "used_vram": ("memory_used_bytes", _MB),
    "vram_used": ("memory_used_bytes", _MB),
    "vram total used memory (b)": ("memory_used_bytes", 1),
    "total_vram": ("memory_total_bytes", _MB),
    "vram_total": ("memory_total_bytes", _MB),
    "vram total memory (b)": ("memory_total_bytes", 1),
    "max graphics package power (w)": ("power_limit_w", 1),
    "socket_power_limit": ("power_limit_w", 1),
}
_UNITS = {"gb": 1 << 30, "mb": _MB, "kb": 1 << 10, "b": 1, "w": 1, "mhz": 1, "c": 1, "%": 0.01, "ghz": 1000}
_TIMES = ("timestamp", "time", "utc_epoch_s", "date")
_DEVICE = ("gpu", "device")  # the columns that name the GPU
_CARD = re.compile(r"card(\d{1,4})", re.IGNORECASE)
_MOST_DEPTH = 8


def begins(head: bytes) -> bool:
    """Return whether a file begins as CSV with such a header, or as JSON that has cards or GPUs with such values."""
    text = head.decode(errors="replace").lstrip("\ufeff \t\r\n")
    if text[:1] in "[{":
        rocm = '"card' in text and ("GPU use (%)" in text or "(W)" in text or "VRAM Total" in text)
        amd = '"gpu"' in text and any(f'"{name}"' in text for name in ("gfx_activity", "socket_power", "power_usage"))
        return rocm or amd
    return any(_header(line) for line in text.splitlines()[:8])


def read(path: Path, piece: str = "") -> Reading:  # noqa: ARG001 - one piece is all of it
    """Return rows of the table "samples", each GPU a source; raises DlprofError if the file is no such log."""
    text = as_utf8(read_file(path)).decode("utf-8-sig", errors="replace").strip()
    rows = list(_of_json(text) if text[:1] in ("[", "{") else _of_csv(text))
    if not rows:
        raise DlprofError(f"{path}: no reading of rocm-smi or amd-smi in it")
    tool = "rocm-smi" if any(_CARD.fullmatch(gpu) for gpu, _, _ in rows) else "amd-smi"
    found = Readings(path, tool, timed=any(at for _, at, _ in rows))
    for gpu, at, values in rows:
        card = _CARD.fullmatch(gpu)
        found.add(card[1] if card else gpu, at, _metrics(values))
    return found.reading()


def _metrics(values: Iterable[tuple[str, str]]) -> Iterator[tuple[str, float]]:
    """Return the metrics of a GPU's named values; of several names of a metric the first in _METRICS."""
    known = {name.strip().lower(): value for name, value in values}
    done: set[str] = set()
    for name, (metric, scale) in _METRICS.items():
        word = known.get(name)
        value = number(word) if word is not None and metric not in done else None
        if value is None:
            continue
        done.add(metric)
        unit = re.sub(r"^[(\s]*[-+0-9.eE]+\s*|[)\s]+$", "", (word or "")[:60]).lower()
        yield metric, value * (_UNITS.get(unit, scale) if unit else scale)


def _header(line: str) -> list[str]:
    """Return the names of a CSV header of either tool; [] where the line is none."""
    names = [name.strip().lower() for name in line.split(",")]
    is_one = any(name in names for name in _DEVICE) and any(name in _METRICS for name in names)
    return names if is_one else []


def _of_csv(text: str) -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    """Return the GPU, the time ("": none) and the named values of each row; a script may repeat the header."""
    names: list[str] = []
    for line in text.splitlines():
        if header := _header(line):
            names = header
            continue
        if line.partition(",")[0].strip().lower() in _DEVICE:  # a table of something else
            names = []
            continue
        try:
            words = next(csv.reader([line]), [])
        except csv.Error:
            continue
        if not names or len(words) != len(names):
            continue
        row = dict(zip(names, words, strict=True))
        gpu = str(row.get("gpu", row.get("device", ""))).strip()
        at = next((row[name].strip() for name in _TIMES if name in row), "")
        yield gpu, at, list(row.items())


def _of_json(text: str) -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    """Return the same of JSON documents, one after the other; what is cut off is left out."""
    decoder = json.JSONDecoder()
    at = 0
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return
        yield from _of_value(value, "")
        at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n,"))


def _of_value(value: Any, when: str) -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    if isinstance(value, list):
        for one in value:
            yield from _of_value(one, when)
    elif isinstance(value, dict):
        when = next((str(value[name]) for name in _TIMES if isinstance(value.get(name), (str, int, float))), when)
        cards = {name: of for name, of in value.items() if _CARD.fullmatch(name) and isinstance(of, dict)}
        for name, of in cards.items():
            yield name, when, [(key, str(word)) for key, word in of.items() if isinstance(word, (str, int, float))]
        if type(value.get("gpu")) in (int, str):
            yield str(value["gpu"]), when, list(_flat(value, "", _MOST_DEPTH))
        elif not cards:
            for name in ("gpu_data", "gpus", "data"):
                yield from _of_value(value.get(name), when)


def _flat(value: Mapping[str, Any], above: str, depth: int) -> Iterator[tuple[str, str]]:
    """Return the values of a GPU with the names that the CSV has: gfx_0 with clk within is gfx_0_clk."""
    for name, one in value.items():
        if isinstance(one, dict) and "value" in one:
            one = f"{one['value']} {one.get('unit', '')}"
        if isinstance(one, dict) and depth:
            yield from _flat(one, str(name), depth - 1)
        elif isinstance(one, (str, int, float)):
            yield str(name), str(one)
            if above:
                yield f"{above}_{name}", str(one)


FORMAT = Format(
    name="amd_smi",
    title="log of rocm-smi or amd-smi",
    recognised="CSV with gpu or device and columns such as gfx_activity; JSON with cards or GPUs that have these",
    recognise=beginning(begins),
    read=read,
    tables=("samples",),
    brings="each GPU's use, power, clock, temperature and memory over time",
    record="amd-smi metric --usage --power --clock --temperature --mem-usage -w 1 --csv > gpus.csv",
    of_host=True,
    seen=False,
)
