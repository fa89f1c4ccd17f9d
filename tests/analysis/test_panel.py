"""Panels are made of plain values, and one that cannot be drawn costs no other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dlprof.analysis.panel import Picture, drawn, points, table
from dlprof.errors import NotMeasured
from dlprof.result import Panel
from tests.fixtures import asking, runs

FRAME = pd.DataFrame({"rank": np.arange(3), "ns": [1.5, np.nan, 2.0], "name": ["a", "b", None]})


def test_a_table_holds_the_chosen_columns_of_the_first_rows_as_plain_values() -> None:
    made = table("Title", FRAME, {"name": "kernel", "ns": "time_ns"}, most=2, note="A note.")
    assert made == Panel("table", "Title", (("a", 1.5), ("b", None)), ("kernel", "time_ns"), note="A note.")
    whole = table("Title", FRAME, {"rank": "rank"})
    assert whole.rows == ((0,), (1,), (2,))
    assert {type(value) for row in whole.rows for value in row} == {int}


def test_points_are_the_index_and_the_values_there() -> None:
    assert points(FRAME.set_index("rank")[["ns"]]) == ((0, 1.5), (1, None), (2, 2.0))


def test_a_picture_that_cannot_be_drawn_costs_no_other(tmp_path: Path) -> None:
    run = runs.measured(asking.two_ranks(tmp_path).path)

    def nothing() -> list[Panel]:
        raise NotMeasured("nothing to draw")

    def fine() -> list[Panel]:
        return [table("Title", FRAME, {"rank": "rank"})]

    assert [panel.title for panel in drawn(run, [Picture(nothing), Picture(fine)])] == ["Title"]


def test_a_picture_that_names_what_there_is_not_fails_where_it_is_made() -> None:
    def typo(step_meens: pd.DataFrame) -> list[Panel]:
        raise AssertionError(step_meens)

    with pytest.raises(TypeError, match="step_meens"):
        Picture(typo)
