"""What a process called, and what its devices did: whole columns of the tables that CUPTI fills."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from dlprof.read.columnar.database import MISSING, Database
from dlprof.read.columnar.rows import Rows, numbered
from dlprof.read.kineto.patterns import copy_of, kind_of
from dlprof.read.nsys.processes import THREADS, of_process

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
    """Return what the file calls the numbers of a kind, without their common beginning, or else what CUPTI does."""
    told = database.texts(table, "id", "name")
    return {**known, **{i: re.sub(r"^CUDA_MEM(?:CPY|OPR_MEMORY)_KIND_", "", name) for i, name in told.items()}}


def _copy_name(way: str, source: str, target: str) -> str:
    """Return the name that PyTorch's profiler gives a copy: Memcpy HtoD (Pinned -> Device)."""
    found = _DIRECTION.search(way)
    if not found:
        return "Memcpy"
    # Arrays lie on the device.
    ends = [end.replace("A", "D") for end in found.groups()]
    kinds = f" ({source.title()} -> {target.title()})" if source and target else ""
    return f"Memcpy {'to'.join(ends)}{kinds}"
