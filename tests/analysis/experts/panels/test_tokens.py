"""The table of tokens per rank, also where only some ranks are here."""

from pathlib import Path

import pytest

from dlprof.analysis.experts.panels.tokens import draw
from dlprof.analysis.experts.tokens import destinations, expert_balance, routed
from tests.fixtures import runs
from tests.fixtures.routed import routed as made
from tests.fixtures.runs import asked

FULL = ((100, 100, 100, 500), (100, 100, 200, 400))


def test_the_fullest_rank_is_the_first_row(tmp_path: Path) -> None:
    run = runs.measured(runs.foreign(tmp_path, *made(*FULL)), expert_balance, destinations, routed)
    (panel,) = asked(run, draw)
    assert panel.columns[:3] == ("rank", "tokens a step", "of the mean_times")
    assert panel.rows[0] == pytest.approx((3, 450, 2.25, 550_000, 0))
    assert len(panel.rows) == 4
    assert "2.25 × the mean rank's tokens" in panel.note


def test_of_missing_ranks_it_is_known_what_the_others_send_them(tmp_path: Path) -> None:
    run = runs.measured(runs.foreign(tmp_path, *made(*FULL)[:2]), expert_balance, destinations, routed)
    (panel,) = asked(run, draw)
    assert panel.title == "Tokens sent to each rank"
    assert panel.rows[0] == pytest.approx((3, 225, 2.25))
