"""The table of collectives: groups of a size share a row, and what is not known is not a figure."""

from pathlib import Path

import pytest

from dlprof.analysis.communication.bandwidth import bandwidth
from dlprof.analysis.communication.collectives import collectives
from dlprof.analysis.communication.matching import matched
from dlprof.analysis.panels.communication import draw_collectives
from tests.fixtures import runs, traces
from tests.fixtures.exchanges import HANDED_ON, exchanging, pipeline
from tests.fixtures.runs import asked


def test_groups_of_as_many_ranks_share_a_row(tmp_path: Path) -> None:
    (panel,) = asked(runs.measured(runs.foreign(tmp_path, *exchanging((0, 1), (2, 3))), bandwidth), draw_collectives)
    assert [row[:4] for row in panel.rows] == [("all_reduce in 2 groups", 2, "below 256 MiB", 1)]
    assert panel.rows[0][5:10] == pytest.approx((250_000, 1_000_000, 40e9, 40e9, 40 / 450))
    assert panel.columns[10:] == ("last rank", "came last in", "of")
    assert panel.rows[0][10:] == (1, 1, 1)


def test_what_missing_ranks_hide_is_said(tmp_path: Path) -> None:
    (panel,) = asked(runs.measured(runs.foreign(tmp_path, *exchanging((0, 1, 2))[:2]), bandwidth), draw_collectives)
    assert (panel.columns[5], panel.rows[0][5]) == ("waiting_ns", None)
    assert panel.rows[0][10:] == (None, None, None)
    assert "at most this long" in panel.note


def test_a_send_and_its_receive_are_one_whose_transfer_begins_when_both_have_come(tmp_path: Path) -> None:
    run = runs.measured(runs.foreign(tmp_path, *pipeline(*HANDED_ON)), bandwidth, collectives, matched)
    (panel,) = asked(run, draw_collectives)
    # Transfers of 500, 300, 200 and 200 µs, and 1, 2.8, 1.6 and 5.4 ms of waiting of one of two ranks each.
    assert panel.rows[0][:2] == ("send and receive in 4 directions", 2)
    assert panel.rows[0][5:7] == pytest.approx((1_350_000, 300_000))


def test_why_sends_are_not_in_it_is_said(tmp_path: Path) -> None:
    made = exchanging((0, 1), (2, 3))
    for trace in made:
        trace["traceEvents"].append(traces.sent("send", 0, 0, 1_000, group="", ranks=(0, 1, 2, 3), told=False))
    (panel,) = asked(runs.measured(runs.foreign(tmp_path, *made), bandwidth, collectives, matched), draw_collectives)
    assert "between which ranks" in panel.note
