"""The step with other numbers of workers: known answers of the replay, and what it must not claim."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dlprof.analysis.input.fetch_replay import PINNING, SAMPLES, Handover, Pace, Told, replayed
from tests.fixtures.loaders import pace


@pytest.mark.parametrize(("workers", "step"), [(0, 100), (1, 80), (2, 40), (3, 80 / 3), (4, 20), (9, 20)])
def test_fetches_that_wait_for_storage_are_divided_by_the_workers_down_to_the_loops_own(
    workers: int, step: float
) -> None:
    told = replayed(pace(20.0, 80.0), workers)
    assert told.step_ns == pytest.approx(step, rel=0.02)
    assert told.wait_ns == pytest.approx(step - 20.0, abs=0.5)


@pytest.mark.parametrize(("loaders", "workers", "step"), [(1, 1, 160), (1, 2, 80), (2, 1, 80), (2, 2, 40), (4, 2, 40)])
def test_a_step_of_four_batches_is_four_of_each_that_is_recorded(loaders: int, workers: int, step: float) -> None:
    told = replayed(pace(10.0, 40.0, batches=4, loaders=loaders), workers)
    assert told.workers == workers
    assert told.step_ns == pytest.approx(step, rel=0.02)
    assert told.wait_ns == pytest.approx(step - 40.0, abs=1.0)
    assert replayed(pace(10.0, 40.0, batches=4, loaders=loaders), 0).step_ns == pytest.approx(200)


@pytest.mark.parametrize(
    ("own", "pin", "loaders", "workers", "step"),
    # Whoever takes longest for a batch sets the pace: the loop, its workers, or the one thread that pins.
    [
        (10, 30, 1, 4, 30),
        (10, 30, 1, 16, 30),
        (10, 30, 1, 1, 80),
        (40, 30, 1, 4, 40),
        (10, 30, 2, 4, 15),
        (10, 30, 1, 0, 90),
    ],
)
def test_all_batches_of_a_loader_pass_the_thread_that_pins_them(
    own: float, pin: float, loaders: int, workers: int, step: float
) -> None:
    told = pace(own, 80.0, pin=pin, loaders=loaders, workers=workers)
    assert replayed(told, workers).step_ns == pytest.approx(step, rel=0.02)
    pins = pin * workers > 80
    assert (told.costly == PINNING) == pins
    if pins:
        assert replayed(told.without(PINNING), workers).step_ns == pytest.approx(
            max(own, 80 / workers / loaders), rel=0.05
        )


def test_a_long_series_is_replayed_with_its_mean() -> None:
    # More batches than are replayed, of which the later ones take three times as long.
    own = np.concatenate((np.full(600, 10.0), np.full(600, 30.0)))
    assert replayed(replace(pace(10.0, 1.0), own=own), 1).step_ns == pytest.approx(20.0)


def test_workers_of_two_loaders_are_on_the_same_cores() -> None:
    # A step takes two batches of 40 ms of computing each, and trains for 20 ms: 100 ms on two cores.
    told = replayed(pace(10.0, 40.0, own_cpu=1.0, fetch_cpu=40.0, cores=2, batches=2, loaders=2), 4)
    assert told.step_ns == pytest.approx(50, rel=0.1)
    assert told.step_ns >= 50 * (1 - 1e-9)


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
    more: dict[str, Any] = {"own_cpu": 1.0, "fetch_cpu": 6.0, "cores": 2, "excess": (3.0, 1.0)}
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


def test_ranks_that_train_together_are_in_each_others_way_however_long_they_wait() -> None:
    # Two ranks on one core, each computing 20 ms while the other does: a wait of 100 ms in between is no relief.
    busy = replayed(pace(20.0, 1.0, own_cpu=1.0, cores=1, ranks=2), 1)
    starved = replayed(pace(20.0, 140.0, own_cpu=1.0, cores=1, ranks=2), 1)
    assert busy.step_ns == pytest.approx(40, rel=0.01)
    assert starved.step_ns == pytest.approx(140, rel=0.01)
    assert starved.wait_ns == pytest.approx(100, rel=0.01)


COSTS = Handover(6.0, 4.0)
TOLD = Told(COSTS, COSTS.times(0.5), COSTS.times(2.0))


def test_the_first_worker_brings_what_handing_over_costs_and_the_last_takes_it_away() -> None:
    # A fetch of 3 ms, in which nothing computes beside: with a worker, the loop takes batches over for 6 ms instead.
    alone = pace(20.0, 3.0, workers=0, handover=TOLD)
    assert replayed(alone, 0).step_ns == pytest.approx(23)
    assert [replayed(alone, n).step_ns for n in (1, 2)] == pytest.approx([26, 26], rel=0.01)
    # Where fetching is the limit, the worker also sends each batch.
    assert replayed(pace(20.0, 30.0, workers=0, handover=TOLD), 1).step_ns == pytest.approx(34, rel=0.01)
    served = pace(26.0, 7.0, workers=1, handover=TOLD, gap=4.0)
    assert replayed(served, 1).step_ns == pytest.approx(26, rel=0.01)
    assert replayed(served, 0).step_ns == pytest.approx(23)
    # Between the least and the most of it.
    assert replayed(alone.where_workers_cost_least, 1).step_ns == pytest.approx(23, rel=0.01)
    assert replayed(alone.where_workers_cost_most, 1).step_ns == pytest.approx(32, rel=0.01)


def test_samples_that_cost_nothing_are_sent_all_the_same() -> None:
    # Of 7 ms that a worker computes, 2 at least are sending; the training thread's fetch is all its own.
    assert pace(20.0, 3.0, fetch_cpu=7.0, handover=TOLD).without(SAMPLES).fetch_cpu.mean() == 2.0
    assert pace(20.0, 3.0, fetch_cpu=3.0, workers=0, handover=TOLD).without(SAMPLES).fetch_cpu.mean() == 0.0


def test_threads_that_wait_for_each_other_lose_more_than_a_worker_computes() -> None:
    more: dict[str, Any] = {"own_cpu": 1.0, "fetch_cpu": 6.0, "cores": 2, "threads": 2, "workers": 0}
    # Both cores train for 20 ms; the 6 ms of a batch cost 6 where the loop fetches, and 1.4 times that beside it.
    held = pace(20.0, 6.0, barrier=1.4, **more)
    assert replayed(held, 0).step_ns == pytest.approx(26)
    assert 26 < replayed(held, 1).step_ns <= 20 + 1.4 * 6 + 0.01
    assert replayed(held, 1).step_ns < replayed(held.where_workers_cost_most, 1).step_ns <= 32.01
    assert replayed(held.where_workers_cost_least, 1).step_ns < 26
    # With a core to spare, or where nothing is split, it is as before.
    for free in ({"cores": 3}, {"threads": 1}):
        assert replayed(pace(20.0, 6.0, barrier=1.4, **more | free), 1).step_ns == pytest.approx(20, rel=0.06)


def test_a_core_that_training_waited_for_is_lost_once_at_least() -> None:
    # In 20 ms the training thread had no core for 4: with two threads, both had theirs for 12.8; it may have been 16.
    waited = pace(12.8, 3.0, cores=2, threads=2, alone=0.64)
    assert replayed(waited, 0).step_ns == pytest.approx(15.8)
    assert replayed(waited.where_workers_cost_least, 0).step_ns == pytest.approx(19)
