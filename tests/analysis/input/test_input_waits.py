"""Waiting for data: how long each rank does, and what takes it away."""

from pathlib import Path

import pytest

from dlprof.analysis.input.fetch_replay import COLLATING, SAMPLES
from dlprof.analysis.input.input_waits import (
    faster_loader,
    forecasts,
    input_cost_ns,
    input_waits,
    paces,
    planned,
    proposed,
    starving,
    step_with_cheaper,
)
from dlprof.analysis.step.savings import own_time
from dlprof.errors import NotMeasured
from tests.fixtures import runs
from tests.fixtures.loaders import held_up, recorded
from tests.fixtures.runs import MS, asked

NEEDS = (paces, own_time)
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


def test_the_rank_that_waits_most_is_known_with_its_loader(tmp_path: Path) -> None:
    found = runs.measured(recorded(tmp_path, fetch=80, cpu=2, workers=1, ranks=2), starving).frame(starving)
    assert (found.rank, found.alike, found.others, found.victims) == (0, (0, 1), (), {})
    assert found.wait_ns == 60 * MS
    assert found.step_ns == pytest.approx(80 * MS)
    assert (found.workers, found.cores) == (1, 8)


def test_a_recorded_run_is_forecast_from_its_own_batches(tmp_path: Path) -> None:
    run = runs.measured(recorded(tmp_path, fetch=80, cpu=2, workers=1), *NEEDS)
    given = asked(run, forecasts, 0)
    assert given[0].workers == 1
    assert given[0].step_ns == pytest.approx(80 * MS)
    assert [f.workers for f in given[1:]] == list(range(len(given) - 1))
    assert given[1].step_ns == pytest.approx(100 * MS, rel=0.01)
    chosen = proposed(given)
    assert chosen.workers == 4
    assert chosen.step_ns == pytest.approx(20 * MS, rel=0.05)
    plan = asked(run, planned, {0: 60.0 * MS})
    assert plan is not None
    assert plan.gain_ns == pytest.approx(60 * MS, rel=0.05)


def test_what_the_replay_is_off_by_is_a_share_of_any_step(tmp_path: Path) -> None:
    # The recorded fetches are a twentieth too long for the steps: so are those of a step that is a quarter as long.
    path = recorded(tmp_path, fetch=80, cpu=2, workers=1, own=10)
    runs.loading(path, 0, step=80 * MS, wait=70 * MS, fetch=84 * MS, cpu=2 * MS, n=40, workers=1)
    given = {f.workers: f.step_ns for f in asked(runs.measured(path, *NEEDS), forecasts, 0)}
    assert given[1] == pytest.approx(80 * MS)
    assert given[4] == pytest.approx(20 * MS, rel=0.01)


def test_a_loop_that_fetches_itself_is_forecast_too(tmp_path: Path) -> None:
    run = runs.measured(recorded(tmp_path, fetch=30, cpu=30, workers=0, cores=2, ranks=2), *NEEDS)
    given = asked(run, forecasts, 1)
    assert given[0].step_ns == pytest.approx(50 * MS)
    # All of it computes, and there is a core a rank: nothing to gain.
    assert min(f.step_ns for f in given) > 45 * MS
    assert max(given[0].step_ns - min(f.step_ns for f in given), 0) < 5 * MS


def test_a_run_that_its_batches_do_not_explain_is_not_forecast(tmp_path: Path) -> None:
    path = recorded(tmp_path, fetch=80, cpu=2, workers=1)
    runs.loading(path, 0, step=80 * MS, wait=60 * MS, fetch=8 * MS, cpu=2 * MS, n=40, workers=1)
    run = runs.measured(path, *NEEDS)
    with pytest.raises(NotMeasured, match="explain"):
        asked(run, forecasts, 0)
    assert asked(run, planned, {0: 60.0 * MS}) is None


