"""Reads one rank of an export of Nsight Systems into spans and traced steps, as a torch-profiler trace is read.

Columns, tables and enum tables differ between versions, so they are looked up in the file. A warning about missing
data names the option of nsys that records it.

NVTX ranges come from users, frameworks, PyTorch's operators and NCCL. Calls and device work are read as whole columns
of the tables that CUPTI fills.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlprof import schema
from dlprof.errors import DlprofError
from dlprof.read.columnar import recurring
from dlprof.read.columnar.database import MISSING, Database, open_database
from dlprof.read.columnar.rows import LONGEST, SAID, Ranges, Rows, aligned, annotation_rows, numbered, spans_of, split
from dlprof.read.kineto.patterns import copy_of, kind_of
from dlprof.read.nsys.format import THREADS, Process, of_process, processes_in
from dlprof.read.sources import Reading

# Times since 1970 in ns are larger than this; those since the start of a capture are smaller (31 years).
_UNIX_NS = 10**18
_MOST_COMPLAINTS = 3

_MARKS = "torch.cuda.nvtx.range_push(f'step {n}') marks them, and `dlprof wrap --nsys` does"

# What is in an export and is not read, and what it is.
_LEFT = {
    "OSRT_API": "calls of the operating system",
    "GPU_METRICS": "GPU metrics",
    "CUDA_GPU_MEMORY_USAGE_EVENTS": "events of GPU memory",
    "CUDNN_EVENTS": "calls of cuDNN",
    "CUBLAS_EVENTS": "calls of cuBLAS",
    "COMPOSITE_EVENTS": "samples of the CPU",
    "MPI_COLLECTIVES_EVENTS": "MPI collectives",
    "NIC_METRICS": "network metrics",
}


def read(path: Path, piece: str = "") -> Reading:
    """Return tables "spans" and "traced_steps" and the facts of a rank: the process that `piece` names, else the first.

    Facts: host, devices [{id, name, memory_bytes, ...}], base_time_ns, nsys (its version), steps_by (how steps were
    found); operators: whether there are any, where there is no work of a device. A damaged file gives what could be
    read, and a warning. Raises DlprofError if the file cannot be read or is no export.
    """
    with open_database(path) as database:
        processes = processes_in(database)
        if not processes:
            raise DlprofError(f"{path}: no export of Nsight Systems, or an empty one")
        process = next((one for one in processes if one.key == piece), processes[0])
        reading = _read(database, process)
        damage = [line if line.startswith(path.name) else f"{path.name}: {line}" for line in database.damage]
    return Reading(reading.tables, reading.facts, (*damage, *reading.warnings))


def _read(database: Database, process: Process) -> Reading:
    named = read_ranges(database, process.global_pid)
    host = calls(database, process.global_pid)
    device = device_rows(database, process.global_pid, process.device)
    facts, warnings = _facts(database, process), _lacking(database, named, host, device)
    every = [*device, host, annotation_rows(named)]
    base = _base(database, every)
    if base:
        facts["base_time_ns"] = base
    spans, lost = spans_of(every, process.device, base)
    if lost:
        warnings.append(f"{lost:,} events without a usable time are left out")
    spans, odd = aligned(spans)
    warnings += odd
    steps, way, none_found = recurring.traced_steps(named, device[0], host, _MARKS, base)
    facts |= way
    warnings += none_found
    if not _work(device):
        facts["errors"] = ["no work of a GPU was traced (nsys profile --trace=cuda,nvtx)"]
        facts["operators"] = any(named.operator)
    tables = {
        "spans": schema.check("spans", spans),
        "traced_steps": schema.check("traced_steps", steps),
    }
    return Reading(tables, facts, tuple(f"{database.name}: {warning}" for warning in warnings))


def _work(device: Sequence[Rows]) -> int:
    """Return how many rows of work there are."""
    return sum(len(rows.name) for rows in device)


def _base(database: Database, every: Sequence[Rows]) -> int:
    """Return the Unix time of the export's zero, ns; 0 where its times are Unix times already, or it does not say."""
    first = next((int(rows.start[len(rows.start) // 2]) for rows in every if len(rows.start)), 0)
    if first >= _UNIX_NS:
        return 0
    held = database.integers("TARGET_INFO_SESSION_START_TIME", ["utcEpochNs"])["utcEpochNs"]
    base = int(held[0]) if len(held) else 0
    return base if 0 < base < 2**62 else 0


def _facts(database: Database, process: Process) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    host = database.named("TARGET_INFO_SYSTEM_ENV").get("Hostname")
    export = database.named("META_DATA_EXPORT") or database.named("EXPORT_META_DATA")
    version = export.get("EXPORT_PRODUCT_VERSION") or export.get("EXPORT_SCHEMA_VERSION")
    facts |= {name: text for name, text in (("host", host), ("nsys", version)) if text}
    if devices := _devices(database, process):
        facts["devices"] = devices
    return facts


def _devices(database: Database, process: Process) -> list[dict[str, Any]]:
    """Return the GPUs as CUDA numbers them in the process."""
    table, names = "TARGET_INFO_GPU", database.texts("TARGET_INFO_GPU", "id", "name")
    wanted = {"memory_bytes": "totalMemory", "numSms": "smCount", "computeMajor": "computeMajor"}
    wanted |= {"computeMinor": "computeMinor"}
    held = database.integers(table, ["id", *wanted.values()])
    of = {
        number: {"name": names.get(number, ""), **{k: int(held[c][i]) for k, c in wanted.items() if held[c][i] > 0}}
        for i, number in enumerate(held["id"].tolist())
    }
    cuda = database.integers("TARGET_INFO_CUDA_DEVICE", ["cudaId", "gpuId", "pid"])
    mine = (cuda["pid"] == (process.pid or -1)) | (cuda["pid"] == MISSING)
    numbered = dict(zip(cuda["cudaId"][mine].tolist(), cuda["gpuId"][mine].tolist(), strict=True))
    numbered = numbered or {number: number for number in of}
    return [{"id": c, **of[gpu]} for c, gpu in sorted(numbered.items()) if gpu in of]


def _lacking(database: Database, named: Ranges, calls: Rows, device: Sequence[Rows]) -> list[str]:
    """Return what the export lacks, each with the option of nsys that brings it, what was left out, and complaints."""
    lines = []
    if _work(device) and not len(calls.name):
        lines.append("holds no calls that launch, so work is not linked to the host (nsys profile --trace=cuda)")
    if not len(named.name):
        lines.append("holds no NVTX ranges (nsys profile --trace=cuda,nvtx, and ranges in the script)")
    if len(device[1].name):
        lines.append(
            f"{len(device[1].name):,} CUDA graphs stand in it as one piece each: their kernels, copies and collectives "
            "are not told apart (nsys profile --cuda-graph-trace=node)"
        )
    if named.open:
        lines.append(f"{named.open:,} NVTX ranges do not end in it and are left out")
    left = [what for table, what in _LEFT.items() if database.has(table)]
    if left:
        lines.append(f"left out: {', '.join(left)}")
    return lines + _complaints(database)


def _complaints(database: Database) -> list[str]:
    """Return the first few warnings and errors of nsys itself (severity 2: warning, 3: error)."""
    severity, text = database.columns("DIAGNOSTIC_EVENT").get("severity"), "substr(text, 1, 300)"
    if severity is None or "text" not in database.columns("DIAGNOSTIC_EVENT"):
        return []
    rows = database.rows("DIAGNOSTIC_EVENT", [severity, text], most=1_000)
    lines = dict.fromkeys(" ".join(str(line).split()) for level, line in rows if isinstance(level, int) and level >= 2)
    return [f"nsys said: {line}" for line in list(lines)[:_MOST_COMPLAINTS]]


TABLE = "NVTX_EVENTS"

# Event types that are ranges, by their names in the file; the numbers are those of all versions seen (2022 to 2026).
_RANGES = {"NvtxPushPopRange": 59, "NvtxStartEndRange": 60, "NvtxtPushPopRange": 70, "NvtxtStartEndRange": 71}


class _Names(dict[tuple[bool, str], int]):
    def __missing__(self, key: tuple[bool, str]) -> int:
        self[key] = code = len(self)
        return code


def read_ranges(database: Database, process: int | None) -> Ranges:
    """Return the ranges of a process; none if the export has no NVTX."""
    condition = of_process(database, TABLE, process)
    names = ["start", "end", "eventType", "textId", "globalTid"]
    held = database.integers(TABLE, names, *condition)
    count = len(held["start"])
    known, codes = _Names(), np.full(count, -1, dtype=np.int64)
    texts = database.columns(TABLE).get("text")
    if texts is not None:
        # SQLite cuts off what torch appends for each call: the full names all differ, but there are few operators.
        place = [f"ifnull(nullif(instr(\"{texts}\", '{part}'), 0), {LONGEST})" for part in SAID]
        cut = f"min({', '.join(place)})"
        what = [f'substr("{texts}", 1, {cut} - 1)', f"{cut} < {LONGEST}"]
        for row, (text, is_operator) in enumerate(database.rows(TABLE, what, *condition)):
            if text is not None and row < count:
                codes[row] = known[bool(is_operator), str(text)]
    of_text = held["textId"]
    referred = np.flatnonzero((codes < 0) & (of_text != MISSING))
    wanted = np.unique(of_text[referred])
    registered = database.texts("StringIds", "id", "value", wanted.tolist())
    place_of = np.array([known[split(registered[i])] if i in registered else -1 for i in wanted.tolist()], np.int64)
    if len(referred):
        codes[referred] = place_of[np.searchsorted(wanted, of_text[referred])]
    is_range = np.isin(held["eventType"], _range_types(database)) & (codes >= 0) & (held["start"] != MISSING)
    ended = (held["end"] != MISSING) & (held["end"] >= held["start"])
    keep = np.flatnonzero(is_range & ended)
    keep = keep[np.lexsort((-held["end"][keep], held["start"][keep]))]
    return Ranges(
        names=[text for _, text in known],
        operator=[is_operator for is_operator, _ in known],
        name=codes[keep],
        start=held["start"][keep],
        end=held["end"][keep],
        thread=np.where(held["globalTid"] == MISSING, 0, held["globalTid"] % THREADS)[keep],
        open=int((is_range & ~ended).sum()),
    )


def _range_types(database: Database) -> list[int]:
    """Return the numbers of the event types that are ranges, as defined in the file."""
    numbers = {name: number for number, name in database.texts("ENUM_NSYS_EVENT_TYPE", "id", "name").items()}
    return [numbers.get(name, number) for name, number in _RANGES.items()]


KERNELS, GRAPHS = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"

COPIES, SETS = "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"

SYNCS, CALLS = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "CUPTI_ACTIVITY_KIND_RUNTIME"

_COMMON = ["start", "end", "deviceId", "streamId", "correlationId"]

# CUPTI's numbers (cupti_activity.h), for files without tables of them: copies by direction, memory, synchronisations.
_DIRECTIONS = {1: "HTOD", 2: "DTOH", 8: "DTOD", 9: "HTOH", 10: "PTOP", 11: "UVM_HTOD", 12: "UVM_DTOH", 13: "UVM_DTOD"}

_MEMORY = {0: "PAGEABLE", 1: "PINNED", 2: "DEVICE", 3: "ARRAY", 4: "MANAGED", 5: "DEVICE_STATIC", 6: "MANAGED_STATIC"}

# As PyTorch's profiler names them.
_SYNC_NAMES = {1: "Event Sync", 2: "Stream Wait Event", 3: "Stream Sync", 4: "Context Sync"}

_NO_STREAM = 2**32 - 1

_DIRECTION = re.compile(r"([HDAP])TO([HDAP])$")

# cudaLaunchKernel_v7000, cudaMemcpyAsync_ptsz_v7000: the version of the call's interface.
_VERSION = re.compile(r"(?:_ptsz|_ptds)?(?:_v\d+)?(?:_ptsz|_ptds)?$")


def device_rows(database: Database, process: int | None, device: int) -> list[Rows]:
    """Return the kernels, graphs, copies, sets and synchronisations of a process that works on that device."""
    work = [read(database, process) for read in (_kernels, _graphs, _copies, _sets)]
    return [*work, _syncs(database, process, max(device, 0))]


def calls(database: Database, process: int | None) -> Rows:
    """Return the calls of CUDA's runtime and driver."""
    held = database.integers(
        CALLS, ["start", "end", "globalTid", "correlationId", "nameId"], *of_process(database, CALLS, process)
    )
    texts = {i: _VERSION.sub("", text) for i, text in _strings(database, held["nameId"]).items()}
    names, name = numbered(held["nameId"], texts, "unnamed call")
    thread = np.where(held["globalTid"] == MISSING, 0, held["globalTid"] % THREADS)
    host = np.full(len(name), -1, dtype=np.int64)
    return Rows(
        names, ["runtime"] * len(names), name, held["start"], held["end"], host, thread, _launch(held["correlationId"])
    )


def _kernels(database: Database, process: int | None) -> Rows:
    named = "demangledName|shortName|mangledName|nameId|name"
    held = database.integers(KERNELS, [*_COMMON, named], *of_process(database, KERNELS, process))
    names, name = numbered(held[named], _strings(database, held[named]), "unnamed kernel")
    kinds = [(kind_of("kernel", one) or ("device", "kernel"))[1] for one in names]
    return _on_device(held, names, kinds, name)


def _graphs(database: Database, process: int | None) -> Rows:
    held = database.integers(GRAPHS, [*_COMMON, "graphId"], *of_process(database, GRAPHS, process))
    ids, name = np.unique(held["graphId"], return_inverse=True)
    names = [f"CUDA graph {i}" for i in ids.tolist()]
    return _on_device(held, names, ["kernel"] * len(names), name)


def _copies(database: Database, process: int | None) -> Rows:
    more = ["bytes", "copyKind", "srcKind", "dstKind"]
    held = database.integers(COPIES, [*_COMMON, *more], *of_process(database, COPIES, process))
    directions = _enum(database, "ENUM_CUDA_MEMCPY_OPER", _DIRECTIONS)
    memories = _enum(database, "ENUM_CUDA_MEM_KIND", _MEMORY)
    what, name = np.unique(np.column_stack([held[k] for k in more[1:]]), axis=0, return_inverse=True)
    names = [
        _copy_name(directions.get(way, ""), memories.get(source, ""), memories.get(target, ""))
        for way, source, target in what.tolist()
    ]
    rows = _on_device(held, names, ["copy"] * len(names), name.reshape(-1), held["bytes"])
    rows.directions.extend(copy_of(one) for one in names)
    return rows


def _sets(database: Database, process: int | None) -> Rows:
    held = database.integers(SETS, [*_COMMON, "bytes"], *of_process(database, SETS, process))
    return _on_device(held, ["Memset (Device)"], ["set"], np.zeros(len(held["start"]), dtype=np.int64), held["bytes"])


def _syncs(database: Database, process: int | None, device: int) -> Rows:
    held = database.integers(SYNCS, [*_COMMON, "syncType"], *of_process(database, SYNCS, process))
    types, name = np.unique(held["syncType"], return_inverse=True)
    names = [_SYNC_NAMES.get(i, "Sync") for i in types.tolist()]
    # nsys 2026 writes device 0 for all of them, and the stream −1 as a number of 32 bits.
    held["deviceId"] = np.full(len(name), device, dtype=np.int64)
    held["streamId"] = np.where(held["streamId"] == _NO_STREAM, -1, held["streamId"])
    return _on_device(held, names, ["sync"] * len(names), name)


def _on_device(
    held: Mapping[str, NDArray[np.int64]],
    names: list[str],
    kinds: list[str],
    name: NDArray[np.int64],
    size: NDArray[np.int64] | None = None,
) -> Rows:
    device, stream = (np.where(held[key] == MISSING, 0, held[key]) for key in ("deviceId", "streamId"))
    nothing = np.full(len(name), -1, dtype=np.int64)
    size = nothing if size is None else np.where(size >= 0, size, -1)
    launch = _launch(held["correlationId"])
    return Rows(names, kinds, name, held["start"], held["end"], np.maximum(device, 0), stream, launch, size)


def _launch(correlation: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.where(correlation > 0, correlation, -1)


def _strings(database: Database, ids: NDArray[np.int64]) -> dict[int, str]:
    return database.texts("StringIds", "id", "value", np.unique(ids).tolist())


def _enum(database: Database, table: str, known: Mapping[int, str]) -> Mapping[int, str]:
    """Return the names of an enum from the file, without their common prefix, else CUPTI's."""
    names = database.texts(table, "id", "name")
    return {**known, **{i: re.sub(r"^CUDA_MEM(?:CPY|OPR_MEMORY)_KIND_", "", name) for i, name in names.items()}}


def _copy_name(way: str, source: str, target: str) -> str:
    """Return the name that PyTorch's profiler gives a copy: Memcpy HtoD (Pinned -> Device)."""
    found = _DIRECTION.search(way)
    if not found:
        return "Memcpy"
    # Arrays lie on the device.
    ends = [end.replace("A", "D") for end in found.groups()]
    kinds = f" ({source.title()} -> {target.title()})" if source and target else ""
    return f"Memcpy {'to'.join(ends)}{kinds}"
