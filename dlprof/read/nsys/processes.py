"""Which ranks an export holds: a rank is a process that works on a device, or, on a CPU, one that names ranges."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from dlprof.errors import DlprofError
from dlprof.read.columnar.database import MISSING, Database, open_database

# The last 24 bits of a serialized thread id are the thread's, what stands before the process's.
THREADS = 1 << 24

# Where an export keeps what ran on a device, and on the host, the surest first.
DEVICE = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "CUPTI_ACTIVITY_KIND_MEMCPY")
HOST = ("NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_RUNTIME", "OSRT_API")

# Of several processes without a device, those with less than this part of what the busiest one names are its helpers.
_HELPER = 0.1


@dataclass(frozen=True)
class Process:
    """A process of an export: its serialized id (None: the version keeps none), and the device that it works on."""

    global_pid: int | None
    device: int  # -1: none

    @property
    def pid(self) -> int | None:
        """Its number on its host."""
        return None if self.global_pid is None else self.global_pid // THREADS % THREADS

    @property
    def key(self) -> str:
        """The name of its part of the file; "" for all of the file."""
        return "" if self.global_pid is None else str(self.global_pid)


def _is_export(database: Database) -> bool:
    return "StringIds" in database.tables and any(table in database.tables for table in (*DEVICE, *HOST))


def processes_of(path: Path) -> list[Process]:
    """Return the ranks of an export, in the order of their devices; raise DlprofError where it is none."""
    with open_database(path) as database:
        found = processes_in(database)
    if not found:
        raise DlprofError(f"{path}: a SQLite file, but no export of Nsight Systems")
    return found


def piece_of(path: Path, pid: int) -> str:
    """Return the piece of an export that is of the process with that number; "" where it holds none."""
    with contextlib.suppress(DlprofError):
        return next((one.key for one in processes_of(path) if one.pid == pid), "")
    return ""


def processes_in(database: Database) -> list[Process]:
    """Return the ranks of an export; none where it is none. Of a process's devices, the one with most work counts."""
    if not _is_export(database):
        return []
    return _with_device(database) or _without(database) or [Process(None, -1)]


def _with_device(database: Database) -> list[Process]:
    took: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for table in DEVICE:
        process, device = (database.integer(table, name) for name in ("globalPid", "deviceId"))
        what = [process, device, f"total({database.integer(table, 'end')} - {database.integer(table, 'start')}) + 1"]
        for pid, number, ns in database.rows(table, what, f"GROUP BY {process}, {device}", most=100_000):
            took[pid][number] += ns
        if took:
            break
    # No rank of a job works on no device and a wrong one only: nvidia-smi and the like launch nothing.
    made = [
        Process(None if pid == MISSING else pid, max(of.items(), key=lambda one: one[1])[0]) for pid, of in took.items()
    ]
    return sorted(made, key=lambda one: (one.device, one.global_pid or 0))


def _without(database: Database) -> list[Process]:
    for table in HOST:
        thread = database.integer(table, "globalTid")
        if "globaltid" not in database.columns(table):
            continue
        # A domain that a library makes names nothing.
        ends = 'WHERE "end" IS NOT NULL' if "end" in database.columns(table) else ""
        group = f"{ends} GROUP BY {thread} & ~{THREADS - 1}"
        counts = {
            pid: count
            for pid, count in database.rows(table, [f"{thread} & ~{THREADS - 1}", "count(*)"], group, most=100_000)
            if pid > 0
        }
        if counts:
            least = _HELPER * max(counts.values()) if table == "NVTX_EVENTS" else max(counts.values())
            return [Process(pid, -1) for pid, count in sorted(counts.items()) if count >= least]
    return []


def of_process(database: Database, table: str, process: int | None) -> tuple[str, tuple[int, ...]]:
    """Return the condition for the rows of a process by its serialized id, and its arguments."""
    held = database.columns(table)
    if process is None:
        return "", ()
    if "globalpid" in held:
        return f'WHERE "{held["globalpid"]}" = ?', (process,)
    if "globaltid" in held:
        return f'WHERE ("{held["globaltid"]}" & ~{THREADS - 1}) = ?', (process,)
    return "", ()
