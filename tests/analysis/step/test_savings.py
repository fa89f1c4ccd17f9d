"""What a step would be without something, replayed over the ranks."""

from pathlib import Path

import pandas as pd
import pytest

from dlprof.analysis.step.breakdown import breakdown
from dlprof.analysis.step.savings import own_time, saving, saving_in_pipelines, saving_input
from dlprof.analysis.timeline.steps import step_means, step_series
from tests.fixtures import runs
from tests.fixtures.exchanges import NEEDS, late_by, run_of
from tests.fixtures.runs import MS, asked


def test_own_time_is_the_common_step_less_waiting(tmp_path: Path) -> None:
    frame = run_of(tmp_path, late_by(0, MS)).frame(own_time).set_index("rank")
    assert frame["known"].all()
    assert frame["own_ns"].to_dict() == pytest.approx({0: 4 * MS, 1: 5 * MS})
    assert frame["wait_ns"].to_dict() == pytest.approx({0: MS, 1: 0})


def test_nothing_removed_saves_nothing_and_no_more_is_saved_than_there_is(tmp_path: Path) -> None:
    run = run_of(tmp_path, late_by(0, MS))
    assert asked(run, saving, {}) == 0.0
    assert asked(run, saving, {0: 1e12, 1: 1e12}) == pytest.approx(5 * MS)
    assert asked(run, saving, {1: -5.0 * MS}) == 0.0


def test_of_ranks_that_were_not_traced_it_is_not_known_what_would_be_gone(tmp_path: Path) -> None:
    run = runs.cpu_run(tmp_path, *[10 * MS] * 4)
    for rank in (1, 2):
        runs.asked_for_none(run / f"ranks/{rank:05d}", "0,last")
    times = runs.measured(run, own_time)
    assert times.frame(own_time)["traced"].tolist() == [True, False, False, True]
    assert asked(times, saving, {0: 2 * MS, 3: MS}) == pytest.approx(MS)
    assert asked(times, saving, {0: 2 * MS}) == 0.0
    assert asked(times, saving, {0: 2 * MS, 1: MS / 2, 3: MS}) == pytest.approx(MS / 2)


def test_the_wait_of_one_rank_costs_all_as_far_as_it_is_the_slowest(tmp_path: Path) -> None:
    made = late_by(0, MS)
    waits = (0, 400_000)
    steps = [[runs.light(n, 5 * MS, fetch_ns=w) for n in range(43)] for w in waits]
    facts = {"device": {"type": "cuda"}, "host": "node-1"}
    folder = runs.recorded(tmp_path / "run", *((m, s, facts) for m, s in zip(made, steps, strict=True)))
    assert asked(runs.measured(folder, *NEEDS), saving_input, {0: 0.0, 1: 400_000.0}) == pytest.approx(400_000)


def test_where_waiting_is_not_known_equal_work_is_assumed(tmp_path: Path) -> None:
    ranks = [(None, [runs.light(n, 10 * MS, fetch_ns=w) for n in range(43)], runs.CPU) for w in (0, 4 * MS)]
    folder = runs.recorded(tmp_path / "run", *ranks)
    run = runs.measured(folder, breakdown, own_time, step_means, step_series)
    assert asked(run, saving_input, {0: 0.0, 1: 4.0 * MS}) == pytest.approx(4 * MS)


def test_what_holds_one_stage_up_holds_up_its_neighbours() -> None:
    # Two pipelines of two stages. Stage 0 of both exchanges for 30 ms too long; stage 1 computes for longer, and idles.
    own = pd.DataFrame({"rank": range(4), "own_ns": [90.0 * MS, 70.0 * MS] * 2, "traced": True})
    pipelines = pd.DataFrame({"rank": range(4), "ranks": ["0, 1", "0, 1", "2, 3", "2, 3"]})
    removed = {0: 30.0 * MS, 2: 30.0 * MS}
    idle = pd.DataFrame({"rank": [1, 3], "category": "pipeline_bubble", "ns": 20.0 * MS})
    assert saving_in_pipelines(own, removed, pipelines, idle) == pytest.approx(20 * MS)
    # No more than a stage idles, and no more than the slowest pipeline gains.
    assert saving_in_pipelines(own, removed, pipelines, idle.assign(ns=5.0 * MS)) == pytest.approx(20 * MS)
    assert saving_in_pipelines(own, {0: 30.0 * MS}, pipelines, idle) == 0.0
    assert saving_in_pipelines(own, removed, None, idle) == saving(own, removed)
