"""What the steady steps leave out is counted once, each under its own name; phases of validation as they come."""

from pathlib import Path

import pytest

from dlprof.analysis.step.whole_job import PARTS, validation, whole_job
from dlprof.analysis.timeline.steps import step_means
from dlprof.errors import NotMeasured
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS

S = 1_000 * MS


def test_every_step_counts_once(tmp_path: Path) -> None:
    steps = [runs.light(n, S) for n in range(40)]
    steps[0]["first"] = 1
    for n in (10, 11):
        steps[n]["profiled"] = 1
    for n in (20, 21, 22):
        steps[n] |= {"kind": "validation", "first": int(n == 20)}
    steps[23]["first"] = 1
    steps[39] |= {"kind": "other", "first": 1}
    facts = {**runs.CPU, "clock": {"unix_ns": traces.BASE_NS - 5 * S, "perf_ns": 0}}
    stalls = [runs.stall("checkpoint", 5, 300 * MS), runs.stall("checkpoint", 21, 200 * MS)]
    resumed = [traces.BASE_NS + 30 * S + S // 4]
    path = runs.recorded(tmp_path / "run", (None, steps, facts), stalls=[stalls], resumed_ns=resumed)
    run = runs.measured(path, whole_job, step_means)
    frame = run.frame(whole_job)
    rows = {r["part"]: (r["steps"], r["ns"]) for r in frame.to_dict("records")}
    assert rows == {
        "setup": (0, 5 * S),
        "warmup": (4, 4 * S),  # the first step of all, too
        "steady": (27, 27 * S),
        "traced": (2, 2 * S),
        "epoch_ends": (1, S),
        "validation": (3, 3 * S),
        "other": (1, S),
        "suspended": (2, 2 * S),  # nobody knows to the instant when it went on
        "checkpoint": (2, 500 * MS),
    }
    assert rows["steady"][0] == run.frame(step_means)["steps"][0]
    assert frame.loc[frame["part"].isin(PARTS), "ns"].sum() == 45 * S


def test_without_the_light_layer_it_abstains(tmp_path: Path) -> None:
    path = runs.foreign(tmp_path / "traces", traces.trace(traces.step(1, 0, MS)))
    with pytest.raises(NotMeasured, match="no record of every step"):
        runs.measured(path, whole_job).frame(whole_job)


def test_phases_their_distance_and_what_they_wait_for(tmp_path: Path) -> None:
    kinds = "ttttvvttttvvvttttv"
    steps = [
        runs.light(n, 10 * MS, kind="train" if k == "t" else "validation", fetch_ns=(k == "v") * 4 * MS)
        for n, k in enumerate(kinds)
    ]
    run = runs.measured(runs.recorded(tmp_path, (None, steps, runs.CPU)), validation)
    (row,) = run.frame(validation).to_dict("records")
    assert (row["phases"], row["steps"], row["every"], row["fetches"]) == (3, 6, 4.0, 2.0)
    assert row["phase_ns"] == pytest.approx(20 * MS)
    assert row["fetch_share"] == pytest.approx(0.4)


def test_a_phase_in_which_the_job_was_suspended_is_no_longer_for_it(tmp_path: Path) -> None:
    steps = [runs.light(n, 1_000 * MS, kind="validation" if 8 <= n < 12 else "train") for n in range(20)]
    steps[9]["dur_ns"] = 100_000 * MS
    for n in range(10, 20):
        steps[n]["start_ns"] += 99_000 * MS
    resumed = [steps[9]["start_ns"] + 99_000 * MS]
    path = runs.recorded(tmp_path, (None, steps, runs.CPU), resumed_ns=resumed)
    (row,) = runs.measured(path, validation).frame(validation).to_dict("records")
    assert (row["phases"], row["steps"], row["phase_ns"]) == (1, 3, 3_000 * MS)
