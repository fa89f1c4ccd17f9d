"""Reads from the kernel: the processor's name, its units for multiplying, and how much of it this process may use.

Also what the kernel has counted for this process: time on the cores, time waiting for one, and bytes from storage.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from dlprof.record.log import Descriptor

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


class KernelCounters:
    """What this process has used of the cores and of storage.

    CPU time is the whole process's in a loader's worker: data sets decode in threads of their own, and a worker ships
    its batches in one. Otherwise it is the calling thread's: OpenMP's others spin for a while after each operator.
    What it waited for a core is known of `thread`, a number of the kernel's, else of the one that fetches or trains.
    """

    def __init__(self, *, whole_process: bool, thread: int = 0) -> None:
        self._time_ns = time.process_time_ns if whole_process else time.thread_time_ns
        self._schedstat = _opened(f"/proc/self/task/{thread}/schedstat" if thread else "/proc/thread-self/schedstat")
        self._io = _opened("/proc/self/io")

    def cores(self) -> tuple[int, int, int]:
        """Return three times in ns: the process on the cores, the thread waiting for one, the thread on one.

        −1: unknown.
        """
        words = _words(self._schedstat)
        ran, delayed = (int(words[0]), int(words[1])) if words else (-1, -1)
        return time.process_time_ns(), delayed, ran

    def all(self) -> tuple[int, int, int, int]:
        """Return the ns of CPU time and of waiting for a core, and the bytes that came from storage and that were read.

        −1: unknown.
        """
        words = _words(self._io)
        stored, read = (int(words[9]), int(words[1])) if words else (-1, -1)
        _, delayed, _ = self.cores()
        return self._time_ns(), delayed, stored, read

    def close(self) -> None:
        """Close the kernel's files; what they hold is unknown from then on."""
        self._schedstat.close()
        self._io.close()


def used_between(before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    """Return what was used between two answers of KernelCounters (−1: unknown)."""
    return tuple(-1 if b < 0 else a - b for a, b in zip(after, before, strict=True))


def _opened(path: str) -> Descriptor:
    """Open a file of the kernel's, to be read again and again."""
    try:
        return Descriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return Descriptor(-1)


def _words(file: Descriptor) -> list[bytes]:
    """Return what such a file holds now, split at white space; none if it cannot be read or the script closed it."""
    if not file.is_ours:
        return []
    try:
        return os.pread(file.fd, 512, 0).split()
    except OSError:  # of a thread that is no more
        return []
