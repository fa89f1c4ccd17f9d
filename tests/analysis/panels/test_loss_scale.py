"""The loss scale over the steps, in powers of two."""

from pathlib import Path

from dlprof.analysis.panels.precision import draw
from dlprof.analysis.precision.scalers import scale_changes, scalers
from tests.fixtures.runs import asked, measured
from tests.fixtures.scalers import scaled


def test_the_scale_is_drawn_of_one_rank(tmp_path: Path) -> None:
    path = scaled(tmp_path, skipped=(0, 1, 50), grown=(40,), ranks=2)
    (panel,) = asked(measured(path, scalers, scale_changes), draw)
    assert panel.columns == ("step", "scale")
    assert panel.rows == ((0, 15.0), (1, 14.0), (40, 15.0), (50, 14.0))
    assert "skipped 3 steps, 2 of them before" in panel.note
    assert "16,384" in panel.note


def test_what_is_decided_on_the_device_is_said(tmp_path: Path) -> None:
    (panel,) = asked(measured(scaled(tmp_path, unknown=True), scalers, scale_changes), draw)
    assert "only the beginning is known" in panel.note
