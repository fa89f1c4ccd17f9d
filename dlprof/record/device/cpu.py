"""What the kernel says of the processor: its name, the units that it multiplies with, and how much of it is ours."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path

# What decides how fast a core multiplies, in 16 bits and in others: x86's names, then Arm's.
_X86 = "fma avx2 avx512f avx512_bf16 avx512_fp16 avx512_vnni avx_vnni amx_tile amx_bf16 amx_fp16 amx_int8"
_UNLIMITED = 1 << 60  # cgroup v1 writes the largest multiple of a page where there is no limit
_UNITS = frozenset(f"{_X86} bf16 asimdhp i8mm sve sve2 svebf16".split())


def name() -> str | None:
    """Return the processor's name, or else its kind."""
    return _first_core().get("model name") or platform.machine() or None


def units() -> list[str] | None:
    """Return which units that matter a core has, as the kernel calls them; None: it does not say."""
    core = _first_core()
    flags = core.get("flags", core.get("Features"))
    if flags is None:
        return None
    found = set(_UNITS.intersection(flags.split()))
    # A kernel, or a virtual machine, may have the flag and yet grant no tiles.
    tiles = getattr(getattr(sys.modules.get("torch"), "cpu", None), "_is_amx_tile_supported", None)
    if "amx_tile" in found and tiles is not None and not tiles():
        found = {unit for unit in found if not unit.startswith("amx")}
    return sorted(found)


def quota() -> float | None:
    """Return how many cores' time a container grants; None: it grants all. cgroup v2, then v1."""
    unified = Path("/sys/fs/cgroup/cpu.max")
    if unified.is_file():
        most, _, period = unified.read_text().partition(" ")
        return None if most == "max" else int(most) / int(period)
    v1 = Path("/sys/fs/cgroup/cpu")
    if not (v1 / "cpu.cfs_quota_us").is_file():  # the group of a whole machine has neither
        return None
    most_us = int((v1 / "cpu.cfs_quota_us").read_text())
    return None if most_us <= 0 else most_us / int((v1 / "cpu.cfs_period_us").read_text())


def memory_limit(process: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> int | None:
    """Return the bytes of memory that the process's control groups grant, the least of them; None: all of the host's.

    cgroup v2, then v1. A container sees its own group as the root.
    """
    found = []
    for line in Path(process).read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = Path(root) / ("memory" if controllers else "")
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        within = top / path.lstrip("/")
        for group in (within, *within.parents):
            with contextlib.suppress(OSError, ValueError):  # "max"; or a group of the host, outside the container
                found.append(int((group / name).read_text()))
            if group == top:
                break
    limits = [n for n in found if n < _UNLIMITED]
    return min(limits, default=None)


def oom_kills(path: str = "/proc/vmstat") -> int | None:
    """Return how many processes the kernel has killed for want of memory since the host began; None: not counted."""
    try:
        rows = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((int(row.split()[1]) for row in rows if row.startswith("oom_kill ")), None)


def cores() -> str:
    """Return which cores this process may use, as the kernel writes them: "0-3,8"."""
    return listed(os.sched_getaffinity(0))


def listed(numbers: Iterable[int]) -> str:
    """Write numbers of cores with neighbours joined: "0-3,8"."""
    runs: list[tuple[int, int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], n)
        else:
            runs.append((n, n))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def nodes(path: str = "/sys/devices/system/node") -> dict[str, str]:
    """Return the cores of each NUMA node of the host: {"0": "0-15", "1": "16-31"}; empty where it does not say."""
    found = Path(path).glob("node[0-9]*/cpulist")
    return {file.parent.name.removeprefix("node"): file.read_text().strip() for file in sorted(found)}


def node_of(pci: str | None, path: str = "/sys/bus/pci/devices") -> int | None:
    """Return the NUMA node that a device on the PCI bus is at; None where that is not known."""
    if pci is None:
        return None
    number = int((Path(path) / pci / "numa_node").read_text())
    return number if number >= 0 else None


@functools.cache
def _first_core(path: str = "/proc/cpuinfo") -> dict[str, str]:
    """Return what the kernel says of the first core; of all, it would be a megabyte on a large host."""
    with Path(path).open() as lines:
        pairs = (line.partition(":") for line in lines)
        first = itertools.takewhile(lambda pair: pair[1], pairs)  # an empty line ends a core
        return {key.strip(): value.strip() for key, _, value in first}
