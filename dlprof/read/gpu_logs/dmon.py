"""Reads what `nvidia-smi dmon`, `nvidia-smi pmon` and DCGM's `dcgmi dmon` print: columns of text, headers after `#`.

With --format csv, nvidia-smi separates columns by commas. With `-o T` a row has its time, with `-o DT` its date as
well. For pmon, the processes of a GPU are added up. Rows of dcgmi have no time: they count as one a second.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from dlprof.errors import DlprofError
from dlprof.read.formats import Format, beginning
from dlprof.read.gpu_logs.readings import Readings, lines_in, number, scaled
from dlprof.read.sources import Reading

# Column → metric of the table "samples", and its scale. sm is the share of the time in which some kernel ran.
_NVIDIA: Mapping[str, tuple[str, float]] = {
    "pwr": ("power_w", 1),
    "gtemp": ("temperature_c", 1),
    "mtemp": ("memory_temperature_c", 1),
    "sm": ("busy_share", 0.01),
    "mem": ("memory_busy_share", 0.01),
    "mclk": ("memory_clock_mhz", 1),
    "pclk": ("sm_clock_mhz", 1),
    "fb": ("memory_used_bytes", 1 << 20),
    "rxpci": ("pcie_received_bytes_per_s", 1e6),
    "txpci": ("pcie_sent_bytes_per_s", 1e6),
}
# For these, a GPU's value is the sum over its processes.
_OF_PROCESSES = ("sm", "mem", "fb")

# As `dcgmi dmon -l` lists them.
_DCGM: Mapping[str, tuple[str, float]] = {
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


def _begins(header: Callable[[str], list[str]]) -> Callable[[bytes], bool]:
    """Return what says whether a file has such a header among its first lines."""
    return lambda head: any(header(line) for line in head.decode(errors="replace").splitlines()[:8])


def read_nvidia(path: Path, piece: str = "") -> Reading:  # noqa: ARG001 - one piece is all of it
    """Return rows of the table "samples", each GPU a source; raises DlprofError if the file is no such log."""
    names: list[str] = []
    found: Readings | None = None
    processes = False
    held: dict[str, tuple[str, dict[str, float]]] = {}  # GPU → time, and sums over its processes
    for line in lines_in(path):
        header = _nvidia_header(line)
        if header:
            names = header
            processes = "pid" in names
            found = found or Readings(path, "nvidia-smi", timed="time" in names)
            continue
        if line.startswith("#") or found is None:
            continue
        words = [w.strip() for w in line.split(",")] if "," in line else line.split()
        # A command at the end of a row of pmon may have spaces.
        if len(words) < len(names) or (len(words) > len(names) and not processes):
            found.bad += 1
            continue
        row = dict(zip(names, words, strict=False))
        at = " ".join(row[name] for name in ("date", "time") if name in row)
        if not row["gpu"].isdigit():
            found.bad += 1
        elif not processes:
            found.add(row["gpu"], at, scaled(row.items(), _NVIDIA))
        else:
            _add_process(found, held, at, row)
    if found is None:
        raise DlprofError(f"{path}: not a log of nvidia-smi dmon or pmon: it has no header (# gpu ...)")
    for gpu in list(held):
        _close(found, held, gpu)
    return found.reading()


def _add_process(
    found: Readings, held: dict[str, tuple[str, dict[str, float]]], at: str, row: Mapping[str, str]
) -> None:
    """Add a process to its GPU; the same process again, or another time, begins the next reading."""
    gpu, pid = row["gpu"], row["pid"]
    before = held.get(gpu)
    if before is not None and (before[0] != at or f"pid {pid}" in before[1]):
        _close(found, held, gpu)
    sums = held.setdefault(gpu, (at, {}))[1]
    sums[f"pid {pid}"] = 1.0
    for name in _OF_PROCESSES:
        if (value := number(row.get(name, ""))) is not None:
            sums[name] = sums.get(name, 0.0) + value


def _close(found: Readings, held: dict[str, tuple[str, dict[str, float]]], gpu: str) -> None:
    """Add the sums over the processes of a GPU."""
    at, sums = held.pop(gpu)
    known = [(_NVIDIA[name][0], sums[name] * _NVIDIA[name][1]) for name in _OF_PROCESSES if name in sums]
    # Without a process, the GPU was idle.
    found.add(gpu, at, known or [("busy_share", 0.0)])


def _nvidia_header(line: str) -> list[str]:
    """Return the columns that a line of a header names; [] where it is none, or names their units."""
    if not line.lstrip("\ufeff").startswith("#"):
        return []
    text = line.lstrip("\ufeff#").strip()
    names = [word.strip().lower() for word in (text.split(",") if "," in text else text.split())]
    names = ["date" if n.startswith("date") else "time" if n.startswith("time") else n for n in names]
    return names if "gpu" in names and set(names) & set(_NVIDIA) else []


def read_dcgm(path: Path, piece: str = "") -> Reading:  # noqa: ARG001 - one piece is all of it
    """Return rows of the table "samples", each GPU a source; raises DlprofError if the file is no log of DCGM."""
    names: list[str] = []
    found = Readings(path, "dcgm", timed=False)
    for line in lines_in(path):
        names = _dcgm_header(line) or names
        row = _ENTITY.fullmatch(line.strip())
        if not row or not names:
            continue
        words = row[2].split()
        if len(words) != len(names):
            found.bad += 1
            continue
        found.add(row[1], "", scaled(zip(names, words, strict=True), _DCGM))
    return found.reading()


def _dcgm_header(line: str) -> list[str]:
    words = line.lstrip("\ufeff").replace("#", "# ").lower().split()
    known = words[:2] == ["#", "entity"] and set(words) & set(_DCGM)
    return words[2:] if known else []


FORMAT = (
    Format(
        name="nvidia_dmon",
        title="log of nvidia-smi dmon or pmon",
        recognised="a line `# gpu ...` with columns such as pwr or sm",
        recognise=beginning(_begins(_nvidia_header)),
        read=read_nvidia,
        tables=("samples",),
        brings="each GPU's use, power, clocks, temperature and memory over time; of pmon its use and memory",
        record="nvidia-smi dmon -s pucm -o DT > gpus.txt",
        of_host=True,
        seen=False,
    ),
    Format(
        name="dcgm_dmon",
        title="log of DCGM's dcgmi dmon",
        recognised="a line `#Entity ...` with columns such as GPUTL or TENSO",
        recognise=beginning(_begins(_dcgm_header)),
        read=read_dcgm,
        tables=("samples",),
        brings="each GPU's use, power, clocks, temperature and memory, and how long its tensor cores were busy",
        record="dcgmi dmon -e 203,155,100,252,1002,1004,1005 -d 1000 > gpus.txt",
        of_host=True,
        seen=False,
    ),
)
