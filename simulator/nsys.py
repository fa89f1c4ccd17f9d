"""Writes what the ranks of a host did as Nsight Systems exports it: one SQLite file, in the schema of a version.

Tables and columns are those of `.schema` of real exports (2022.4, 2023.4, 2026.2) and of NVIDIA's documentation of the
versions between them. Of what a version has, dlprof's reader looks at these tables and some more; all others are left
out here.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from simulator.job import EPOCH_NS, Job, Place, Recording, groups, places
from simulator.kineto import AUTOGRAD_TID, FORMS, kernel_name
from simulator.machine import Simulated, Simulation
from simulator.play import record
from simulator.program import APART
from simulator.recorder import Call
from simulator.streams import Work

# Versions by year: product, schema.
VERSIONS: Mapping[int, tuple[str, str]] = {
    2022: ("2022.4.2.1", "2.9.0"),
    2023: ("2023.4.4.54", "3.7.2"),
    2024: ("2024.6.1.90", "3.15.1"),
    2025: ("2025.3.1.90", "3.20.3"),
    2026: ("2026.2.1.210", "3.25.0"),
}

# When the export's zero is, in simulated ns: a capture begins before what it holds.
_ZERO_NS = -5_000_000_000
_HOST = 1 << 48  # a serialized id: host and virtual machine, 24 bits of the process, 24 of the thread

_COMMON = "start end deviceId contextId greenContextId:2025 streamId correlationId globalPid"
_TABLES: Mapping[str, str] = {
    "StringIds": "id value",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs utcTime localTime systemClockNs:2025",
    "TARGET_INFO_SYSTEM_ENV": "globalVid devStateName name nameEnum value",
    "TARGET_INFO_GPU": "vmId id name busLocation totalMemory smCount computeMajor computeMinor",
    "TARGET_INFO_CUDA_DEVICE": "gpuId cudaId pid uuid numMultiprocessors",
    "PROCESSES": "globalPid pid name",
    "CUPTI_ACTIVITY_KIND_KERNEL": f"{_COMMON} demangledName shortName mangledName launchType gridX blockX "
    "graphNodeId graphId:2024 clusterX:2025",
    "CUPTI_ACTIVITY_KIND_MEMCPY": f"{_COMMON} bytes copyKind srcKind dstKind graphNodeId copyCount:2026",
    "CUPTI_ACTIVITY_KIND_MEMSET": f"{_COMMON} value bytes graphNodeId memKind",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": f"{_COMMON} graphId graphExecId:2023",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start end eventClass globalTid correlationId nameId returnValue callchainId",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": f"{_COMMON} syncType eventId eventSyncId:2024",
    "NVTX_EVENTS": "start end eventType rangeId category color text globalTid endGlobalTid textId domainId "
    "binaryData:2024",
    "ENUM_CUDA_MEMCPY_OPER": "id name label",
    "ENUM_CUDA_MEM_KIND": "id name label",
    "ENUM_NSYS_EVENT_TYPE": "id name label",
}
_TEXT = {"value", "name", "label", "text", "utcTime", "localTime", "devStateName", "busLocation", "uuid", "binaryData"}

_ENUMS: Mapping[str, Sequence[tuple[int, str, str]]] = {
    "ENUM_CUDA_MEMCPY_OPER": [
        (number, f"CUDA_MEMCPY_KIND_{name}", name)
        for number, name in ((0, "UNKNOWN"), (1, "HTOD"), (2, "DTOH"), (8, "DTOD"), (10, "PTOP"))
    ],
    "ENUM_CUDA_MEM_KIND": [
        (number, f"CUDA_MEMOPR_MEMORY_KIND_{name}", name.title())
        for number, name in ((0, "PAGEABLE"), (1, "PINNED"), (2, "DEVICE"))
    ],
    "ENUM_NSYS_EVENT_TYPE": [(59, "NvtxPushPopRange", ""), (60, "NvtxStartEndRange", ""), (75, "NvtxDomainCreate", "")],
}
_COPIES = {"HtoD": 1, "DtoH": 2, "DtoD": 8, "PtoP": 10}
_SYNCS = {"cudaEventSynchronize": 1, "cudaStreamSynchronize": 3, "cudaDeviceSynchronize": 4}
_API = {"cudaLaunchKernel": "_v7000", "cudaLaunchKernelExC": "_v11060", "cudaGraphLaunch": "_v10000"}

# How the script names its steps: dlprof's ranges, its own, none but the optimizer's, or no NVTX at all.
MARKS = ("dlprof::step {}", "train_step", "", "none")


def write(
    path: Path, job: Job, recording: Recording, version: int = 2026, marks: str = MARKS[0], nodes: bool = True
) -> Simulation:
    """Record a job as an export of that version; return what ran. `nodes`: graphs are traced node by node."""
    simulation = record(job, recording)
    listed = {name: ranks for name, (ranks, _) in groups(job).items() if name.isdigit()}
    where = places(job, recording, listed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with sqlite3.connect(path) as connection:
        export = _Export(connection, version)
        export.head(where)
        for rank, place in zip(simulation.ranks, where, strict=True):
            _Rank(export, rank, place, marks, nodes).write()
        export.end()
    connection.close()
    return simulation


class _Export:
    """One file in the schema of a version."""

    def __init__(self, connection: sqlite3.Connection, version: int) -> None:
        self.connection, self.version = connection, version
        self._columns = {
            table: [
                name for name, _, since in (one.partition(":") for one in text.split()) if int(since or 0) <= version
            ]
            for table, text in _TABLES.items()
        }
        self._strings: dict[str, int] = {}
        self._made: set[str] = set()

    def string(self, text: str) -> int:
        """Return the number of a text."""
        return self._strings.setdefault(text, len(self._strings) + 1)

    def add(self, table: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows to a table; nsys makes one when it has a row for it."""
        names = self._columns[table]
        values = [tuple(row.get(name) for name in names) for row in rows]
        if not values:
            return
        if table not in self._made:
            columns = ", ".join(f'"{name}" {"TEXT" if name in _TEXT else "INTEGER"}' for name in names)
            self.connection.execute(f"CREATE TABLE {table} ({columns})")
            self._made.add(table)
        self.connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(names))})", values)

    def head(self, where: Sequence[Place]) -> None:
        """Write what is known of the machine."""
        product, schema = VERSIONS[self.version]
        table = "EXPORT_META_DATA" if self.version < 2023 else "META_DATA_EXPORT"
        self.connection.execute(f"CREATE TABLE {table} (name TEXT NOT NULL, value TEXT)")
        told = [("EXPORT_PRODUCT_VERSION", product), ("EXPORT_SCHEMA_VERSION", schema)]
        self.connection.executemany(f"INSERT INTO {table} VALUES (?, ?)", told)
        for name, rows in _ENUMS.items():
            self.add(name, [{"id": number, "name": text, "label": label} for number, text, label in rows])
        begun = {"utcEpochNs": EPOCH_NS + _ZERO_NS, "utcTime": "", "localTime": "", "systemClockNs": 0}
        self.add("TARGET_INFO_SESSION_START_TIME", [begun])
        self.add("TARGET_INFO_SYSTEM_ENV", [{"globalVid": _HOST, "name": "Hostname", "value": where[0].host}])
        devices = {place.device_index: place.device for place in where}
        gpus = [
            {
                "id": index,
                "name": device.name,
                "totalMemory": device.memory_bytes,
                "smCount": device.sms,
                "computeMajor": device.capability[0],
                "computeMinor": device.capability[1],
            }
            for index, device in devices.items()
        ]
        self.add("TARGET_INFO_GPU", gpus)
        numbered = [{"gpuId": i, "cudaId": i, "pid": place.pid} for place in where for i in devices]
        self.add("TARGET_INFO_CUDA_DEVICE", numbered)
        processes = [{"globalPid": _process(place), "pid": place.pid, "name": "python"} for place in where]
        self.add("PROCESSES", [*processes, {"globalPid": _HOST | 7 << 24, "pid": 7, "name": "torchrun"}])

    def end(self) -> None:
        """Write the texts."""
        self.add("StringIds", [{"id": number, "value": text} for text, number in self._strings.items()])


