"""Phases of validation are counted as they come."""

from pathlib import Path

import pytest

from dlprof.analysis.step.validation import validation
from tests.fixtures import runs
from tests.fixtures.runs import MS, light


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


def test_a_phase_in_which_the_job_was_suspended_is_no_longer_for_it(tmp_path: Path) -> None:
    steps = [light(n, 1_000 * MS, kind="validation" if 8 <= n < 12 else "train") for n in range(20)]
    steps[9]["dur_ns"] = 100_000 * MS
    for n in range(10, 20):
        steps[n]["start_ns"] += 99_000 * MS
    resumed = [steps[9]["start_ns"] + 99_000 * MS]
    path = runs.recorded(tmp_path, (None, steps, runs.CPU), resumed_ns=resumed)
    (row,) = runs.measured(path, validation).frame(validation).to_dict("records")
    assert (row["phases"], row["steps"], row["phase_ns"]) == (1, 3, 3_000 * MS)