def test_without_its_loading_a_rank_has_its_cores_to_itself(tmp_path: Path) -> None:
    # One core, all the time at work: the loop computes 20 ms of a step in 30 ms, and its worker 80 ms in 100 ms.
    path = recorded(tmp_path, fetch=100, cpu=80, workers=1, own=30, cores=1)
    held_up(path, 0, loop=10 * MS, worker=20 * MS, computing=20 * MS)
    run = runs.measured(path, *NEEDS)
    assert asked(run, step_with_cheaper, SAMPLES) == pytest.approx(20 * MS, rel=0.01)
    # More workers give nothing: the core has no more to give.
    assert min(f.step_ns for f in asked(run, forecasts, 0)) > 95 * MS


def test_without_loading_the_rank_that_computes_most_sets_the_pace_and_what_all_wait_for_stays(tmp_path: Path) -> None:
    path = recorded(tmp_path, fetch=130, cpu=10, workers=1, own=50, ranks=2)
    # Of 50 ms, rank 0 computes 20 and rank 1 45: 5 ms are nobody's computing, the others are rank 0's waiting.
    held_up(path, 0, loop=0, worker=0, computing=20 * MS)
    held_up(path, 1, loop=0, worker=0, computing=45 * MS)
    assert asked(runs.measured(path, *NEEDS), step_with_cheaper, SAMPLES) == pytest.approx(50 * MS, rel=0.01)
    held_up(path, 1, loop=0, worker=0, computing=30 * MS)
    # Now 20 ms are left, in which rank 1 may have waited for what nobody recorded.
    assert asked(runs.measured(path, *NEEDS), step_with_cheaper, SAMPLES) == pytest.approx(50 * MS, rel=0.01)


def test_threads_that_share_an_operator_spin_while_one_of_them_has_no_core(tmp_path: Path) -> None:
    # Two threads and a worker that always computes, on two cores: of 40 ms each thread has a core for 30 and both of
    # them for 22.5; for the others one spins.
    path = recorded(tmp_path, fetch=130, cpu=100, workers=1, own=40, cores=2, threads=2)
    held_up(path, 0, loop=10 * MS, worker=30 * MS, computing=60 * MS)
    assert asked(runs.measured(path, *NEEDS), step_with_cheaper, SAMPLES) == pytest.approx(22.5 * MS, rel=0.01)


def test_what_takes_less_of_a_batch_stays_as_it_is(tmp_path: Path) -> None:
    # One core: of a batch's 80 ms of computing 60 are collating, which takes 75 of 100 with its waiting for the core.
    path = recorded(tmp_path, fetch=100, cpu=80, workers=1, own=30, cores=1)
    held_up(path, 0, loop=10 * MS, worker=20 * MS, computing=20 * MS, collating=75 * MS)
    run = runs.measured(path, *NEEDS)
    assert run.frame(paces).of(0).costly == COLLATING
    # The loop's 20 ms and 20 of reading are left on the core; or those 60 of collating.
    assert asked(run, step_with_cheaper, COLLATING) == pytest.approx(40 * MS, rel=0.01)
    assert asked(run, step_with_cheaper, SAMPLES) == pytest.approx(80 * MS, rel=0.01)


def test_without_a_record_of_batches_nothing_is_forecast(tmp_path: Path) -> None:
    steps = [runs.light(k, 80 * MS, fetch_ns=60 * MS) for k in range(40)]
    run = runs.measured(runs.recorded(tmp_path / "run", (None, steps, runs.CPU)), *NEEDS)
    with pytest.raises(NotMeasured):
        asked(run, forecasts, 0)
    with pytest.raises(NotMeasured):
        asked(run, step_with_cheaper, SAMPLES)


@pytest.mark.parametrize(("delay_ms", "sure"), [(2, True), (14, False)])
def test_where_others_have_most_of_the_cores_no_number_of_workers_is_sure(
    delay_ms: int, sure: bool, tmp_path: Path
) -> None:
    # Without workers, who else but programs outside the job keeps a loop of 30 ms off its core?
    path = recorded(tmp_path, fetch=80, cpu=2, workers=0, own=30, cores=4)
    held_up(path, 0, loop=delay_ms * MS, worker=0, computing=30 * MS)
    plan = asked(runs.measured(path, *NEEDS), planned, {0: 80.0 * MS})
    assert plan is not None
    assert plan.sure is sure
