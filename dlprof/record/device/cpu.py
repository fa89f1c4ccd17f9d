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
from collections.abc import Iterable, Iterator, Sequence
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


def quota(process: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> float | None:
    """Return how many cores' time the process's control groups grant; None: they grant all."""
    return min((cores for cores, _ in _quotas(process, root)), default=None)


def throttled(process: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> dict[str, int]:
    """Return what the kernel has counted for the group with the least quota; {} where there is no quota.

    quota_periods: periods in which the group ran; throttled_periods: of these, those in which it used up its quota and
    had to stop.
    """
    _, group = min(_quotas(process, root), default=(0.0, None))
    if group is None:
        return {}
    counts = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
    return {"quota_periods": int(counts["nr_periods"]), "throttled_periods": int(counts["nr_throttled"])}


def _quotas(process: str, root: str) -> list[tuple[float, Path]]:
    """Return the cores' time that control groups grant, and each one's folder."""
    found = []
    for group, v1 in _groups("cpu", process, root):
        # A number that is none: "max". No file: the group of a whole machine, or one outside the container.
        with contextlib.suppress(OSError, ValueError):
            if v1:
                most, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            else:
                most, period = (group / "cpu.max").read_text().split()
            if int(most) > 0:
                found.append((int(most) / int(period), group))
    return found


def memory_limit(process: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> int | None:
    """Return the bytes of memory that the process's control groups grant, the least of them; None: all there are."""
    found = []
    for group, v1 in _groups("memory", process, root):
        with contextlib.suppress(OSError, ValueError):  # "max"; or a group of the host, outside the container
            found.append(int((group / ("memory.limit_in_bytes" if v1 else "memory.max")).read_text()))
    limits = [n for n in found if n < _UNLIMITED]
    return min(limits, default=None)


def _groups(controller: str, process: str, root: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of a process's groups up to the root, and whether they are of cgroup v1.

    A container sees its own group as the root.
    """
    for line in Path(process).read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = Path(root) / (controller if controllers else "")
        within = top / path.lstrip("/")
        for group in (within, *within.parents):
            yield group, bool(controllers)
            if group == top:
                break


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
