"""The table of GPUs by their logs."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from dlprof.analysis.panel import drawn
from dlprof.analysis.panels.machine import GPU_LOGS_PICTURE
from tests.fixtures import runs, traces
from tests.fixtures.logged import smi
from tests.fixtures.runs import measured


def test_a_row_a_gpu_with_the_columns_that_were_logged(tmp_path: Path) -> None:
    (tmp_path / "gpus.csv").write_text(smi(datetime(2026, 3, 4), 9, 1980, 1300))
    (panel,) = drawn(measured(tmp_path / "gpus.csv", GPU_LOGS_PICTURE.draw), [GPU_LOGS_PICTURE])
    rows = [dict(zip(panel.columns, row, strict=True)) for row in panel.rows]
    assert [row["clock, MHz"] for row in rows] == [1980, 1300]
    assert "power limit, W" not in panel.columns
    assert "enforced.power.limit" not in panel.note  # the power itself was logged


def test_a_run_without_a_log_has_none(tmp_path: Path) -> None:
    assert (
        drawn(measured(runs.foreign(tmp_path / "a", traces.training()), GPU_LOGS_PICTURE.draw), [GPU_LOGS_PICTURE])
        == ()
    )
