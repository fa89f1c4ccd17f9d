"""Kernels, copies, sets, graphs, synchronisations and calls, by the numbers of CUPTI or of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.read.columnar.database import open_database
from dlprof.read.columnar.rows import Rows
from dlprof.read.nsys import export
from tests.fixtures import exports
from tests.fixtures.exports import PID, kernel, text

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def on_device(**more: Any) -> dict[str, Any]:
    row = {"start": 0, "end": 10, "deviceId": 1, "streamId": 13, "correlationId": 5, "globalPid": PID}
    return row | more


def names(rows: Rows) -> list[tuple[str, str]]:
    return [(rows.names[n], rows.kinds[n]) for n in rows.name.tolist()]


def test_each_kind_of_work_has_its_name_kind_and_place(tmp_path: Path) -> None:
    path = exports.tables(
        tmp_path / "x",
        StringIds=[text(1, "void gemm<float>()"), text(2, NCCL)],
        CUPTI_ACTIVITY_KIND_KERNEL=[kernel(1, 0, 10, 3), kernel(2, 10, 20, 0), kernel(99, 20, 30)],
        CUPTI_ACTIVITY_KIND_MEMCPY=[
            on_device(bytes=100, copyKind=1, srcKind=0, dstKind=2),
            on_device(bytes=200, copyKind=2, srcKind=2, dstKind=1),
            on_device(bytes=300, copyKind=8, srcKind=2, dstKind=2),
            on_device(bytes=-1, copyKind=77, srcKind=9, dstKind=None),
        ],
        CUPTI_ACTIVITY_KIND_MEMSET=[on_device(bytes=64)],
        CUPTI_ACTIVITY_KIND_GRAPH_TRACE=[on_device(graphId=4)],
        CUPTI_ACTIVITY_KIND_SYNCHRONIZATION=[on_device(syncType=3, streamId=2**32 - 1, deviceId=0)],
    )
    with open_database(path) as database:
        kernels, graphs, copies, sets, syncs = export.device_rows(database, PID, 1)
    assert names(kernels) == [("void gemm<float>()", "kernel"), (NCCL, "communication"), ("unnamed kernel", "kernel")]
    assert kernels.launch.tolist() == [3, -1, 1]
    assert [name for name, _ in names(copies)] == [
        "Memcpy HtoD (Pageable -> Device)",
        "Memcpy DtoH (Device -> Pinned)",
        "Memcpy DtoD (Device -> Device)",
        "Memcpy",
    ]
    assert [copies.directions[n] for n in copies.name.tolist()][:2] == [("HtoD", "pageable"), ("DtoH", "pinned")]
    assert copies.bytes.tolist() == [100, 200, 300, -1]
    assert (names(sets), sets.bytes.tolist(), names(graphs)) == (
        [("Memset (Device)", "set")],
        [64],
        [("CUDA graph 4", "kernel")],
    )
    # nsys 2026 writes 0 for the device of every synchronisation.
    assert (names(syncs), syncs.device.tolist(), syncs.stream.tolist()) == ([("Stream Sync", "sync")], [1], [-1])


def test_the_files_own_tables_of_numbers_come_first(tmp_path: Path) -> None:
    path = exports.tables(
        tmp_path / "x",
        StringIds=[text(1, "k")],
        CUPTI_ACTIVITY_KIND_MEMCPY=[on_device(bytes=1, copyKind=50, srcKind=60, dstKind=61)],
        ENUM_CUDA_MEMCPY_OPER=[{"id": 50, "name": "CUDA_MEMCPY_KIND_DTOH"}],
        ENUM_CUDA_MEM_KIND=[
            {"id": 60, "name": "CUDA_MEMOPR_MEMORY_KIND_DEVICE"},
            {"id": 61, "name": "CUDA_MEMOPR_MEMORY_KIND_PAGEABLE"},
        ],
    )
    with open_database(path) as database:
        copies = export.device_rows(database, PID, 1)[2]
    assert copies.directions == [("DtoH", "pageable")]


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("cudaLaunchKernel_v7000", "cudaLaunchKernel"),
        ("cudaMemcpyAsync_ptsz_v7000", "cudaMemcpyAsync"),
        ("cuLaunchKernelEx", "cuLaunchKernelEx"),
    ],
)
def test_calls_lose_the_version_of_their_interface(written: str, name: str, tmp_path: Path) -> None:
    row = {"start": 1, "end": 2, "globalTid": PID | 77, "correlationId": 9, "nameId": 1}
    path = exports.tables(tmp_path / "x", StringIds=[text(1, written)], CUPTI_ACTIVITY_KIND_RUNTIME=[row])
    with open_database(path) as database:
        calls = export.calls(database, PID)
    assert names(calls) == [(name, "runtime")]
    assert (calls.device.tolist(), calls.stream.tolist(), calls.launch.tolist()) == ([-1], [77], [9])
