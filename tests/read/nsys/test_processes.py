"""Which processes of an export are ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.errors import DlprofError
from dlprof.read.nsys.format import Process, piece_of, processes_of
from tests.fixtures import exports
from tests.fixtures.exports import HOST, PID, kernel, mark, text


def test_ranks_are_the_processes_that_work_on_a_device_in_the_order_of_the_devices(tmp_path: Path) -> None:
    second, third = (HOST | n << 24 for n in (5, 6))
    kernels = [
        kernel(1, 0, 10, device=1, pid=PID),
        kernel(1, 10, 11, device=0, pid=PID),  # a rank that touches device 0
        kernel(1, 0, 10, device=0, pid=second),
        kernel(1, 0, 10, device=0, pid=third),
    ]
    path = exports.tables(
        tmp_path / "x", StringIds=[text(1, "k")], CUPTI_ACTIVITY_KIND_KERNEL=kernels, NVTX_EVENTS=[mark("a", 0, 9)]
    )
    assert processes_of(path) == [Process(second, 0), Process(third, 0), Process(PID, 1)]
    assert [one.pid for one in processes_of(path)] == [5, 6, 4000]


def test_without_a_device_they_are_those_that_name_ranges(tmp_path: Path) -> None:
    marks = [mark("a", n, n + 1) for n in range(30)] + [mark("b", 0, 1, thread=HOST | 9 << 24 | 1)]
    path = exports.tables(tmp_path / "x", StringIds=[text(1, "k")], NVTX_EVENTS=marks)
    assert processes_of(path) == [Process(PID, -1)]


def test_a_version_that_keeps_no_process_is_one_rank(tmp_path: Path) -> None:
    row = kernel(1, 0, 10, device=2)
    del row["globalPid"]
    path = exports.tables(tmp_path / "x", StringIds=[text(1, "k")], CUPTI_ACTIVITY_KIND_KERNEL=[row])
    assert processes_of(path) == [Process(None, 2)]
    assert Process(None, 2).key == ""


def test_another_database_is_no_export(tmp_path: Path) -> None:
    path = exports.tables(tmp_path / "x", songs=[{"title": "a"}])
    assert piece_of(path, 4000) == ""
    with pytest.raises(DlprofError, match="no export of Nsight Systems"):
        processes_of(path)


def test_a_recorded_rank_is_the_process_with_its_number(tmp_path: Path) -> None:
    path = exports.tables(tmp_path / "x", StringIds=[text(1, "k")], CUPTI_ACTIVITY_KIND_KERNEL=[kernel(1, 0, 5)])
    assert (piece_of(path, 4000), piece_of(path, 4001)) == (str(PID), "")
