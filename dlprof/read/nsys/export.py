"""Reads one rank of an export of Nsight Systems into spans and traced steps, as a torch-profiler trace is read.

What differs between versions (columns, tables, names of tables of numbers) is looked up in the file. What the file
lacks is told with the option of nsys that brings it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlprof import schema
from dlprof.errors import DlprofError
from dlprof.read.columnar import recurring
from dlprof.read.columnar.database import MISSING, Database, open_database
from dlprof.read.columnar.rows import Ranges, Rows, annotation_rows, spans_of
from dlprof.read.nsys import activities, ranges
from dlprof.read.nsys.processes import Process, processes_in
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
    read, and a warning. Raises DlprofError where the file cannot be read or is no export.
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
    named = ranges.read(database, process.global_pid)
    host = activities.calls(database, process.global_pid)
    device = activities.device_rows(database, process.global_pid, process.device)
    facts, warnings = _facts(database, process), _lacking(database, named, host, device)
    every = [*device, host, annotation_rows(named)]
    base = _base(database, every)
    if base:
        facts["base_time_ns"] = base
    spans, lost = spans_of(every, process.device, base)
    if lost:
        warnings.append(f"{lost:,} events without a usable time are left out")
    launched = recurring.launched(device[0], host)
    found = recurring.find(named, launched)
    if found is None:
        warnings.append(recurring.none_found(launched, _MARKS))
    else:
        facts["steps_by"] = f"{found.way} ({found.sure})"
    if not _work(device):
        facts["errors"] = ["no work of a GPU was traced (nsys profile --trace=cuda,nvtx)"]
        facts["operators"] = any(named.operator)
    tables = {
        "spans": schema.check("spans", spans),
        "traced_steps": schema.check("traced_steps", recurring.table(found, base)),
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
    told = database.named("META_DATA_EXPORT") or database.named("EXPORT_META_DATA")
    version = told.get("EXPORT_PRODUCT_VERSION") or told.get("EXPORT_SCHEMA_VERSION")
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
    """Return what nsys itself warned of (severity 2 is a warning, 3 an error), the first few."""
    severity, text = database.columns("DIAGNOSTIC_EVENT").get("severity"), "substr(text, 1, 300)"
    if severity is None or "text" not in database.columns("DIAGNOSTIC_EVENT"):
        return []
    rows = database.rows("DIAGNOSTIC_EVENT", [severity, text], most=1_000)
    told = dict.fromkeys(" ".join(str(line).split()) for level, line in rows if isinstance(level, int) and level >= 2)
    return [f"nsys said: {line}" for line in list(told)[:_MOST_COMPLAINTS]]
