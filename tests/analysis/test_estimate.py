"""What rules build their estimates with."""

from __future__ import annotations

import pandas as pd
import pytest

from dlprof.analysis.estimate import Estimate, change, nothing, worst
from dlprof.result import Change, Setting


def test_nothing_costs_nothing_and_is_never_found() -> None:
    none = nothing("no loader has workers")
    assert (none.saving_ns, none.by_rank_ns, none.clear, none.summary) == (0.0, {}, True, "no loader has workers")


def test_the_worst_rank_is_the_first_with_most() -> None:
    assert worst({3: 1.0, 1: 2.0, 2: 2.0}) == 1
    with pytest.raises(ValueError, match="empty"):
        worst({})


def test_the_rows_of_an_estimate_are_those_of_its_worst_rank() -> None:
    frame = pd.DataFrame({"rank": [0, 1, 1], "ns": [1.0, 2.0, 3.0]})
    assert Estimate(by_rank_ns={0: 1.0, 1: 2.0}).rows(frame)["ns"].tolist() == [2.0, 3.0]


def test_a_change_names_its_settings() -> None:
    made = change("`num_workers=6` (is 0)", num_workers=(0, 6), persistent_workers=(None, True))
    settings = (Setting("num_workers", 0, 6), Setting("persistent_workers", None, True))
    assert made == Change("`num_workers=6` (is 0)", settings, numerics=False)
    assert change("a larger batch", numerics=True).numerics
