"""What lies between the phases of a step, by the phase before it, and the loops there."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis import intervals as iv
from dlprof.analysis.host.segments import model_calls, segments
from tests.fixtures import runs
from tests.fixtures.phases import STEPS, US, called_again, loop, one_by_one, trained


@pytest.mark.parametrize("after", ["backward", "optimizer"])
def test_a_loop_stands_after_the_phase_that_ended_last(tmp_path: Path, after: str) -> None:
    made = trained(lambda at, ids: loop(at, ids, 40, "mul_", "add_"), length=4_200 * US, after=after)
    found = runs.rank_of(tmp_path, made).once(segments)
    (one,) = found.loops
    assert (one.after, set(one.names), one.turns) == (after, {"aten::mul_", "aten::add_"}, 40)
    assert iv.total(one.times) == pytest.approx(STEPS * 39.5 * 50 * US, rel=0.03)
    assert not len(one.behind)
    assert iv.total(found.after[after]) >= iv.total(one.times)


def test_turns_are_those_of_most_of_its_operators(tmp_path: Path) -> None:
    """One that is called twice a turn, and two that are called once."""
    made = trained(lambda at, ids: loop(at, ids, 20, "slice", "mul", "slice", "add"), length=3_200 * US)
    assert [one.turns for one in runs.rank_of(tmp_path, made).once(segments).loops] == [20]


def test_a_loop_over_samples_has_its_part_of_the_backward_pass(tmp_path: Path) -> None:
    (one,) = runs.rank_of(tmp_path, one_by_one()).once(segments).loops
    assert iv.total(one.behind) == STEPS * 20 * 80 * US


@pytest.mark.parametrize(("same", "calls"), [(True, 5), (False, 1)])
def test_calls_of_one_model_for_a_backward_pass(tmp_path: Path, same: bool, calls: int) -> None:
    assert runs.rank_of(tmp_path, called_again(5, same=same)).once(model_calls) == calls


def test_without_phases_nothing_is_called_again(tmp_path: Path) -> None:
    assert runs.rank_of(tmp_path, trained(length=3_000 * US)).once(model_calls) == 1
