"""The tables of the flight recorders: where each rank is, and which collectives they hold."""

from __future__ import annotations

from pathlib import Path

from dlprof.analysis.panels.communication import FLIGHT_RECORDER_PICTURE
from tests.fixtures import dumps
from tests.fixtures.runs import called


def test_where_each_rank_is_and_what_was_issued(tmp_path: Path) -> None:
    where, kinds = called(dumps.hung(tmp_path / "d"), FLIGHT_RECORDER_PICTURE.draw)
    assert [row[1] for row in where.rows] == [
        *("waits in", "waits in", "waits in", "last issued", "waits in", "last issued", "waits in", "waits in"),
    ]
    assert kinds.rows == (("the default group", "all_reduce", 30, 8, "1000"),)
