"""Phases of validation are counted as they come."""

from pathlib import Path

import pytest

from dlprof.measures.validation import validation
from tests import runs
from tests.runs import MS, light


def test_phases_their_distance_and_what_they_wait_for(tmp_path: Path) -> None:
    kinds = "ttttvvttttvvvttttv"
    steps = [
        light(n, 10 * MS, kind="train" if k == "t" else "validation", fetch_ns=(k == "v") * 4 * MS)
        for n, k in enumerate(kinds)
    ]
    run = runs.measured(runs.recorded(tmp_path, (None, steps, runs.CPU)), validation)
    (row,) = run.frame(validation).to_dict("records")
    assert (row["phases"], row["steps"], row["every"], row["fetches"]) == (3, 6, 4.0, 2.0)
    assert row["phase_ns"] == pytest.approx(20 * MS)
    assert row["fetch_share"] == pytest.approx(0.4)
