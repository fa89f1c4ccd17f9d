"""Reads one rank of an export of Nsight Systems into spans and traced steps, as a torch-profiler trace is read.

What differs between versions (columns, tables, names of tables of numbers) is looked up in the file. What the file
lacks is told with the option of nsys that brings it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.errors import DlprofError
from dlprof.read.kineto.patterns import collective_of, kind_of
from dlprof.read.nsys import activities, ranges, steps
from dlprof.read.nsys.activities import Rows
from dlprof.read.nsys.database import MISSING, THREADS, Database, open_database
from dlprof.read.nsys.processes import Process, processes_in
from dlprof.read.sources import Reading
from dlprof.units import duration

# Times since 1970 in ns are larger than this; those since the start of a capture are smaller (31 years).
_UNIX_NS = 10**18
_LONGEST_NS = 10 * 366 * 86_400 * 10**9
_MOST_COMPLAINTS = 3

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
    every = [*device, host, _ranges(named)]
    base = _base(database, every)
    if base:
        facts["base_time_ns"] = base
    spans, lost = _spans(every, process.device, base)
    if lost:
        warnings.append(f"{lost:,} events without a usable time are left out")
    launched = _launched(device[0], host)
    found = steps.find(named, launched)
    if found is None:
        warnings.append(_no_steps(launched))
    else:
        facts["steps_by"] = f"{found.way} ({found.sure})"
    if not _work(device):
        facts["errors"] = ["no work of a GPU was traced (nsys profile --trace=cuda,nvtx)"]
        facts["operators"] = any(named.operator)
    tables = {
        "spans": schema.check("spans", spans),
        "traced_steps": schema.check("traced_steps", _steps(found, base)),
    }
    return Reading(tables, facts, tuple(f"{database.name}: {warning}" for warning in warnings))


def _work(device: Sequence[Rows]) -> int:
    """Return how many rows of work there are."""
    return sum(len(rows.name) for rows in device)


def _ranges(named: ranges.Ranges) -> Rows:
    """Return the ranges as rows of the host: operators, collectives, loader calls and annotations, by their names."""
    kinds = [
        (kind_of("cpu_op" if operator else "user_annotation", name) or ("host", "annotation"))[1]
        for name, operator in zip(named.names, named.operator, strict=True)
    ]
    nothing = np.full(len(named.name), -1, dtype=np.int64)
    thread = np.where(named.thread == MISSING, 0, named.thread % THREADS)
    return Rows(named.names, kinds, named.name, named.start, named.end, nothing, thread, nothing)


def _base(database: Database, every: Sequence[Rows]) -> int:
    """Return the Unix time of the export's zero, ns; 0 where its times are Unix times already, or it does not say."""
    first = next((int(rows.start[len(rows.start) // 2]) for rows in every if len(rows.start)), 0)
    if first >= _UNIX_NS:
        return 0
    held = database.integers("TARGET_INFO_SESSION_START_TIME", ["utcEpochNs"])["utcEpochNs"]
    base = int(held[0]) if len(held) else 0
    return base if 0 < base < 2**62 else 0


def _spans(every: Sequence[Rows], main: int, base: int) -> tuple[pd.DataFrame, int]:
    """Return the table of all rows in order of start, the longer first, and how many had no usable time."""
    keep = [
        np.flatnonzero((r.start != MISSING) & (r.end >= r.start) & (r.end - r.start <= _LONGEST_NS) & _fits(r, base))
        for r in every
    ]
    lost = sum(len(r.start) - len(k) for r, k in zip(every, keep, strict=True))
    pairs = [(r, k) for r, k in zip(every, keep, strict=True) if len(k)]
    if not pairs:
        return schema.empty("spans"), lost

    def column(of: Any) -> NDArray[np.int64]:
        return np.concatenate([of(r)[k] for r, k in pairs])

    start, end = column(lambda r: r.start), column(lambda r: r.end)
    order = np.lexsort((start - end, start))
    texts: list[str] = []
    kinds: list[str] = []
    directions: list[tuple[str, str]] = []
    collectives: list[str] = []
    places: list[NDArray[np.int64]] = []
    for r, k in pairs:
        places.append(r.name[k] + len(texts))
        texts += r.names
        kinds += r.kinds
        directions += r.directions or [("", "")] * len(r.names)
        collectives += [
            collective_of(name) if kind == "communication" else "" for name, kind in zip(r.names, r.kinds, strict=True)
        ]
    of = np.concatenate(places)[order]
    nothing = np.full(len(order), -1, dtype=np.int64)
    size = column(lambda r: r.bytes if len(r.bytes) else np.full(len(r.name), -1, dtype=np.int64))[order]
    columns = {
        "lane": _lanes(column(lambda r: r.device)[order], column(lambda r: r.stream)[order], max(main, 0)),
        "kind": _coded(kinds, of, schema.KINDS),
        "name": _coded(texts, of),
        "start_ns": start[order] + base,
        "dur_ns": (end - start)[order],
        "launch": column(lambda r: r.launch)[order],
        "bytes": size,
        "copy": _coded([d[0] for d in directions], of),
        "memory": _coded([d[1] for d in directions], of),
        "collective": _coded(collectives, of),
        **{name: _coded([""], np.zeros(len(order), dtype=np.int64)) for name in ("group", "communicator")},
        **{name: _coded([""], np.zeros(len(order), dtype=np.int64)) for name in ("dtype", "shape")},
        "sequence": nothing,
        "peer": nothing.copy(),
    }
    return pd.DataFrame({name: columns[name] for name in schema.SPANS}, copy=False), lost


def _fits(rows: Rows, base: int) -> NDArray[np.bool_]:
    """Return which times are still numbers of 64 bits once the base is added, and no century away."""
    fits: NDArray[np.bool_] = np.abs(rows.start) < 2**62 - base
    return fits


def _lanes(device: NDArray[np.int64], stream: NDArray[np.int64], main: int) -> Any:
    pairs, of = np.unique(np.column_stack((device, stream)), axis=0, return_inverse=True)
    names = [f"{'host' if d < 0 else 'device' if d == main else f'device{d}'}:{number}" for d, number in pairs.tolist()]
    return _coded(names, of.reshape(-1))


def _coded(texts: Sequence[str], of: NDArray[np.int64], categories: Sequence[str] = ()) -> Any:
    """Return a categorical of places in texts, which may repeat; only texts that are used become categories."""
    used = np.flatnonzero(np.bincount(of, minlength=len(texts)))
    chosen = list(categories) or sorted({texts[i] for i in used.tolist()})
    place = {text: i for i, text in enumerate(chosen)}
    codes = np.zeros(len(texts), dtype=np.min_scalar_type(-len(chosen) - 1))
    codes[used] = [place[texts[i]] for i in used.tolist()]
    return pd.Categorical.from_codes(codes[of], categories=pd.Index(chosen))


def _launched(kernels: Rows, calls: Rows) -> steps.Launched:
    """Return the kernels in the order of their launches; those whose launch is not in the export at their own start."""
    at = kernels.start.copy()
    known = np.flatnonzero(calls.launch >= 0)
    if len(known) and len(at):
        known = known[np.argsort(calls.launch[known], kind="stable")]
        ids = calls.launch[known]
        place = np.minimum(np.searchsorted(ids, kernels.launch), len(ids) - 1)
        linked = ids[place] == kernels.launch
        at = np.where(linked, calls.start[known][place], at)
        if linked.mean() >= 0.9:  # what is not linked was launched before the export begins
            kept = np.flatnonzero(linked)
            order = kept[np.argsort(at[kept], kind="stable")]
            return steps.Launched(kernels.names, kernels.name[order], at[order])
    order = np.argsort(at, kind="stable")
    return steps.Launched(kernels.names, kernels.name[order], at[order])


def _steps(found: steps.Steps | None, base: int) -> pd.DataFrame:
    if found is None:
        return schema.empty("traced_steps")
    return pd.DataFrame({"step": found.number, "start_ns": found.start + base, "dur_ns": found.dur})


def _no_steps(launched: steps.Launched) -> str:
    """Say that no step was found, what recurs all the same, and what would mark steps."""
    marks = "torch.cuda.nvtx.range_push(f'step {n}') marks them, and `dlprof wrap --nsys` does"
    recurring = steps.loop(launched)
    if recurring is None:
        return f"nothing marks its steps, and no loop recurs in it: the figures are of the whole time ({marks})"
    kernels, often, ns = recurring
    return (
        f"nothing marks its steps: a loop of {kernels:,} kernels recurs {often} × in it, every {duration(ns)}, but no "
        f"optimizer runs there, and the layers of a model recur too: the figures are of the whole time ({marks})"
    )


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


def _lacking(database: Database, named: ranges.Ranges, calls: Rows, device: Sequence[Rows]) -> list[str]:
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
