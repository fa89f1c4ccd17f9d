"""The table of an inference server's phases: how many steps, how long, and tokens per second."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.step.panels.serving import PICTURE
from dlprof.errors import NotMeasured
from tests.fixtures import dialects, runs, traces


def test_a_row_a_phase(tmp_path: Path) -> None:
    names = ["step[EXTEND bs=2 toks=512]", *["step[DECODE bs=2]"] * 3]
    (panel,) = runs.called(
        runs.foreign(tmp_path / "job", dialects.serving(names, [4_000_000, *[1_000_000] * 3])), PICTURE.draw
    )
    assert "SGLang" in panel.title
    rows = {row[0]: row for row in panel.rows}
    assert (rows["decode"][1], rows["prefill"][1]) == (3, 1)
    assert (rows["decode"][4], rows["decode"][5]) == (2, 2)
    assert rows["prefill"][6] == pytest.approx(512 / 0.00405, rel=0.03)
    assert rows["prefill"][7] == pytest.approx(0.8, abs=0.05)


def test_a_training_job_has_none(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured):
        runs.called(runs.foreign(tmp_path / "job", traces.training()), PICTURE.draw)
