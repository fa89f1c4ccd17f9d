"""What the host does, and how much of it each rank and its loader workers use, from the kernel's counters."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from dlprof.record.device import cpu
from dlprof.record.launch.process import family, has_ended, stat_of, stats
from dlprof.record.log import Part
from dlprof.record.samplers.sampling import Host, RankHere, Sampler, line

# The processes of a rank are looked for among all of the host's, which takes milliseconds on a large one.
_LOOK_FOR_CHILDREN_S = 5.0

# The threads of a process with more are not read one by one: each costs 10 µs a reading.
_MOST_THREADS = 128

# What workers have of their own is summed up by the kernel page by page, 10 ms a gigabyte and more: at most for this
# share of the time, and never again once it took longer than this for one of them.
_OWN_SHARE, _OWN_MOST_S = 1 / 100, 0.1

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class HostSampler(Sampler):
    """Writes the log `host`, and `processes` of each rank here: keys as metrics of the table `samples`.

    What only grows (bytes, faults, switches, CPU seconds) is written as it stands: a lost line then costs nothing.
    """

    name = "host"

    def __init__(self) -> None:
        self._log: Part | None = None
        self._ranks: dict[RankHere, _Processes] = {}
        self._looked = 0.0
        self._job: set[int] = set()  # all processes of the command, and dlprof's own

    def start(self, host: Host) -> None:
        """Take the first look at the cores: load is the difference of two."""
        import psutil

        super().start(host)
        self._supervisor = os.getppid()
        self._log = host.log("host")
        psutil.cpu_times_percent(percpu=True)

    def tick(self) -> None:
        """Write a line of the host and one of each rank."""
        if self._log is not None:
            # Unknown until its processes were looked for.
            job = {"job_cpu_s": round(sum(map(_cpu_s, self._job)), 2)} if self._job else {}
            self._log.write(line(_host() | job))
        here = self.host.ranks
        self._looked -= self.period_s
        if set(here) != set(self._ranks) or self._looked <= 0:
            self._looked = _LOOK_FOR_CHILDREN_S
            known = stats()
            roots = (self._supervisor, *(rank.pid for rank in here))  # of this host's other supervisors, only the ranks
            self._job = set(family(roots, known))
            for gone in set(self._ranks) - set(here):
                del self._ranks[gone]
            for rank in here:
                if rank not in self._ranks:
                    self._ranks[rank] = _Processes(rank.pid, self.host.log("processes", rank))
                self._ranks[rank].children = set(family([rank.pid], known)) - {rank.pid}
        for processes in self._ranks.values():
            processes.read()


class _Processes:
    """A rank's process, and those it started: its loader workers and their children, added up."""

    def __init__(self, pid: int, log: Part) -> None:
        self.log = log
        self.children: set[int] = set()
        self._pid = pid
        self._own_due_s = 0.0
        self._last: dict[tuple[int, int], tuple[float, int, int]] = {}  # by pid and start
        self._sums = [0.0, 0, 0]  # of all children ever seen: CPU seconds, voluntary and involuntary switches

    def read(self) -> None:
        """Write a line, unless the process has just ended."""
        own = _read(self._pid)
        if own is None:
            return
        children = {pid: now for pid in self.children if (now := _read(pid)) is not None}
        counted = {(pid, now.since): (now.cpu_s, now.voluntary, now.involuntary) for pid, now in children.items()}
        for child, counts in counted.items():
            before = self._last.get(child, (0.0, 0, 0))
            self._sums = [total + n - b for total, n, b in zip(self._sums, counts, before, strict=True)]
        self._last = counted
        cpu_s, voluntary, involuntary = self._sums
        row = {
            "cpu_s": round(own.cpu_s, 2),
            "rss_bytes": own.rss_bytes,
            **_anonymous("anonymous_bytes", [own]),
            "threads": own.threads,
            "voluntary_switches": own.voluntary,
            "involuntary_switches": own.involuntary,
            **_waited(self._pid, own.threads),
            **_throttled(self._pid),
            "children": len(children),
            "children_cpu_s": round(cpu_s, 2),
            "children_rss_bytes": sum(child.rss_bytes for child in children.values()),
            **_anonymous("children_anonymous_bytes", children.values()),
            **self._own(children),
            "children_threads": sum(child.threads for child in children.values()),
            "children_voluntary_switches": voluntary,
            "children_involuntary_switches": involuntary,
        }
        self.log.write(line(row))

    def _own(self, children: Collection[int]) -> dict[str, int]:
        """Return what the children hold that they share with no other process: of a fork, what it has changed."""
        now_s, began_s = time.monotonic(), time.thread_time()
        if now_s < self._own_due_s or not children:
            return {}
        try:
            own = sum(_private_bytes(pid) for pid in children)
        except (OSError, ValueError, IndexError):  # one has just ended, or this kernel does not say
            return {}
        took_s = time.thread_time() - began_s
        seldom = took_s <= _OWN_MOST_S * len(children)
        self._own_due_s = now_s + took_s / _OWN_SHARE if seldom else math.inf
        return {"children_private_bytes": own}


