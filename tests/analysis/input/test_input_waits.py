"""Waiting for data: how long each rank does, and what takes it away."""

from pathlib import Path

import pytest

from dlprof.analysis.input.fetch_replay import COLLATING
from dlprof.analysis.input.input_waits import faster_loader, input_cost_ns, input_waits
from dlprof.errors import NotMeasured
from tests.fixtures import runs
from tests.fixtures.loaders import held_up, recorded
from tests.fixtures.runs import MS

ALL = (input_waits, input_cost_ns, faster_loader)


def test_a_long_wait_has_a_plan_with_the_workers_that_take_it_away(tmp_path: Path) -> None:
    run = runs.measured(recorded(tmp_path, fetch=80, cpu=2, workers=1), *ALL)
    assert run.frame(input_waits).to_dict("records") == [{"rank": 0, "wait_ns": 60.0 * MS, "taken_ns": 0.0}]
    assert run.frame(input_cost_ns) == pytest.approx(60 * MS)
    faster = run.frame(faster_loader)
    assert faster.workers_help
    assert faster.plan is not None
    assert faster.plan.chosen.workers == 4
    assert faster.saving_ns == pytest.approx(60 * MS, rel=0.05)


def test_where_no_core_is_free_it_is_the_dearer_part_of_a_batch_that_must_become_cheaper(tmp_path: Path) -> None:
    # One core: of 100 ms of computing, collating takes 60; without it a step takes the other 40.
    path = recorded(tmp_path, fetch=100, cpu=80, workers=1, own=30, cores=1)
    held_up(path, 0, loop=10 * MS, worker=20 * MS, computing=20 * MS, collating=75 * MS)
    faster = runs.measured(path, *ALL).frame(faster_loader)
    assert not faster.workers_help
    assert faster.part == COLLATING
    assert faster.saving_ns == pytest.approx(60 * MS, rel=0.01)


def test_a_short_wait_has_no_plan(tmp_path: Path) -> None:
    run = runs.measured(recorded(tmp_path, fetch=50, cpu=2, workers=1, own=49), *ALL)
    assert run.frame(input_waits)["wait_ns"].tolist() == [1.0 * MS]
    faster = run.frame(faster_loader)
    assert faster.plan is None
    assert faster.saving_ns == pytest.approx(1 * MS)


def test_without_a_loader_nothing_is_measured(tmp_path: Path) -> None:
    steps = [runs.light(k, 80 * MS, fetches=0, fetch_ns=-1) for k in range(40)]
    with pytest.raises(NotMeasured, match="no DataLoader was seen"):
        runs.measured(runs.recorded(tmp_path / "run", (None, steps, runs.CPU)), *ALL).frame(faster_loader)
