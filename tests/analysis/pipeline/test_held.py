"""What schedules hold and leave idle, against what their papers say."""

from __future__ import annotations

import pandas as pd
import pytest

from dlprof.analysis.pipeline.pipeline_plans import FORMULA, GRID, most_held, schedules


def rows(ranks: int, microbatches: int) -> dict[str, pd.Series]:
    return {r["schedule"]: r for _, r in schedules(ranks, microbatches).iterrows()}


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_gpipe_holds_all_and_1f1b_as_many_as_ranks(ranks: int, microbatches: int) -> None:
    found = rows(ranks, microbatches)
    bubble = (ranks - 1) / (microbatches + ranks - 1)
    for name, held in (("GPipe", 1.0), ("1F1B", ranks / microbatches)):
        assert found[name]["activations"] == pytest.approx(held)
        assert found[name]["idle"] == pytest.approx(bubble)
        assert (found[name]["weights"], found[name]["how"]) == (1, GRID)


def test_interleaving_is_idle_for_less_and_holds_more() -> None:
    found = rows(4, 8)
    assert found["Interleaved1F1B"]["idle"] == pytest.approx(3 / (2 * 8 + 3))
    assert found["Interleaved1F1B"]["activations"] > found["1F1B"]["activations"]
    assert found["ZBVZeroBubble"]["idle"] < found["Interleaved1F1B"]["idle"]


def test_closed_forms_are_named_as_such() -> None:
    found = schedules(4, 8)
    formulas = found[found["how"] == FORMULA].set_index("schedule")
    chimera = formulas.loc[next(name for name in formulas.index if name.startswith("Chimera"))]
    assert (chimera["idle"], chimera["weights"]) == (pytest.approx(2 / 18), 2)
    assert sorted(formulas["weights"]) == [2, 2, 4]
    assert not any(name.startswith("Chimera") for name in schedules(3, 8)["schedule"])  # an odd number of ranks


def test_a_backward_pass_in_halves_holds_until_its_weights() -> None:
    assert most_held([(0, "forward", 0), (0, "input", 0), (0, "forward", 1), (0, "weight", 0), (0, "weight", 1)]) == 2
    assert most_held([(0, "forward", 0), (0, "backward", 0), (0, "forward", 1)]) == 1
