"""A mixture of experts whose ranks get uneven numbers of tokens, and the straggler that it makes."""

from pathlib import Path

import pytest

from dlprof.analysis.experts.rules import expert_imbalance
from dlprof.analysis.stragglers.rules import straggler
from tests.fixtures import runs
from tests.fixtures.asking import ask
from tests.fixtures.routed import routed

FULL = ((100, 100, 100, 500), (100, 100, 120, 480), (120, 100, 100, 480))
TURNS = ((100, 100, 100, 500), (500, 100, 100, 100), (100, 500, 100, 100))
EVEN = ((200, 204, 196, 200), (200, 196, 204, 200), (196, 200, 200, 204))


def test_the_full_rank_is_found_and_the_straggler_rule_leaves_it_to_this_one(tmp_path: Path) -> None:
    path = runs.foreign(tmp_path, *routed(*FULL))
    found = ask(expert_imbalance.RULE, path)
    assert found.state == "found"
    assert found.ranks == (3,)
    assert found.saving_ns == pytest.approx(1_000 * (300 + 280 + 280) / 3, rel=0.01)
    assert found.at_most
    assert "rank 3 gets most" in found.summary
    assert ([c.training for c in found.changes], found.training) == ([False, True, True], False)
    late = ask(straggler.RULE, path)
    assert late.state == "clear"
    assert "see expert_imbalance" in late.summary


def test_a_rank_that_is_full_in_turn_is_found_as_well(tmp_path: Path) -> None:
    found = ask(expert_imbalance.RULE, runs.foreign(tmp_path, *routed(*TURNS)))
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(300_000, rel=0.01)
    assert "changes" in found.summary


def test_even_tokens_are_left_alone(tmp_path: Path) -> None:
    assert ask(expert_imbalance.RULE, runs.foreign(tmp_path, *routed(*EVEN))).state == "clear"


def test_a_slow_rank_with_even_tokens_is_a_straggler(tmp_path: Path) -> None:
    path = runs.foreign(tmp_path, *routed(*EVEN, slower=(1, 1, 1, 3)))
    assert ask(expert_imbalance.RULE, path).state == "clear"
    assert ask(straggler.RULE, path).state == "found"


def test_sizes_that_are_the_same_in_each_step_are_no_tokens(tmp_path: Path) -> None:
    path = runs.foreign(tmp_path, *routed(*FULL[:1] * 3))
    assert ask(expert_imbalance.RULE, path).state == "does_not_apply"
    assert ask(straggler.RULE, path).state == "found"
