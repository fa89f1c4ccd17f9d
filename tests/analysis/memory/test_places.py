"""Where in the backward pass gradients are made, what is saved until then, and which places may be the peak."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from dlprof.analysis.memory.snapshot import (
    at_places,
    corners,
    largest_unit,
    places_of,
    unit_of,
    units,
    with_modules_inside,
)
from tests.fixtures.holding import row

ROWS = [
    row("parameter", "embedding", 1_000, "Embedding"),
    row("parameter", "a", 40),
    row("parameter", "b", 20),
    row("gradient", "embedding", 1_000, "Embedding"),
    row("gradient", "a", 40),
    row("gradient", "b", 20),
    row("activation", "a", 600, tensors=3),
    row("activation", "act", 900, "GELU"),
    row("activation", "head", 50),
    row("activation", "head", 8, dtype="int64"),
]


def places(*more: dict[str, object]) -> pd.DataFrame:
    return places_of(pd.DataFrame([*ROWS, *more]))


def test_what_is_saved_in_order_with_the_gradients_that_are_made_there() -> None:
    found = places()
    assert found["module"].to_list() == ["a", "act", "head", "head"]
    assert found["kept"].to_list() == [600, 900, 50, 8]
    # Two of its largest tensor flow through each: the result's gradient and the input's. None through indices.
    assert found["flowing"].to_list() == [400, 1_800, 100, 0]
    # The embedding saves nothing: its gradient is made after that of the next that does; and so is that of b, which has
    # none behind it, with the last before it.
    assert found["gradient"].to_list() == [1_060, 0, 0, 0]


def test_a_parameter_of_two_modules_has_its_gradient_with_the_later_one() -> None:
    found = places(row("shared", "head", 0, full_bytes=1_000))
    assert found["gradient"].to_list() == [60, 0, 0, 1_000]
    # The earlier one makes another, and adds them up: both are there for a moment.
    assert found["own"].to_list() == [1_060, 0, 0, 1_000]


def test_what_was_recorded_in_the_order_of_the_backward_pass_is_turned_round() -> None:
    blocks = [row(part, f"blocks.{n}", 10 * n) for part in ("parameter", "activation") for n in (1, 2, 3)]
    assert places_of(pd.DataFrame(blocks))["kept"].to_list() == [10, 20, 30]
    assert places_of(pd.DataFrame(blocks[:3] + blocks[:2:-1]))["kept"].to_list() == [10, 20, 30]


def test_without_names_of_modules_gradients_are_spread_over_what_is_saved() -> None:
    held = pd.DataFrame([r if r["part"] != "activation" else r | {"module": ""} for r in ROWS])
    assert places_of(held)["gradient"].to_list() == [1_000, 0, 40, 20]


def test_where_nothing_is_saved_there_is_one_place() -> None:
    found = places_of(pd.DataFrame([r for r in ROWS if r["part"] != "activation"]))
    assert (len(found), found["kept"].sum(), found["gradient"].sum()) == (1, 0, 1_060)
    assert at_places(pd.DataFrame(ROWS), found["module"], pd.DataFrame(ROWS[:1])).tolist() == [1_000]


@pytest.mark.parametrize("seed", range(5))
def test_corners_are_where_any_weights_have_their_largest_sum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    grows, stays = np.cumsum(rng.uniform(size=40)), np.cumsum(rng.uniform(size=40))[::-1].copy()
    found = corners(grows, stays)
    assert 0 < len(found) < 40
    for weight in np.linspace(0.01, 10, 200):
        best = int((weight * grows + stays).argmax())
        assert (weight * grows + stays)[found].max() == (weight * grows + stays)[best]


def test_corners_of_one_place_and_of_equal_ones() -> None:
    assert corners(np.array([1.0]), np.array([2.0])) == [0]
    assert len(corners(np.array([1.0, 1.0]), np.array([2.0, 2.0]))) == 1


def test_lists_of_modules_are_units_and_what_lies_in_them_belongs_to_them() -> None:
    held = pd.DataFrame([row("activation", f"layers.{n}.up", 100) for n in range(3)] + ROWS[:1])
    assert units(held) == ["layers.0", "layers.1", "layers.2"]
    assert unit_of(held["module"], units(held)).to_list() == ["layers.0", "layers.1", "layers.2", ""]
    assert largest_unit(held, units(held)) == 1_000


def test_layers_of_one_of_several_models_repeat_too() -> None:
    rows = [row("activation", f"(Net).blocks.{n}.{name}", 100) for n in range(3) for name in ("up", "down")]
    held = pd.DataFrame([*rows, row("activation", "(Critic).0", 50)])
    assert units(held) == ["(Net).blocks.0", "(Net).blocks.1", "(Net).blocks.2", "(Critic).0"]
    assert with_modules_inside(held, units(held)) == ["(Net).blocks.0", "(Net).blocks.1", "(Net).blocks.2"]
