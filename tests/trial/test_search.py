"""What runs when, and what is concluded: on runs that are pretended, with a clock of their own."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from dlprof.overrides import Value
from dlprof.result.tried import Tried
from dlprof.trial.planning import Candidate
from dlprof.trial.running import Failed
from dlprof.trial.search import Search
from tests.fixtures.trials import Pretended, steps

WORKERS, FUSED, FREEZE = {"loader.num_workers": 2}, {"optimizer.fused": True}, {"gc.freeze": True}


def product(settings: Mapping[str, Value]) -> float:
    """Return the step of a job that workers make 1.5 × and a fused optimizer 1.2 × faster."""
    step = 100.0
    step /= 1.5 if "loader.num_workers" in settings else 1
    step /= 1.2 if "optimizer.fused" in settings else 1
    return step * (1.3 if "env.OMP_NUM_THREADS" in settings else 1)


def searched(run: Pretended, *settings: Mapping[str, Value], minutes: float = 10.0, **of: object) -> Tried:
    candidates = [Candidate(s, ("input_wait",), 1.5, **of) for s in settings]  # type: ignore[arg-type]
    search = Search(run, candidates, 60 * minutes, clock=run.clock)
    search.go()
    return search.tried(30)


def verdicts(tried: Tried) -> list[str]:
    return [a.verdict for a in tried.attempts]


def test_runs_without_and_with_a_change_take_turns() -> None:
    run = Pretended(product, noise=0.01)
    found = searched(run, WORKERS)
    assert run.runs[:3] == [{}, WORKERS, {}]
    assert all(a != b for a, b in zip(run.runs, run.runs[1:], strict=False))
    assert found.state == "complete"
    assert found.best is not None
    assert found.best.measured is not None
    assert found.best.measured.ratio == pytest.approx(1.5, rel=0.03)
    assert found.best.before_ns == pytest.approx(100e6, rel=0.03)
    assert found.best.after_ns == pytest.approx(100e6 / 1.5, rel=0.03)
    assert found.runs == len(run.runs) < 10


def test_nothing_to_gain_is_an_answer() -> None:
    run = Pretended(lambda _: 100.0, noise=0.004)
    found = searched(run, WORKERS, FUSED, FREEZE)
    assert verdicts(found) == ["no_gain"] * 3
    assert found.best is None
    assert (found.state, found.combinations) == ("complete", ())


def test_a_healthy_job_gains_nothing_ten_times_in_ten() -> None:
    for seed in range(10):
        run = Pretended(lambda _: 100.0, noise=0.015)
        run.rng = type(run.rng)(type(run.rng.bit_generator)(seed))
        assert searched(run, WORKERS, FUSED, FREEZE, minutes=30).best is None


def test_the_planted_fault_is_the_best_ten_times_in_ten() -> None:
    for seed in range(10):
        run = Pretended(product, noise=0.015)
        run.rng = type(run.rng)(type(run.rng.bit_generator)(seed))
        found = searched(run, FREEZE, {"env.OMP_NUM_THREADS": "1"}, WORKERS, minutes=30)
        assert found.best is not None
        assert found.best.settings == WORKERS
        assert found.best.measured is not None
        assert found.best.measured.ratio == pytest.approx(1.5, rel=0.05)


def test_what_helps_is_combined_and_measured_together_against_the_job() -> None:
    run = Pretended(product, noise=0.004)
    found = searched(run, WORKERS, FREEZE, FUSED, minutes=30)
    assert verdicts(found) == ["gain", "no_gain", "gain"]
    (together,) = found.combinations
    assert together.settings == WORKERS | FUSED
    assert together.measured is not None
    assert together.measured.ratio == pytest.approx(1.2, rel=0.02)  # against workers alone
    assert found.best is not None
    assert found.best.settings == WORKERS | FUSED
    assert found.best.measured is not None
    assert found.best.measured.ratio == pytest.approx(1.8, rel=0.02)


def test_what_does_not_add_to_the_best_is_not_kept() -> None:
    def overlapping(settings: Mapping[str, Value]) -> float:
        return 100.0 if not settings else 60.0 if "loader.num_workers" in settings else 80.0

    found = searched(Pretended(overlapping, noise=0.004), WORKERS, FUSED, minutes=30)
    assert found.best is not None
    assert found.best.settings == WORKERS
    assert [c.verdict for c in found.combinations] == ["no_gain"]


def test_two_values_of_one_setting_are_not_combined() -> None:
    found = searched(Pretended(product, noise=0.004), WORKERS, {"loader.num_workers": 3}, minutes=30)
    assert verdicts(found) == ["gain", "gain"]
    assert found.combinations == ()


def test_a_drift_of_the_machine_is_in_both() -> None:
    run = Pretended(lambda _: 100.0)
    run.step_ms = lambda _: 100.0 * 1.02 ** len(run.runs)
    assert verdicts(searched(run, WORKERS)) == ["no_gain"]


def test_what_crashes_is_told_and_costs_no_other_answer() -> None:
    def crashing(settings: Mapping[str, Value]) -> float | Failed:
        return Failed("the job ended with exit code 1: boom") if "gc.freeze" in settings else product(settings)

    run = Pretended(crashing, noise=0.004)
    found = searched(run, FREEZE, WORKERS)
    assert verdicts(found) == ["not_counted", "gain"]
    assert found.attempts[0].why == "the job ended with exit code 1: boom"
    assert sum(settings == FREEZE for settings in run.runs) == 1


def test_batches_of_another_size_are_not_compared() -> None:
    run = Pretended(lambda s: steps(50.0 if s else 100.0, batch_size=4 if s else 8))
    found = searched(run, WORKERS)
    assert verdicts(found) == ["not_counted"]
    assert "batches are of 4" in found.attempts[0].why


def test_a_job_that_does_not_run_any_more_is_told() -> None:
    run = Pretended(lambda _: Failed("the job ended with exit code 3: no data"))
    found = searched(run, WORKERS)
    assert (found.state, found.why) == ("failed", "the job ended with exit code 3: no data")
    assert verdicts(found) == ["not_tried"]
    assert len(run.runs) == 1


def test_a_job_that_fails_once_in_between_is_started_again() -> None:
    run = Pretended(product, noise=0.004)

    def once(settings: Mapping[str, Value]) -> float | Failed:
        return Failed("port taken") if len(run.runs) == 3 else product(settings)

    run.step_ms = once
    assert verdicts(searched(run, WORKERS)) == ["gain"]


def test_the_time_is_kept_and_every_change_has_a_figure_before_one_is_made_sure() -> None:
    run = Pretended(product, seconds=10, noise=0.1)
    found = searched(run, WORKERS, FUSED, FREEZE, minutes=80 / 60)
    assert run.now <= 80
    assert found.state == "out_of_time"
    assert [a.measured.pairs if a.measured else 0 for a in found.attempts] == [1, 1, 1]
    assert set(verdicts(found)) == {"unclear"}


def test_without_time_for_a_pair_nothing_was_tried() -> None:
    found = searched(Pretended(product, seconds=25), WORKERS, minutes=1)
    assert (found.state, verdicts(found), found.runs) == ("out_of_time", ["not_tried"], 1)
    assert found.attempts[0].why


def test_a_job_that_reaches_no_steps_in_half_of_the_time_is_given_up() -> None:
    run = Pretended(product, seconds=1_000)
    found = searched(run, WORKERS)
    assert found.state == "failed"
    assert run.limits == [300]


@pytest.mark.parametrize("after", [0, 1, 2, 3, 4, 6])
def test_interrupted_anywhere_what_was_measured_is_kept(after: int) -> None:
    run = Pretended(product, noise=0.05, stop_after=after)
    found = searched(run, WORKERS, FREEZE)
    assert found.state == "interrupted"
    # Run by run: the job, workers, the job, freeze, the job, …; a change counts once it has run.
    pairs = [a.measured.pairs if a.measured else 0 for a in found.attempts]
    assert pairs == {0: [0, 0], 1: [0, 0], 2: [1, 0], 3: [1, 0], 4: [1, 1], 6: [2, 1]}[after]


def test_steps_that_are_faster_and_epochs_that_are_not_are_no_gain() -> None:
    run = Pretended(lambda s: steps(80.0, epochs_ms=130) if s else steps(100.0, epochs_ms=110))
    found = searched(run, WORKERS)
    assert verdicts(found) == ["no_gain"]
    assert found.attempts[0].epochs is not None
    assert found.attempts[0].epochs.ratio == pytest.approx(110 / 130)
    assert "epochs" in found.attempts[0].why
    assert found.best is None


def test_a_change_of_the_loop_is_judged_by_the_loop() -> None:
    run = Pretended(lambda s: steps(100.0, epochs_ms=110) if s else steps(100.0, epochs_ms=150))
    found = searched(run, {"loader.persistent_workers": True}, of="loop")
    assert found.best is not None
    assert found.best.measured is not None
    assert found.best.measured.ratio == pytest.approx(150 / 110)
