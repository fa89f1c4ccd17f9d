"""The table of collectives: groups of a size share a row, and what is not known is not a figure."""

from pathlib import Path

from dlprof.measures.bandwidth import bandwidth
from dlprof.panels.collectives import draw
from tests import runs
from tests.measures.test_bandwidth import exchanging


def test_groups_of_as_many_ranks_share_a_row(tmp_path: Path) -> None:
    (panel,) = draw(runs.measured(runs.foreign(tmp_path, *exchanging((0, 1), (2, 3))), bandwidth))
    assert [row[:4] for row in panel.rows] == [("all_reduce in 2 groups", "2", "below 256 MiB", "1")]
    assert panel.rows[0][5:] == ("250.0 µs", "1.00 ms", "40 GB/s", "40 GB/s", "8.9 %", "rank 1, 1 of 1")


def test_what_missing_ranks_hide_is_said(tmp_path: Path) -> None:
    (panel,) = draw(runs.measured(runs.foreign(tmp_path, *exchanging((0, 1, 2))[:2]), bandwidth))
    assert panel.rows[0][5] == "—"
    assert "at most so long" in panel.note
