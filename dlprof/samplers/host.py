"""What the host does, and what each rank and its loader workers take of it, from the kernel's counters (psutil)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dlprof.log import Log
from dlprof.sampling import Host, RankHere, line, period

# The processes of a rank are looked for among all of the host's, which takes milliseconds on a large one.
_LOOK_FOR_CHILDREN_S = 5.0


class HostSampler:
    """Writes hosts/HOST/host.jsonl, and processes.jsonl of each rank here: keys as metrics of the table `samples`.

    What only grows (bytes, faults, switches, CPU seconds) is written as it stands: a lost line then costs nothing.
    """

    name = "host"

    def __init__(self) -> None:
        self.period_s = period()
        self._log: Log | None = None
        self._ranks: dict[RankHere, _Processes] = {}
        self._looked = 0.0

    def start(self, host: Host) -> None:
        """Open the file, and take the first look at the cores: load is told between two."""
        import psutil

        self._host = host
        self._log = host.log("host.jsonl")
        psutil.cpu_times_percent(percpu=True)

    def tick(self) -> None:
        """Write a line of the host and one of each rank."""
        if self._log is not None:
            self._log.write(line(_host()))
        here = self._host.ranks
        self._looked -= self.period_s
        if set(here) != set(self._ranks) or self._looked <= 0:
            self._looked = _LOOK_FOR_CHILDREN_S
            parents = _parents()
            for gone in set(self._ranks) - set(here):
                self._ranks.pop(gone).log.close()
            for rank in here:
                if rank not in self._ranks:
                    self._ranks[rank] = _Processes(rank.pid, self._host.log("processes.jsonl", rank))
                self._ranks[rank].find_children(parents)
        for processes in self._ranks.values():
            processes.read()

    def stop(self) -> None:
        """Nothing is held in memory."""


class _Processes:
    """A rank's process, and those it started: its loader workers and their children, added up."""

    def __init__(self, pid: int, log: Log) -> None:
        import psutil

        self.log = log
        self._pid = pid
        self._own = psutil.Process(pid)
        self._children: dict[int, Any] = {}
        self._last: dict[int, tuple[float, int, int]] = {}
        self._sums = [0.0, 0, 0]  # of all children ever seen: CPU seconds, voluntary and involuntary switches

    def find_children(self, parents: dict[int, int]) -> None:
        import psutil

        for pid in _below(self._pid, parents):
            if pid not in self._children:
                try:
                    self._children[pid] = psutil.Process(pid)
                except psutil.Error:
                    continue

    def read(self) -> None:
        import psutil

        try:
            own = _read(self._own)
        except psutil.Error:
            return  # it has just ended
        children = []
        for pid, process in tuple(self._children.items()):
            try:
                now = _read(process)
            except psutil.Error:
                del self._children[pid]
                self._last.pop(pid, None)
                continue
            children.append(now)
            counted = (now["cpu_s"], now["voluntary_switches"], now["involuntary_switches"])
            before = self._last.get(pid, (0.0, 0, 0))
            self._sums = [total + (n - b) for total, n, b in zip(self._sums, counted, before, strict=True)]
            self._last[pid] = counted
        cpu, voluntary, involuntary = self._sums
        row = (
            own
            | _waited(self._pid)
            | {
                "children": len(children),
                "children_cpu_s": round(cpu, 2),
                "children_rss_bytes": sum(c["rss_bytes"] for c in children),
                "children_threads": sum(c["threads"] for c in children),
                "children_voluntary_switches": voluntary,
                "children_involuntary_switches": involuntary,
            }
        )
        self.log.write(line(row))


def _read(process: Any) -> dict[str, Any]:
    with process.oneshot():
        times = process.cpu_times()
        switches = process.num_ctx_switches()
        return {
            "cpu_s": round(times.user + times.system, 2),
            "rss_bytes": process.memory_info().rss,
            "threads": process.num_threads(),
            "voluntary_switches": switches.voluntary,
            "involuntary_switches": switches.involuntary,
        }


def _waited(pid: int) -> dict[str, int]:
    """Give how long the main thread was ready and had no core; nothing where this kernel does not count it."""
    try:
        return {"main_thread_waited_ns": int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])}
    except (OSError, IndexError, ValueError):
        return {}


def _host() -> dict[str, Any]:
    import psutil

    cores = [100 - t.idle - t.iowait for t in psutil.cpu_times_percent(percpu=True)]
    row: dict[str, Any] = {"cpu_share": round(sum(cores) / len(cores) / 100, 3)}
    row["core_percent"] = [round(c) for c in cores]
    memory = psutil.virtual_memory()
    row |= {"memory_used_bytes": memory.total - memory.available, "memory_available_bytes": memory.available}
    swap = psutil.swap_memory()
    row |= {"swap_used_bytes": swap.used, "swap_in_bytes": swap.sin, "swap_out_bytes": swap.sout}
    disk = psutil.disk_io_counters()
    if disk is not None:
        row |= {"disk_read_bytes": disk.read_bytes, "disk_written_bytes": disk.write_bytes}
    # Not the loopback: what ranks of one host tell each other leaves on no wire.
    networks = [n for name, n in psutil.net_io_counters(pernic=True).items() if name != "lo"]
    if networks:
        row["network_received_bytes"] = sum(n.bytes_recv for n in networks)
        row["network_sent_bytes"] = sum(n.bytes_sent for n in networks)
    return row | _kernel()


def _kernel() -> dict[str, int]:
    """Give what psutil does not: the threads that run or wait for a core, and the page faults of all processes."""
    told = {"pgfault": "page_faults", "pgmajfault": "major_page_faults"}
    counts = {"runnable_threads": int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])}
    for said in Path("/proc/vmstat").read_text().splitlines():
        name, _, value = said.partition(" ")
        if name in told:
            counts[told[name]] = int(value)
    return counts


def _parents() -> dict[int, int]:
    """Give the parent of every process that can be seen."""
    parents = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                stat = Path(entry.path, "stat").read_bytes()
                parents[int(entry.name)] = int(stat.rpartition(b")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue  # it has just ended
    return parents


def _below(pid: int, parents: dict[int, int]) -> Iterable[int]:
    children: dict[int, list[int]] = {}
    for child, parent in parents.items():
        children.setdefault(parent, []).append(child)
    found, ahead = [], [pid]
    while ahead:
        mine = children.get(ahead.pop(), [])
        found += mine
        ahead += mine
    return found
