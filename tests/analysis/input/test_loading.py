"""How long ranks wait for data and why: from records of batches, replayed with other workers, against known answers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from msgspec.structs import replace

from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.engine import RankFacts
from dlprof.analysis.host.rules import host_bound
from dlprof.analysis.input import fetch_replay as replay
from dlprof.analysis.input import input_waits as waits
from dlprof.analysis.input import loader
from dlprof.analysis.input.rules import input_wait
from dlprof.analysis.input.rules.input_wait import changes, forecasts_of, predicted_steps
from dlprof.analysis.memory.rules import pageable_copy
from dlprof.analysis.step.savings import own_time
from dlprof.analysis.timeline.steps import Timing, step_means
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.read.run import open_run
from dlprof.result import Outcome, Result
from tests.fixtures import runs, traces
from tests.fixtures.claims import add_facts, edit, hold, lines, rewrite
from tests.fixtures.loaders import fetched, held_up, loaded, needless, of_two, pace, ready, recorded
from tests.fixtures.places import TRACES
from tests.fixtures.runs import MS, asked
from tests.fixtures.traces import BASE_NS

NEEDS = (waits.loop_times, own_time)
STORED = {"fetch": 80, "cpu": 2, "workers": 1}
# One core, all the time at work: the loop computes 20 ms of a step in 30 ms, and its worker 80 ms in 100 ms.
CROWDED = {"fetch": 100, "cpu": 80, "workers": 1, "own": 30, "cores": 1}
CROWDS = held_up(loop=10, worker=20, computing=20)
COLLATES = held_up(loop=10, worker=20, computing=20, collating=75)

COSTS = replay.Handover(6.0, 4.0)
TOLD = replay.HandoverCost(COSTS, COSTS.times(0.5), COSTS.times(2.0))
SPLIT: dict[str, Any] = {"own_cpu": 1.0, "fetch_cpu": 6.0, "cores": 2, "threads": 2}
BARRIER = pace(20, 6, barrier=1.4, **SPLIT | {"workers": 0})
ALONE = pace(20, 3, workers=0, handover=TOLD)
EXCESS = {**SPLIT, "excess": (3.0, 1.0)}
# In 20 ms the training thread had no core for 4: with two threads, both had theirs for 12.8; it may have been 16.
WAITED = pace(12.8, 3, cores=2, threads=2, alone=0.64)


def uneven(*fetch: float, workers: int, turns: int, prefetch: int = 2, **more: Any) -> replay.LoopTimes:
    """Return the pace of workers whose batches take these times in turn."""
    times, ready = np.tile(fetch, turns), len(fetch) * turns
    base: dict[str, Any] = {"own_cpu": 0, "threads": 1, "cores": 64, "ranks": 1, "fetch_cpu": np.zeros(ready)}
    return replay.LoopTimes(
        workers=workers, prefetch=prefetch, fetch=times, **base | {"own": np.full(ready, 10.0)} | more
    )


@pytest.mark.parametrize(
    ("of", "workers", "step", "rel"),
    [
        # Fetches that wait for storage are divided by the workers, down to the loop's own.
        *((pace(20, 80), n, step, 0.02) for n, step in ((0, 100), (1, 80), (2, 40), (3, 80 / 3), (4, 20), (9, 20))),
        # A step of four batches is four of each that is recorded.
        *((pace(10, 40, batches=4, loaders=k), n, step, 0.02)
          for k, n, step in ((1, 0, 200), (1, 1, 160), (1, 2, 80), (2, 1, 80), (2, 2, 40), (4, 2, 40))),
        # Whoever takes longest for a batch sets the pace: the loop, its workers, or the one thread that pins.
        *((pace(own, 80, pin=30, loaders=k, workers=n), n, step, 0.02)
          for own, k, n, step in ((10, 1, 4, 30), (10, 1, 16, 30), (10, 1, 1, 80), (40, 1, 4, 40), (10, 2, 4, 15),
                                  (10, 1, 0, 90))),
        # Of more batches than are replayed the later ones take three times as long.
        (replace(pace(10, 1), own=np.repeat([10.0, 30.0], 600)), 1, 20, 1e-6),
        # Of two loaders the workers are on the same cores: two batches of 40 ms of computing, and 20 ms of training.
        (pace(10, 40, own_cpu=1, fetch_cpu=40, cores=2, batches=2, loaders=2), 4, 52.5, 0.05),
        # 20 ms of training and 80 ms of fetching are 100 ms of computing: on two cores never below 50 ms.
        (pace(20, 80, own_cpu=1, fetch_cpu=80, cores=2), 0, 100, 0.01),
        (pace(20, 80, own_cpu=1, fetch_cpu=80, cores=2), 4, 52.5, 0.06),
        (pace(20, 80, own_cpu=1, fetch_cpu=80, cores=2), 8, 52.5, 0.06),
        (pace(20, 80, own_cpu=1, fetch_cpu=80), 4, 20, 0.02),
        # Ranks of one host share its cores: two ranks compute 300 ms on two.
        (pace(100, 50, own_cpu=1, fetch_cpu=50, cores=2), 1, 100, 0.03),
        (pace(100, 50, own_cpu=1, fetch_cpu=50, cores=2, ranks=2), 1, 150, 0.1),
        # Nobody is held up for longer than others compute: of 20 ms on both of two cores, workers that compute 6 ms a
        # batch can make 26; a loop that needs one of the two is held up half as long; but what was measured counts.
        (pace(20, 60, **EXCESS), 8, 26, 0.01),
        (pace(20, 60, **EXCESS | {"threads": 1}), 8, 23, 0.01),
        (pace(20, 60, stretch=2.0, **EXCESS | {"threads": 1}), 8, 40, 0.01),
        # Every fourth fetch falls to worker 0, which gives a batch in 100 ms, whatever the queue: four take 100 ms.
        (uneven(100, 10, 10, 10, workers=4, turns=12), 4, 25, 0.03),
        (uneven(100, 10, 10, 10, workers=4, turns=12), 5, 10, 0.01),
        # Two ranks on one core, each computing 20 ms while the other does: a wait of 100 ms in between is no relief.
        (pace(20, 1, own_cpu=1, cores=1, ranks=2), 1, 40, 0.01),
        (pace(20, 140, own_cpu=1, cores=1, ranks=2), 1, 140, 0.01),
        # The first worker brings what handing over costs, here 6 ms for taking, and the last takes it away; where
        # fetching is the limit, a worker also sends each batch; between the least and the most of it.
        (ALONE, 0, 23, 1e-6),
        (ALONE, 1, 26, 0.01),
        (ALONE, 2, 26, 0.01),
        (pace(20, 30, workers=0, handover=TOLD), 1, 34, 0.01),
        (pace(26, 7, handover=TOLD, gap=4.0), 1, 26, 0.01),
        (pace(26, 7, handover=TOLD, gap=4.0), 0, 23, 1e-6),
        (ALONE.where_workers_cost_least, 1, 23, 0.01),
        (ALONE.where_workers_cost_most, 1, 32, 0.01),
        # Both cores train for 20 ms; the 6 ms of a batch cost 6 where the loop fetches, and up to 1.4 times beside it.
        (BARRIER, 0, 26, 1e-6),
        (BARRIER, 1, 27.2, 0.045),
        (BARRIER.where_workers_cost_least, 1, 23, 0.12),
        (BARRIER.where_workers_cost_most, 1, 30.2, 0.06),
        (pace(20, 6, barrier=1.4, **SPLIT | {"cores": 3}), 1, 20, 0.06),
        (pace(20, 6, barrier=1.4, **SPLIT | {"threads": 1}), 1, 20, 0.06),
        (WAITED, 0, 15.8, 1e-6),
        (WAITED.where_workers_cost_least, 0, 19, 1e-6),
    ],
)  # fmt: skip
def test_a_step_with_other_workers(of: replay.LoopTimes, workers: int, step: float, rel: float) -> None:
    made = replay.replayed(of, workers)
    assert made.workers == workers
    assert made.step_ns == pytest.approx(step, rel=rel)


def test_what_is_waited_for_in_the_replay() -> None:
    assert replay.replayed(pace(20, 80), 1).wait_ns == pytest.approx(60, abs=0.5)
    assert replay.replayed(pace(10, 40, batches=4), 1).wait_ns == pytest.approx(120, abs=1)
    # One core, and a fetch of 100 ms, of which 30 compute, evenly: the loop finds it taken for 30 % of the time:
    # its 20 ms take 1 / (0.7 + 0.3 / 2) times as long. With all of it in that time, as where the first worker is late
    # and the second never: more.
    even = replay.replayed(pace(20, 100, own_cpu=1, fetch_cpu=30, cores=1), 1)
    assert even.step_ns - even.wait_ns == pytest.approx(20 / 0.85, rel=0.05)
    computes = {"own": np.full(50, 20.0), "own_cpu": 1.0, "fetch_cpu": np.tile([0.0, 20.0], 25), "cores": 1}
    late = replay.replayed(uneven(200, 20, workers=2, turns=25, prefetch=1, **computes), 2)
    assert late.step_ns - late.wait_ns > 25


def test_what_costs_most_of_a_batch() -> None:
    pins = pace(10, 80, pin=30, workers=4)
    assert pins.costly == replay.PINNING
    assert replay.replayed(pins.without(replay.PINNING), 4).step_ns == pytest.approx(20, rel=0.05)
    assert pace(10, 80, pin=30).costly != replay.PINNING
    # Of 60 ms of computing 45 are collating; the batches of two other ranks shrink alike, from 30 to 7.5.
    others = pace(20, 80, fetch_cpu=60, others_cpu=30.0, ranks=3)
    collates = replace(others, collate=np.full(50, 50.0), collate_cpu=np.full(50, 45.0))
    less = collates.without(collates.costly)
    assert (collates.costly, collates.batch_cpu, less.fetch.mean()) == (replay.COLLATING, 40, 30)
    assert (less.fetch_cpu.mean(), less.others_cpu, less.batch_cpu) == (15, 7.5, 10)
    # Of 7 ms that a worker computes, 2 at least are sending; the training thread's fetch is all its own.
    assert pace(20, 3, fetch_cpu=7, handover=TOLD).without(replay.SAMPLES).fetch_cpu.mean() == 2.0
    assert pace(20, 3, fetch_cpu=3, workers=0, handover=TOLD).without(replay.SAMPLES).fetch_cpu.mean() == 0.0


def test_handing_over_is_paid_by_the_tensor_and_by_the_byte() -> None:
    few, many, large = replay.handover(2, 0), replay.handover(32, 0), replay.handover(2, 10e6)
    # Of 30 tensors more, each takes a connection; of 10 MB more, each page a fault.
    assert (many.taking_ns - few.taking_ns, many.sending_ns - few.sending_ns) == pytest.approx((4.5 * MS, 4.8 * MS))
    assert (large.taking_ns - few.taking_ns, large.sending_ns - few.sending_ns) == pytest.approx((3 * MS, 9 * MS))
    # It is known within what hosts differ by; of batches that were not looked at it may be nothing or much.
    of, unseen, timed = (
        replay.handover_cost(10, 1e6, np.nan),
        replay.handover_cost(-1.0, -1.0, np.nan),
        replay.handover_cost(10, 1e6, 3 * MS),
    )
    assert of.usual == replay.handover(10, 1e6)
    assert of.least.taking_ns * replay.HOSTS_DIFFER == of.usual.taking_ns == of.most.taking_ns / replay.HOSTS_DIFFER
    assert (unseen.usual, unseen.least.taking_ns) == (few, 0)
    assert unseen.most.taking_ns > 4 * few.taking_ns
    assert {one.taking_ns for one in (timed.usual, timed.least, timed.most)} == {3 * MS}
    assert timed.least.sending_ns < timed.usual.sending_ns < timed.most.sending_ns


def pinning(*, timed: tuple[int, ...] = (), device: str = "cuda", **run: Any) -> tuple[float, int]:
    """Return pin_ns in ms, and whether it is known, of a job of 20 steady steps that wait for `wait` of `step` ms."""
    usual = {"step": 50, "wait": 40, "fetch": 100, "size": 200e6, "batches": 1.0, "loaders": 1}
    step, wait, fetch, size, batches, loaders = (run.pop(name, value) for name, value in usual.items())
    begins = [k * step * MS for k in range(20)]
    lengths = np.full(20, step * MS, dtype=float)
    none = np.zeros(0, dtype=np.int64)
    timing = Timing(lengths, "steps", "step", None, none.reshape(0, 2), none.reshape(0, 2), none, none,
                    {"fetch": wait * MS}, lengths, none.astype(bool))  # fmt: skip
    # Of each 100 ms the thread was on a core; one row before the steps are steady, and one where that is not known.
    rows = [(0, -1), (-9 * MS, 90 * MS), *((k * step * MS + 1, ns * MS) for k, ns in enumerate(timed))]
    usage = pd.DataFrame(rows, columns=["start_ns", "pin_ns"]).assign(kind="usage", dur_ns=100 * MS)
    pins = {"role": "train", "num_workers": 4, "pin_memory": True} | run
    found = loader.pinning(
        usage,
        pd.DataFrame({"step_batches": [batches], "loaders": [loaders]}),
        pd.DataFrame({"worker": [0, 1], "dur_ns": [fetch * MS, fetch * MS / 2]}),
        pd.DataFrame({"tensors": [2.0], "tensor_bytes": [size]}),
        pd.DataFrame({"start_ns": begins, "dur_ns": step * MS, "steady": True}),
        timing,
        RankFacts(0, {"loaders": [pins], "device": {"type": device}}, none, {}),
    ).iloc[0]
    return round(found["pin_ns"] / MS, 2), int(found["known"])


@pytest.mark.parametrize(
    ("run", "pin", "known"),
    [
        # By the kernel's count, a fifth and two fifths of the time.
        ({"timed": (20, 40), "wait": 1}, 15, 1),
        ({"timed": (20, 40), "wait": 1, "batches": 2.0}, 7.5, 1),
        # It is what the loop waits for, and had a core for three quarters of the time; or for too little to be that.
        ({"timed": (70, 80)}, 50, 1),
        ({"timed": (20, 40)}, 15, 1),
        # The loop waits, its workers make a batch every 25 ms, and one comes every 50.
        ({}, 50, 1),
        ({"batches": 2.0}, 25, 0),  # that the workers take as long for
        ({"batches": 2.0, "fetch": 20}, 25, 1),
        ({"batches": 2.0, "loaders": 2}, 50, 1),  # each loader has a thread of its own
        # Workers that need 75 ms explain more than all of it, and a loop that does not wait explains itself.
        ({"fetch": 300}, 50, 0),
        ({"wait": 1}, 50, 0),
        # The usual time: 0.2 ms, 0.15 for a tensor, 0.3 for a MB. So small a batch is not what a loop waits 50 ms for.
        ({"size": 10e6}, 3.5, 0),
        ({"wait": 1, "step": 100}, 60.5, 0),
    ],
)
def test_pinning_takes_what_was_timed_else_what_is_waited_for_else_the_usual(
    run: dict[str, Any], pin: float, known: int
) -> None:
    took, sure = pinning(**run)
    assert took == pytest.approx(pin)
    assert sure == known


@pytest.mark.parametrize("run", [{"pin_memory": False}, {"num_workers": 0}, {"device": "cpu"}])
def test_without_a_device_workers_and_the_setting_no_thread_pins(run: dict[str, Any]) -> None:
    with pytest.raises(DoesNotApply, match="no thread"):
        pinning(**run)


def test_the_pace_has_no_waits_for_a_core_and_is_computed_once(tmp_path: Path) -> None:
    made = runs.measured(recorded(tmp_path, CROWDS, **CROWDED), waits.loop_times).frame(waits.loop_times)
    mine = made.of(0)
    assert made.of(0) is mine
    means = (mine.own.mean(), mine.fetch.mean(), mine.fetch_cpu.mean(), made.step_ns(0))
    assert means == pytest.approx((20 * MS, 80 * MS, 80 * MS, 100 * MS), rel=0.01)


def halved(path: Path) -> None:
    """Let each step take two batches of 40 ms, whose gradients are accumulated."""
    edit(path, "loading.jsonl", lambda _, row: row | {"count": 1 + (row["kind"] == "batch")})
    begin = BASE_NS + 20 * 1_000 * MS  # when the first one began
    edit(path, "fetches.jsonl", lambda n, row: row | {"dur_ns": 40 * MS, "start_ns": begin + n * 40 * MS})


@pytest.mark.parametrize(
    ("make", "batches", "own", "steps"),
    [
        (loaded(halved, **STORED), (2, 1, 1), [10, 10, 10, 10], [100, 80, 40, 80 / 3, 20]),
        (of_two, (2, 2, 1), [0, 20, 0, 20], [180, 80, 40, 80 / 3, 20]),
    ],
    ids=["two of one loader", "one of each of two loaders"],
)
def test_a_step_of_two_batches(
    tmp_path: Path, make: Callable[[Path], Path], batches: tuple[int, ...], own: list[int], steps: list[float]
) -> None:
    made = runs.measured(make(tmp_path), waits.loop_times).frame(waits.loop_times)
    mine = made.of(0)
    assert (mine.batches, mine.loaders, mine.workers) == batches
    assert (mine.own[:4] / MS).tolist() == pytest.approx(own)
    assert made.step_ns(0) == pytest.approx(80 * MS)
    assert [replay.replayed(mine, n).step_ns / MS for n in range(5)] == pytest.approx(steps, rel=0.03)


def test_uneven_steps_have_no_pace(tmp_path: Path) -> None:
    varies = recorded(tmp_path / "varies", **STORED)
    edit(varies, "loading.jsonl", lambda n, row: row | ({"count": 1 + n % 4 // 2} if row["kind"] == "batch" else {}))
    for path, why in (
        (varies, "number varies"),
        (of_two(tmp_path / "twice", count=2), "different numbers of batches from 2 loaders"),
        (of_two(tmp_path / "other", num_workers=3), "different numbers of workers"),
    ):
        with pytest.raises(NotMeasured, match=why):
            runs.measured(path, waits.loop_times).frame(waits.loop_times).of(0)


def test_fetches_stand_in_the_order_in_which_their_batches_are_taken() -> None:
    # Worker 1 was faster, and has one fetch more than the others.
    fetches = pd.DataFrame({"worker": [1, 1, 0, 1, 0, 1, 0], "dur_ns": [10, 11, 20, 12, 21, 13, 22]}).assign(loader=0)
    assert waits.in_turn(fetches)["dur_ns"].tolist() == [20, 10, 21, 11, 22, 12]
    assert waits.in_turn(fetches.head(3))["dur_ns"].tolist() == [10, 11, 20]
    # Of two loaders, each one's first worker comes before each one's second.
    both = pd.DataFrame({"loader": [0, 0, 1, 1] * 3, "worker": [0, 1] * 6, "dur_ns": range(12)})
    assert waits.in_turn(both)["dur_ns"].tolist() == [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11]


@pytest.mark.parametrize(
    ("make", "wait", "saving", "part", "workers"),
    [
        (loaded(**STORED), 60, 60, "", 4),
        # Of 100 ms of computing, collating takes 60; without it a step takes the other 40.
        (loaded(COLLATES, **CROWDED), 70, 60, replay.COLLATING, None),
        (loaded(fetch=50, cpu=2, workers=1, own=49), 1, 1, None, None),  # too short a wait to plan for
    ],
    ids=["workers help", "a core is short", "a short wait"],
)
def test_a_faster_loader(
    tmp_path: Path, make: Callable[[Path], Path], wait: int, saving: float, part: str | None, workers: int | None
) -> None:
    run = runs.measured(make(tmp_path), waits.input_waits, waits.input_cost_ns, waits.faster_loader)
    assert run.frame(waits.input_waits).to_dict("records") == [{"rank": 0, "wait_ns": wait * MS, "taken_ns": 0.0}]
    faster = run.frame(waits.faster_loader)
    assert faster.saving_ns == pytest.approx(saving * MS, rel=0.05)
    assert faster.workers_help == (workers is not None)
    assert faster.plan is None or workers is None or faster.plan.chosen.workers == workers
    assert (faster.plan is None) == (part is None)
    if workers is None and part:
        assert faster.part == part


def test_the_rank_that_waits_most_is_known_with_its_loader(tmp_path: Path) -> None:
    found = runs.measured(recorded(tmp_path, ranks=2, **STORED), waits.starving).frame(waits.starving)
    assert (found.rank, found.alike, found.others, found.victims) == (0, (0, 1), (), {})
    assert (found.wait_ns, found.step_ns) == pytest.approx((60 * MS, 80 * MS))
    assert (found.workers, found.cores) == (1, 8)


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (loaded(**STORED), [100, 80, 40, 80 / 3, 20, 20, 20]),
        # The recorded fetches are a twentieth too long: so are those of a step that is a quarter as long.
        (loaded(fetched(70, fetch=84), own=10, **STORED), [89, 80, 40, 80 / 3, 20, 16, 40 / 3, 11.4, 10]),
        # A loop that fetches itself: all of it computes, and there is a core a rank, so there is nothing to gain.
        (loaded(fetch=30, cpu=30, workers=0, cores=2, ranks=2), [50, 51, 51, 51]),
        # On one core that has no more to give more workers give nothing.
        (loaded(CROWDS, **CROWDED), [104.5, 100, 100, 100]),
    ],
    ids=["from its own batches", "off by a share", "fetches itself", "no core to give"],
)
def test_a_recorded_run_is_forecast(tmp_path: Path, make: Callable[[Path], Path], steps: list[float]) -> None:
    given = asked(runs.measured(make(tmp_path), *NEEDS), waits.forecasts, 0)
    found = {f.workers: f.step_ns / MS for f in (*given[1:], given[0])}
    assert [found[n] for n in range(len(steps))] == pytest.approx(steps, rel=0.02)
    assert min(found.values()) > 0.9 * steps[-1]


def test_the_fewest_workers_that_give_nearly_all_are_proposed(tmp_path: Path) -> None:
    run = runs.measured(recorded(tmp_path, **STORED), *NEEDS)
    assert waits.proposed(asked(run, waits.forecasts, 0)).workers == 4
    plan = asked(run, waits.planned, {0: 60.0 * MS})
    assert plan is not None
    assert plan.gain_ns == pytest.approx(60 * MS, rel=0.05)


def test_a_run_that_its_batches_do_not_explain_is_not_forecast(tmp_path: Path) -> None:
    run = runs.measured(recorded(tmp_path / "a", fetched(60, fetch=8), **STORED), *NEEDS)
    with pytest.raises(NotMeasured, match="explain"):
        asked(run, waits.forecasts, 0)
    assert asked(run, waits.planned, {0: 60.0 * MS}) is None
    steps = [runs.light(k, 80 * MS, fetch_ns=60 * MS) for k in range(40)]
    bare = runs.measured(runs.recorded(tmp_path / "b", (None, steps, runs.CPU)), *NEEDS)
    for function, of in ((waits.forecasts, 0), (waits.step_with, lambda times: times.without(replay.SAMPLES))):
        with pytest.raises(NotMeasured):
            asked(bare, function, of)
    none = [step | {"fetches": 0, "fetch_ns": -1} for step in steps]
    with pytest.raises(NotMeasured, match="no DataLoader was seen"):
        runs.measured(runs.recorded(tmp_path / "c", (None, none, runs.CPU)), waits.faster_loader).frame(
            waits.faster_loader
        )


@pytest.mark.parametrize(
    ("make", "part", "step"),
    [
        (loaded(CROWDS, **CROWDED), replay.SAMPLES, 20),
        # Of a batch's 80 ms of computing 60 are collating: the loop's 20 and 20 of reading are left, or those 60.
        (loaded(COLLATES, **CROWDED), replay.COLLATING, 40),
        (loaded(COLLATES, **CROWDED), replay.SAMPLES, 80),
        # The rank that computes most sets the pace, and what all wait for stays: of 50 ms rank 0 computes 20 and rank
        # 1 45, 5 ms are nobody's computing; or rank 1 computes 30, and may have waited for what nobody recorded.
        *((loaded(*(held_up(loop=0, worker=0, computing=ms, rank=r) for r, ms in enumerate(each)), fetch=130, cpu=10,
                  workers=1, own=50, ranks=2), replay.SAMPLES, 50) for each in ((20, 45), (20, 30))),
        # Two threads and a worker that always computes, on two cores: of 40 ms each thread has a core for 30 and both
        # of them for 22.5; for the others one spins.
        (loaded(held_up(loop=10, worker=30, computing=60), fetch=130, cpu=100, workers=1, own=40, cores=2, threads=2),
         replay.SAMPLES, 22.5),
    ],
)  # fmt: skip
def test_a_step_with_a_part_of_its_batches_gone(
    tmp_path: Path, make: Callable[[Path], Path], part: str, step: float
) -> None:
    run = runs.measured(make(tmp_path), *NEEDS)
    assert asked(run, waits.step_with, lambda times: times.without(part)) == pytest.approx(step * MS, rel=0.01)


@pytest.mark.parametrize(("delay", "sure"), [(2, True), (14, False)])
def test_where_others_have_most_of_the_cores_no_number_of_workers_is_sure(
    delay: int, sure: bool, tmp_path: Path
) -> None:
    # Without workers, who else but programs outside the job keeps a loop of 30 ms off its core?
    job = {"fetch": 80, "cpu": 2, "workers": 0, "own": 30, "cores": 4}
    path = recorded(tmp_path, held_up(loop=delay, worker=0, computing=30), **job)
    plan = asked(runs.measured(path, *NEEDS), waits.planned, {0: 80.0 * MS})
    assert plan is not None
    assert plan.sure is sure


def test_fewer_workers_take_what_they_cost_training_and_the_loop_fetches(tmp_path: Path) -> None:
    def fewer(path: Path) -> Any:
        return runs.measured(path, waits.fewer_workers).frame(waits.fewer_workers)

    found = fewer(needless(tmp_path / "a"))
    assert [f.workers for f in found.forecasts] == [3, 0, 1, 2]
    assert (found.chosen.workers, found.forecasts[0].step_ns) == (0, pytest.approx(24 * MS))
    # Of 24 ms, 6 take batches over; for 3 the training thread had no core, and its two threads both had theirs for
    # (21 ÷ 24)² of the time: workers that compute 4 ms explain that. The thread then fetches for 4 ms.
    assert found.chosen.step_ns == pytest.approx((18 * (21 / 24) ** 2 + 4) * MS, rel=0.02)
    assert found.gain_ns == pytest.approx(24 * MS - found.chosen.step_ns)
    assert 0 < found.least_ns < found.gain_ns
    assert found.by_rank_ns == {0: pytest.approx(found.gain_ns)}
    # For 12 of 24 ms without a core: two threads both had theirs for 6, and workers that compute 4 ms held them up for
    # 5.6 of the 18. The rest stays: of 15 ms a thread computes, it takes as much from each.
    assert fewer(needless(tmp_path / "b", takes=0, held_ms=12)).chosen.step_ns > 18 * MS
    # Workers that are needed stay.
    needed = fewer(recorded(tmp_path / "c", fetch=80, cpu=2, workers=4))
    assert needed.gain_ns == 0 > needed.least_ns
    # All ranks wait for the one that gains least.
    path = needless(tmp_path / "d", ranks=2)
    held_up(loop=0, worker=0, computing=30, rank=1)(path)
    least = fewer(path)
    assert (least.rank, least.by_rank_ns[1]) == (1, least.gain_ns)
    assert least.gain_ns < least.by_rank_ns[0]
    # What was waited for workers whose batches were ready is gone with them: each next() takes 11 ms in place of the 6
    # that taking a ready batch does, and the step is as much longer.
    path = needless(tmp_path / "e")
    edit(path, "steps.jsonl", lambda _, step: step | {"dur_ns": step["dur_ns"] + 5 * MS, "fetch_ns": 11 * MS})
    longer = fewer(path)
    assert longer.forecasts[0].step_ns == pytest.approx(29 * MS)
    assert longer.chosen.step_ns == pytest.approx(found.chosen.step_ns, rel=0.05)


@pytest.mark.parametrize(
    ("device", "workers", "why"), [("cpu", 0, DoesNotApply), ("cuda", 2, DoesNotApply), ("cpu", 2, NotMeasured)]
)
def test_without_workers_on_a_device_and_without_a_record_none_is_left_out(
    tmp_path: Path, device: str, workers: int, why: type[Exception]
) -> None:
    path = recorded(tmp_path, fetch=4, cpu=4, workers=workers)
    add_facts(path, device={"type": device})
    if why is NotMeasured:
        (path / "ranks/00000/fetches.jsonl").unlink()
    with pytest.raises(why):
        runs.measured(path, waits.fewer_workers).frame(waits.fewer_workers)


# Two workers give 40 ms a step, one 80; four give no more than three.
FORECASTS = tuple(
    replay.Forecast(n, step * MS, (step - 20) * MS) for n, step in ((1, 80), (1, 80), (2, 40), (3, 30), (4, 30))
)
PLAN = waits.Plan(FORECASTS, FORECASTS[3], 50 * MS)
HELPS = waits.FasterLoader(50 * MS, PLAN, workers_help=True)
PINS = replay.Forecast(12, 57 * MS, 47 * MS)
BEGINS = ("persistent_workers", False, True)
SHORT = waits.FasterLoader(80 * MS)


def starves(workers: int | None, step: int, wait: int, cores: int = 16, **said: Any) -> waits.Starving:
    return waits.Starving(0, wait * MS, step * MS, workers, said, cores, (0,), (), -1, {})


@pytest.mark.parametrize(
    ("of", "faster", "settings", "says"),
    [
        (starves(None, 100, 80), SHORT, [], "more `num_workers`"),
        # A batch is made in 80 ms and needed every 20: four workers; or what the cores allow, less the loop's own.
        (starves(0, 100, 80), SHORT, [("num_workers", 0, 4), BEGINS], ""),
        (starves(0, 100, 80, 3), SHORT, [("num_workers", 0, 2), BEGINS], ""),
        (starves(2, 100, 80), SHORT, [("num_workers", 2, 10)], ""),
        (starves(2, 100, 80, 4), SHORT, [], ""),
        # Three workers make six batches ahead; each step of 20 ms uses up one, and gets two thirds of one back.
        (starves(1, 80, 60), HELPS, [("num_workers", 1, 3)],
         "(20.0 ms for some 18 steps at first, from what is made ahead)"),
        (starves(1, 80, 60), HELPS, [("num_workers", 1, 3)], "10.0 ms"),
        (starves(12, 57, 47), waits.FasterLoader(40 * MS, waits.Plan((PINS,), PINS, 0.0), part=replay.PINNING), [],
         "more workers would not help: one thread pins the batches of all of them"),
        # A setting of the queue is proposed where there are workers; that they live on is worker_restart's.
        (starves(2, 80, 60, 2, persistent_workers=False, prefetch_factor=1), waits.FasterLoader(60 * MS),
         [("prefetch_factor", 1, 2)], ""),
    ],
)  # fmt: skip
def test_what_is_proposed_for_a_loader(
    of: waits.Starving, faster: waits.FasterLoader, settings: list[tuple[object, ...]], says: str
) -> None:
    made = list(changes(of, faster))
    assert [(s.name, s.now, s.to) for c in made for s in c.settings] == settings
    assert any(says in change.text for change in made)


def test_the_steps_that_are_shown_are_those_that_are_forecast() -> None:
    each = [("1", 80 * MS), ("2", 40 * MS), ("3", 30 * MS), ("4", 30 * MS)]
    assert [(f.value, f.step_ns) for f in forecasts_of(80.0 * MS, PLAN)] == each
    shown = predicted_steps(starves(1, 80, 60), HELPS, PLAN)
    assert [row[:2] for row in shown.rows] == [("1 (is)", 80 * MS), each[1], ("3 (proposed)", 30 * MS), each[3]]
    cheaper = predicted_steps(starves(1, 80, 60), waits.FasterLoader(60 * MS, PLAN), PLAN)
    assert cheaper.rows[-1][:2] == ("samples that cost nothing", 20 * MS)


@pytest.mark.parametrize(
    ("kind", "single"), [("_SingleProcessDataLoaderIter", True), ("_MultiProcessingDataLoaderIter", False)]
)
def test_a_trace_tells_calls_of_the_loader_and_its_kind(tmp_path: Path, kind: str, single: bool) -> None:
    made = traces.trace(*(traces.fetch(n * MS, 10, kind) for n in range(3)))
    row = runs.rank_of(tmp_path, made).once(loader.loader_calls).iloc[0]
    assert (row["calls"], row["in_process"]) == (3, single)


def batches(folder: Path, workers: int) -> Path:
    """Record 30 steps of 50 ms that wait 20 for a batch, which takes 40 ms to make."""
    facts = {**runs.CPU, "loaders": [{"role": "train", "num_workers": workers}]}
    steps = [runs.light(k, 50 * MS, fetch_ns=20 * MS, fetches=2) for k in range(30)]
    path = runs.recorded(folder / "run", (None, steps, facts))
    runs.loading(path, 0, step=50 * MS, wait=20 * MS, fetch=40 * MS, cpu=10 * MS, n=30, workers=workers)
    return path


def test_means_of_the_queue_and_of_each_worker_in_the_steady_steps(tmp_path: Path) -> None:
    wanted = (loader.loader_means, loader.worker_means, loader.fetch_series, loader.loader_calls, step_means)
    run = runs.measured(batches(tmp_path, 2), *wanted)
    means = run.frame(loader.loader_means).iloc[0]
    assert run.frame(loader.loader_calls)["calls"][0] == 60
    assert means["batches"] == means["empty"] == run.frame(step_means)["steps"][0]
    assert (means["ready"], means["outstanding"], means["epochs"]) == (0, 4, 1)
    assert means["cores"] == pytest.approx(0.6)
    assert pd.isna(means["end_ns"])
    workers = run.frame(loader.worker_means)[["worker", "dur_ns", "cpu_ns"]]
    assert workers.to_numpy().tolist() == [[0, 40 * MS, 10 * MS], [1, 40 * MS, 10 * MS]]
    assert run.frame(loader.worker_means)["read_bytes"].isna().all()
    series = run.frame(loader.fetch_series)
    assert (set(series["dur_ns"]), series["gap_ns"].iloc[0]) == ({40 * MS}, 0)
    alone = runs.measured(batches(tmp_path / "alone", 0), *wanted)
    assert alone.frame(loader.loader_means)["empty"][0] == -1
    assert alone.frame(loader.worker_means)["worker"].to_list() == [-1]


def test_what_was_under_way_while_the_job_was_suspended_is_in_no_mean(tmp_path: Path) -> None:
    path = batches(tmp_path, 2)
    late = {"start_ns": BASE_NS + 600_000 * MS, "dur_ns": 9_000 * MS}  # far from all steps
    fetches, rows = lines(path, "fetches.jsonl"), lines(path, "loading.jsonl")
    rewrite(path, "fetches.jsonl", [*fetches, fetches[-1] | late])
    rewrite(path, "loading.jsonl", [*rows, rows[0] | late])
    found = []
    for resumed in ([], [late["start_ns"] + 8_000 * MS]):
        add_facts(path, "run.json", resumed_ns=resumed)
        run = runs.measured(path, loader.loader_means, loader.worker_means)
        found.append((run.frame(loader.loader_means)["start_ns"][0], run.frame(loader.worker_means)["dur_ns"].max()))
    assert found[0][0] > 4_000 * MS
    assert found[0][1] > 40 * MS
    assert found[1] == (5, 40 * MS)


def test_taking_over_a_batch_is_told_from_those_that_are_surely_ready(tmp_path: Path) -> None:
    def taken(path: Path) -> float:
        return float(runs.measured(path, loader.loader_means).frame(loader.loader_means)["taken_ns"][0])

    path = batches(tmp_path, 2)
    assert pd.isna(taken(path))
    ready(every=2, takes=3)(path)
    assert taken(path) == 3 * MS
    # Of four that were asked for two are ready: the one whose turn it is may be missing.
    ready(every=2, takes=3, outstanding=4)(path)
    assert pd.isna(taken(path))


def test_other_loaders_are_left_out_and_without_one_nothing_is_told(tmp_path: Path) -> None:
    path = batches(tmp_path, 1)
    other = {"worker": 0, "pid": 9, "start_ns": BASE_NS + 10_000 * MS, "count": 7, "dur_ns": 900 * MS}
    more = [other, other | {"start_ns": other["start_ns"] + 1}]
    rewrite(path, "fetches.jsonl", [*lines(path, "fetches.jsonl"), *more])
    assert set(runs.measured(path, loader.worker_means).frame(loader.worker_means)["dur_ns"]) == {40 * MS}
    for name, measure, why in (
        ("loading.jsonl", loader.loader_means, "no DataLoader"),
        ("fetches.jsonl", loader.worker_means, "no record of the time"),
    ):
        rewrite(path, name, [])
        with pytest.raises(NotMeasured, match=why):
            runs.measured(path, measure).frame(measure)


def test_a_worker_is_compared_with_the_others_of_its_rank() -> None:
    workers = pd.DataFrame(
        {"rank": [0, 1, 1, 1, 2], "worker": [0, 0, 1, 2, -1], "dur_ns": [9.0, 2.0, 8.0, 4.0, 7.0], "batches": 1}
    )
    (row,) = loader.slowest_workers(workers).to_dict("records")
    assert row == {"rank": 1, "worker": 1, "dur_ns": 8.0, "others_ns": 3.0, "workers": 3}
    with pytest.raises(NotMeasured, match="two workers"):
        loader.slowest_workers(workers[workers["rank"] != 1])


# Recordings of an H200, whose truth was measured by plain and fixed scripts, without dlprof. g05: one worker decodes
# JPEG files; with 14 of them steps 16 to 40 took 12.9 ms each: in that time they used up the 28 batches that the
# workers had made ahead. g07: 201 MB of floats a batch come from 12 workers and are copied from pageable memory,
# 50.9 ms a step; with pinned memory 51.9 ms, of which g07_pageable_fixed is the recording.
H200 = TRACES / "h200"
real = pytest.mark.skipif(not H200.is_dir(), reason="the reference traces are not here (../shared/traces/h200)")


@cache
def diagnosed(name: str) -> Result:
    return diagnose(open_run(H200 / name), (input_wait.RULE, host_bound.RULE, pageable_copy.RULE), jobs=1)


def outcome(name: str, rule: str) -> Outcome:
    return next(o for o in diagnosed(name).outcomes if o.id == rule)


def step_left(name: str, saving_ns: float = 0) -> float:
    window = diagnosed(name).window
    assert window is not None
    return (window.step_ns - saving_ns) / MS


@real
def test_more_workers_are_predicted_for_a_loader_with_one() -> None:
    found = diagnosed("g05_loader").found[0]
    assert found.id == "input_wait"
    hold(found, sets=[("num_workers", 1, 16)])
    # 16 workers that take 312 ms for a batch; and the step as it is while there are batches in stock.
    assert step_left("g05_loader", found.saving_ns) == pytest.approx(312 / 16, rel=0.1)
    ahead = found.advice[0].partition(" predicted (")[2]
    assert float(ahead.partition(" ms for some ")[0]) == pytest.approx(12.9, rel=0.15)


@real
def test_pinning_is_not_promised_where_its_thread_takes_as_long_as_the_copy() -> None:
    says = "201.3 MB a step are copied from pageable memory; pinning would not help"
    hold(outcome("g07_pageable", "pageable_copy"), "clear", saving=0.0, says=says)
    # Freeing the shared memory of each batch is not the script's Python either.
    hold(outcome("g07_pageable", "host_bound"), "clear")


@real
def test_the_thread_that_pins_is_what_limits_also_a_job_that_uses_up_what_was_made_ahead() -> None:
    name = "g07_pageable_fixed"
    assert step_left(name) == pytest.approx(51.9, rel=0.1)
    assert not any("unknown reason" in text for text in diagnosed(name).run.warnings)
    found = diagnosed(name).found[0]
    assert found.id == "input_wait"
    says = ("One thread pins all batches, and takes 56.7 ms for each (201.3 MB, 3.55 GB/s).", "more workers would not")
    hold(found, at_most=True, sets=[], lines=[17, 20, 13, 20], says=says)
    # Without it the workers are next: 12 that take 198 ms for a batch.
    assert step_left(name, found.saving_ns) == pytest.approx(198 / 12, rel=0.1)