def _process(place: Place) -> int:
    return _HOST | place.pid << 24


class _Rank:
    """One process of an export."""

    def __init__(self, export: _Export, rank: Simulated, place: Place, marks: str, nodes: bool) -> None:
        self.export, self.rank, self.place, self.marks, self.nodes = export, rank, place, marks, nodes

    def write(self) -> None:
        """Write all that the process did."""
        export = self.export
        calls = [call for call in self.rank.records.calls if call.category == "cuda_runtime"]
        export.add("CUPTI_ACTIVITY_KIND_RUNTIME", map(self._call, calls))
        export.add("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", self._syncs(calls))
        if self.marks != "none":
            export.add("NVTX_EVENTS", self._ranges())
        works = list(self._works())
        for kinds, table in (
            (("kernel", "communication"), "KERNEL"),
            (("copy",), "MEMCPY"),
            (("set",), "MEMSET"),
            (("graph",), "GRAPH_TRACE"),
        ):
            export.add(f"CUPTI_ACTIVITY_KIND_{table}", [row for kind, row in works if kind in kinds])

    def _at(self, ns: int) -> int:
        return self.place.clock.at(ns) - EPOCH_NS - _ZERO_NS

    def _thread(self, number: int) -> int:
        return _process(self.place) | self.place.pid + AUTOGRAD_TID * number

    def _call(self, call: Call) -> dict[str, Any]:
        return {
            "start": self._at(call.start),
            "end": self._at(call.end),
            "eventClass": 0,
            "globalTid": self._thread(call.thread),
            "correlationId": call.correlation,
            "nameId": self.export.string(call.name + _API.get(call.name, "_v3020")),
            "returnValue": 0,
        }

    def _syncs(self, calls: Iterable[Call]) -> Iterator[dict[str, Any]]:
        for call in calls:
            if call.name in _SYNCS:
                yield {
                    "start": self._at(call.start),
                    "end": self._at(call.end),
                    "deviceId": 0,
                    "contextId": 1,
                    "streamId": 2**32 - 1,
                    "correlationId": call.correlation,
                    "globalPid": _process(self.place),
                    "syncType": _SYNCS[call.name],
                }

    def _ranges(self) -> Iterator[dict[str, Any]]:
        text_ids = self.export.version >= 2024
        for number, call in enumerate(self.rank.records.calls):
            if call.category == "cuda_runtime":
                continue
            name, is_step = call.name, call.name.startswith("ProfilerStep#")
            if is_step:
                if not self.marks:
                    continue
                name = self.marks.format(name.partition("#")[2])
            elif call.category in ("cpu_op", "module"):
                name += f", op_id = {number}" if number % 2 else f", seq = {number // 2}, op_id = {number}"
            refers = text_ids and call.category == "user_annotation"
            yield {
                "start": self._at(call.start),
                "end": self._at(call.end),
                "eventType": 60 if is_step and self.marks.startswith("dlprof") else 59,
                "text": None if refers else name,
                "textId": self.export.string(name) if refers else None,
                "globalTid": self._thread(call.thread),
                "domainId": 0,
            }

    def _works(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Return what was launched while the profiler recorded: its kind, its row."""
        first, last = self.rank.records.counted
        for stream in sorted(self.rank.work):
            for work in self.rank.work[stream]:
                if not first < work.correlation <= last:
                    continue
                if work.kind != "graph":
                    if work.kind in ("kernel", "communication", "copy", "set"):
                        yield work.kind, self._row(work, work.kind, self._name(work), work.start, work.end, work.size)
                elif self.nodes:
                    for at, took, node in work.parts:
                        start = work.start + at
                        if node.kind != "wait":
                            row = self._row(work, node.kind, node.name, start, start + took, node.size)
                            yield node.kind, row | {"graphNodeId": 1}
                else:
                    yield "graph", self._row(work, "graph", "", work.start, work.end, 0) | {"graphId": 3}

    def _name(self, work: Work) -> str:
        return kernel_name(FORMS["torch-2.13"], work.exchange) if work.exchange is not None else work.name

    def _row(self, work: Work, kind: str, name: str, start: int, end: int, size: int) -> dict[str, Any]:
        device = self.place.device_index + work.stream // APART
        row = {"start": self._at(start), "end": self._at(end), "deviceId": device, "contextId": 1}
        row |= {"streamId": work.stream % APART, "correlationId": work.correlation}
        row |= {"globalPid": _process(self.place), "bytes": size, "value": 0}
        if kind == "copy":
            way = name.split()[1]
            row |= {"copyKind": _COPIES[way]}
            host = 0 if "Pageable" in name else 1
            row |= {"srcKind": host if way[0] == "H" else 2, "dstKind": host if way[-1] == "H" else 2}
        elif kind in ("kernel", "communication"):
            short = name.split("(", maxsplit=1)[0].split("<", maxsplit=1)[0]
            row |= {"demangledName": self.export.string(name), "shortName": self.export.string(short)}
        return row