class _Process(NamedTuple):
    cpu_s: float
    rss_bytes: int
    anonymous_bytes: int | None  # of these, not mapped from files; None: this kernel does not say
    threads: int
    voluntary: int
    involuntary: int
    since: int  # the kernel's start time, which tells a process from a later one of the same pid


def _read(pid: int) -> _Process | None:
    """Read a process's counters; None: it has ended. The two files that it takes, and not psutil's five."""
    try:
        status = Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return None
    stat = stat_of(pid)
    if has_ended(stat):
        return None
    anonymous = status.partition(b"\nRssAnon:")[2].split(None, 1)
    switches = status.partition(b"\nvoluntary_ctxt_switches:")[2].split()
    return _Process(
        cpu_s=(int(stat[11]) + int(stat[12])) / _TICKS,
        rss_bytes=int(stat[21]) * _PAGE_BYTES,
        anonymous_bytes=int(anonymous[0]) * 1024 if anonymous else None,
        threads=int(stat[17]),
        voluntary=int(switches[0]),
        involuntary=int(switches[2]),  # behind its name
        since=int(stat[19]),
    )


def _private_bytes(pid: int) -> int:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_bytes()
    return int(rollup.partition(b"\nPrivate_Dirty:")[2].split(None, 1)[0]) * 1024


def _cpu_s(pid: int) -> float:
    """Return a process's CPU seconds with those of its children that have ended: so no time of a job's is lost."""
    stat = stat_of(pid)
    return sum(map(int, stat[11:15])) / _TICKS if stat else 0.0


def _anonymous(name: str, processes: Iterable[_Process]) -> dict[str, int]:
    """Return what processes hold that is no file's: what one that leaks has more and more of."""
    found = [p.anonymous_bytes for p in processes]
    known = [n for n in found if n is not None]
    return {name: sum(known)} if len(known) == len(found) else {}


def _waited(pid: int, threads: int) -> dict[str, int]:
    """Return how long the main thread was ready and had no core, and the others together, of a pool as large as usual.

    Nothing where this kernel does not count it.
    """
    waited = {}
    # Where a thread has ended just now, the next reading has them all.
    with contextlib.suppress(OSError, IndexError, ValueError):
        waited["main_thread_waited_ns"] = _waited_ns(f"{pid}")
        if threads <= _MOST_THREADS:
            others = (entry.name for entry in os.scandir(f"/proc/{pid}/task") if entry.name != str(pid))
            waited["other_threads_waited_ns"] = sum(_waited_ns(f"{pid}/task/{thread}") for thread in others)
    return waited


def _throttled(pid: int) -> dict[str, int]:
    """Return how often the quota of the process's container held it up; nothing where it has none."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        return cpu.throttled(f"/proc/{pid}/cgroup")
    return {}


def _waited_ns(which: str) -> int:
    return int(Path(f"/proc/{which}/schedstat").read_text().split()[1])


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
    # Not the loopback: what ranks of one host send each other is on no wire.
    networks = [n for name, n in psutil.net_io_counters(pernic=True).items() if name != "lo"]
    if networks:
        row["network_received_bytes"] = sum(n.bytes_recv for n in networks)
        row["network_sent_bytes"] = sum(n.bytes_sent for n in networks)
    return row | _kernel()


def _kernel() -> dict[str, int]:
    """Return what psutil does not: the threads that run or wait for a core, and the page faults of all processes."""
    names = {"pgfault": "page_faults", "pgmajfault": "major_page_faults"}
    counts = (row.split() for row in Path("/proc/vmstat").read_text().splitlines())
    runnable = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    return {"runnable_threads": runnable} | {names[name]: int(count) for name, count in counts if name in names}
