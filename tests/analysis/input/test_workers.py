"""The step with other numbers of workers: known answers, and what the model must not claim."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlprof.analysis.input.loader import fetch_series, loader_means
from dlprof.analysis.input.workers import (
    COLLATING,
    SAMPLES,
    Pace,
    costly,
    forecasts,
    planned,
    proposed,
    replayed,
    step_with_cheaper,
)
from dlprof.analysis.step.breakdown import breakdown
from dlprof.analysis.step.savings import own_time
from dlprof.analysis.timeline.steps import step_means, step_series
from dlprof.errors import NotMeasured
from tests.fixtures import runs
from tests.fixtures.runs import MS, asked

NEEDS = (breakdown, fetch_series, loader_means, own_time, step_means, step_series)


def pace(own: float, fetch: float, *, own_cpu: float = 0.0, fetch_cpu: float = 0.0, **more: Any) -> Pace:
    told: dict[str, Any] = {"workers": 1, "prefetch": 2, "threads": 1, "cores": 64, "ranks": 1} | more
    return Pace(
        own=np.full(50, own), own_cpu=own_cpu, fetch=np.full(50, fetch), fetch_cpu=np.full(50, fetch_cpu), **told
    )


@pytest.mark.parametrize(("workers", "step"), [(0, 100), (1, 80), (2, 40), (3, 80 / 3), (4, 20), (9, 20)])
def test_fetches_that_wait_for_storage_are_divided_by_the_workers_down_to_the_loops_own(
    workers: int, step: float
) -> None:
    told = replayed(pace(20.0, 80.0), workers)
    assert told.step_ns == pytest.approx(step, rel=0.02)
    assert told.wait_ns == pytest.approx(step - 20.0, abs=0.5)


def test_fetches_that_compute_are_bounded_by_the_cores() -> None:
    # 20 ms of training and 80 ms of fetching are 100 ms of computing: on two cores never below 50 ms.
    steps = [replayed(pace(20.0, 80.0, own_cpu=1.0, fetch_cpu=80.0, cores=2), n).step_ns for n in range(9)]
    assert steps[0] == pytest.approx(100, rel=0.01)
    assert min(steps) >= 49
    assert steps[4] == pytest.approx(min(steps), rel=0.1)
    # Where there are cores enough, it is as if they waited.
    assert replayed(pace(20.0, 80.0, own_cpu=1.0, fetch_cpu=80.0), 4).step_ns == pytest.approx(20, rel=0.02)


def test_ranks_of_one_host_share_its_cores() -> None:
    alone = replayed(pace(100.0, 50.0, own_cpu=1.0, fetch_cpu=50.0, cores=2), 1)
    four = replayed(pace(100.0, 50.0, own_cpu=1.0, fetch_cpu=50.0, cores=2, ranks=2), 1)
    assert alone.step_ns == pytest.approx(100, rel=0.03)
    # Two ranks compute 300 ms on two cores.
    assert four.step_ns == pytest.approx(150, rel=0.1)


def test_nobody_is_held_up_for_longer_than_others_compute() -> None:
    # Whatever a loop was seen to wait: of 20 ms on both of two cores, workers that compute 6 ms a batch can make 26.
    more: dict[str, Any] = {"own_cpu": 1.0, "fetch_cpu": 6.0, "cores": 2, "beside": (3.0, 1.0)}
    assert replayed(pace(20.0, 60.0, threads=2, **more), 8).step_ns == pytest.approx(26, rel=0.01)
    # A loop that needs one of the two stands still while both are taken, and for half as long.
    assert replayed(pace(20.0, 60.0, **more), 8).step_ns == pytest.approx(23, rel=0.01)
    # What was measured is more than a model.
    assert replayed(pace(20.0, 60.0, stretch=2.0, **more), 8).step_ns == pytest.approx(40, rel=0.01)


def test_one_slow_worker_holds_up_all_and_a_deep_queue_does_not_help() -> None:
    fetch = np.full(48, 10.0)
    fetch[::4] = 100.0
    slow = Pace(workers=4, prefetch=2, own=np.full(48, 10.0), own_cpu=0, threads=1, fetch=fetch,
                fetch_cpu=np.zeros(48), cores=64, ranks=1)  # fmt: skip
    # Every fourth fetch falls to worker 0, which gives a batch in 100 ms: four batches take 100 ms.
    assert replayed(slow, 4).step_ns == pytest.approx(25, rel=0.03)
    assert replayed(slow, 5).step_ns < 15


def recorded(
    folder: Path,
    *,
    fetch: int,
    cpu: int,
    workers: int,
    own: int = 20,
    cores: int = 16,
    ranks: int = 1,
    threads: int = 1,
) -> Path:
    """Make a run whose steps are what the model has them be: a worker's fetches one after the other."""
    step = max(own, fetch // workers) if workers else own + fetch
    facts = {
        **runs.CPU,
        "loaders": [{"role": "train", "num_workers": workers, "prefetch_factor": 2 if workers else None}],
        "cpu": {"count": cores, "affinity": cores, "torch_threads": threads},
    }
    steps = [runs.light(k, step * MS, fetch_ns=(step - own) * MS) for k in range(40)]
    path = runs.recorded(folder / "run", *((None, steps, facts) for _ in range(ranks)))
    for rank in range(ranks):
        wait = (step - own) * MS
        runs.loading(path, rank, step=step * MS, wait=wait, fetch=fetch * MS, cpu=cpu * MS, n=40, workers=workers)
    return path


def test_a_recorded_run_is_forecast_from_its_own_batches(tmp_path: Path) -> None:
    run = runs.measured(recorded(tmp_path, fetch=80, cpu=2, workers=1), *NEEDS)
    given = asked(run, forecasts, 0)
    assert given[0].workers == 1
    assert given[0].step_ns == pytest.approx(80 * MS)
    assert [f.workers for f in given[1:]] == list(range(1, len(given)))
    chosen = proposed(given)
    assert chosen.workers == 4
    assert chosen.step_ns == pytest.approx(20 * MS, rel=0.05)
    plan = asked(run, planned, {0: 60.0 * MS}, 0)
    assert plan is not None
    assert plan.gain_ns == pytest.approx(60 * MS, rel=0.05)


def test_a_loop_that_fetches_itself_is_forecast_too(tmp_path: Path) -> None:
    run = runs.measured(recorded(tmp_path, fetch=30, cpu=30, workers=0, cores=2, ranks=2), *NEEDS)
    given = asked(run, forecasts, 1)
    assert given[0].step_ns == pytest.approx(50 * MS)
    # All of it computes, and there is a core a rank: nothing to gain.
    assert min(f.step_ns for f in given) > 45 * MS
    assert max(given[0].step_ns - min(f.step_ns for f in given), 0) < 5 * MS


def test_what_workers_compute_while_the_loop_waits_is_not_in_its_way() -> None:
    # One core, and a fetch of 100 ms, of which 30 compute, evenly: the loop finds it taken for 30 % of the time:
    # its 20 ms take 1 / (0.7 + 0.3 / 2) times as long.
    told = replayed(pace(20.0, 100.0, own_cpu=1.0, fetch_cpu=30.0, cores=1), 1)
    assert told.step_ns - told.wait_ns == pytest.approx(20 / 0.85, rel=0.05)
    # With all of it in that time, as where the first worker is late and the second never: more.
    fetch, cpu = np.array([200.0, 20.0] * 25), np.array([0.0, 20.0] * 25)
    late = Pace(workers=2, prefetch=1, own=np.full(50, 20.0), own_cpu=1.0, threads=1, fetch=fetch, fetch_cpu=cpu,
                cores=1, ranks=1)  # fmt: skip
    told = replayed(late, 2)
    assert told.step_ns - told.wait_ns > 25


def test_a_run_that_its_batches_do_not_explain_is_not_forecast(tmp_path: Path) -> None:
    path = recorded(tmp_path, fetch=80, cpu=2, workers=1)
    runs.loading(path, 0, step=80 * MS, wait=60 * MS, fetch=8 * MS, cpu=2 * MS, n=40, workers=1)
    run = runs.measured(path, *NEEDS)
    with pytest.raises(NotMeasured, match="explain"):
        asked(run, forecasts, 0)
    assert asked(run, planned, {0: 60.0 * MS}, 0) is None


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
    assert asked(run, costly, 0) == COLLATING
    # The loop's 20 ms and 20 of reading are left on the core; or those 60 of collating.
    assert asked(run, step_with_cheaper, COLLATING) == pytest.approx(40 * MS, rel=0.01)
    assert asked(run, step_with_cheaper, SAMPLES) == pytest.approx(80 * MS, rel=0.01)


def test_ranks_that_train_together_are_in_each_others_way_however_long_they_wait(tmp_path: Path) -> None:
    # Two ranks on one core, each computing 20 ms while the other does: a wait of 100 ms in between is no relief.
    busy = replayed(pace(20.0, 1.0, own_cpu=1.0, cores=1, ranks=2), 1)
    starved = replayed(pace(20.0, 140.0, own_cpu=1.0, cores=1, ranks=2), 1)
    assert busy.step_ns == pytest.approx(40, rel=0.01)
    assert starved.step_ns == pytest.approx(140, rel=0.01)
    assert starved.wait_ns == pytest.approx(100, rel=0.01)


def held_up(path: Path, rank: int, *, loop: int, worker: int, computing: int, collating: int = 0) -> None:
    """Say what a step's loop and its worker waited for a core, what the loop's process computed, and collating, ns."""
    for name, said in (
        ("loading.jsonl", {"delay_ns": loop, "cpu_ns": computing}),
        ("fetches.jsonl", {"delay_ns": worker, "collate_ns": collating}),
    ):
        file = path / f"ranks/{rank:05d}" / name
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        changed = [line | said if line.get("kind") in ("usage", None) else line for line in lines]
        file.write_text("".join(json.dumps(line) + "\n" for line in changed))


def test_without_a_record_of_batches_nothing_is_forecast(tmp_path: Path) -> None:
    steps = [runs.light(k, 80 * MS, fetch_ns=60 * MS) for k in range(40)]
    run = runs.measured(runs.recorded(tmp_path / "run", (None, steps, runs.CPU)), *NEEDS)
    with pytest.raises(NotMeasured):
        asked(run, forecasts, 0)
    with pytest.raises(NotMeasured):
        asked(run, step_with_cheaper, SAMPLES)
