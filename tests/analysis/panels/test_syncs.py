"""What makes the host wait for its device: of the rank that waits longest, and on the CPU only counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.panels.host import SYNCS_PICTURE
from dlprof.errors import NotMeasured
from tests.fixtures import runs, traces
from tests.fixtures.hosts import US, item
from tests.fixtures.runs import MS


def job(rank: int, until: int) -> dict[str, Any]:
    """Return one traced step in which `.item()` waits from 1 ms on, and the device then idles until 7 ms."""
    return traces.trace(
        traces.step(1, 0, 10 * MS),
        traces.launched("gemm", 0, 10 * US, until - 12 * US, 1),
        *item(1 * MS, until, 2),
        traces.launched("gemm", 7 * MS, 7 * MS + 10 * US, 2 * MS, 5),
        rank=rank,
    )


def test_the_rank_that_waits_longest_is_shown(tmp_path: Path) -> None:
    path = runs.foreign(tmp_path, job(0, 3 * MS), job(1, 5 * MS))
    (panel,) = runs.called(path, SYNCS_PICTURE.draw)
    assert panel.title.endswith("rank 1")
    ((by, call, times, waits, idle),) = panel.rows
    assert (by, call, times) == ("aten::item", "cudaMemcpyAsync", 1)
    assert panel.columns[3:] == ("waiting a step_ns", "device then idle_ns")
    assert waits == pytest.approx(4.01 * MS, rel=1e-3)
    assert idle == pytest.approx(2 * MS, abs=5 * US)  # until the next launch


def test_on_the_cpu_nothing_waits_and_reads_are_counted(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(1, 0, 10 * MS),
        *(traces.op("aten::item", n * MS, 10 * US) for n in (1, 2, 4)),
        traces.op("aten::mm", 3 * MS, MS),
        device="",
        backend="",
        world_size=1,
    )
    (panel,) = runs.called(runs.foreign(tmp_path, made), SYNCS_PICTURE.draw)
    assert panel.rows == (("aten::item", 3),)
    assert panel.columns == ("by", "times a step")


def test_a_step_that_waits_for_no_device_has_no_such_table(tmp_path: Path) -> None:
    made = traces.trace(traces.step(1, 0, 10 * MS), traces.launched("gemm", 0, 10 * US, 5 * MS, 1), world_size=1)
    with pytest.raises(NotMeasured, match="no device"):
        runs.called(runs.foreign(tmp_path, made), SYNCS_PICTURE.draw)
