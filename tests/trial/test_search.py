"""What runs when, and what is concluded: on pretended runs with a clock of their own, and on pairs drawn at random."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from msgspec.structs import replace

from dlprof.errors import DlprofError
from dlprof.overrides import Value
from dlprof.result import Outcome, Result, RunInfo, RunPart, Window, change
from dlprof.result.tried import Attempt, Gain, Of, Tried
from dlprof.trial.job import kept
from dlprof.trial.measuring import Steps
from dlprof.trial.planning import Candidate
from dlprof.trial.running import Failed
from dlprof.trial.search import (
    FEWEST_STEPS,
    KNOWN,
    LEAST_STEPS,
    MOST_PAIRS,
    MOST_STEPS,
    Options,
    Search,
    Trial,
    answered,
    gain_of,
    prepared,
    steps_of_window,
    tried,
    verdict_of,
)
from tests.fixtures import runs, traces
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


def overlapping(settings: Mapping[str, Value]) -> float:
    return 100.0 if not settings else 60.0 if "loader.num_workers" in settings else 80.0


def crashing(settings: Mapping[str, Value]) -> float | Failed:
    return Failed("exit code 1: boom") if "gc.freeze" in settings else product(settings)


def epochs(settings: Mapping[str, Value]) -> Steps:
    """Return steps that become faster, and epochs that become slower."""
    return steps(80.0, epochs_ms=130) if settings else steps(100.0, epochs_ms=110)


def loop(settings: Mapping[str, Value]) -> Steps:
    return steps(100.0, epochs_ms=110 if settings else 150)


CODE = {"code.train.py:3": "list_searched"}


def starting(settings: Mapping[str, Value]) -> Steps:
    """Return steps of which a fused optimizer makes each shorter, and an edit the start before them."""
    return steps(product(settings), start_ns=2e9 if CODE.items() <= settings.items() else 8e9)


GONE = Failed("exit code 3: no data")
PERSISTENT = {"loader.persistent_workers": True}


@pytest.mark.parametrize(
    ("step_ms", "settings", "of", "state", "verdicts", "combinations", "best", "ratio"),
    [
        (product, [WORKERS], {}, "complete", "gain", "", WORKERS, 1.5),
        (lambda _: 100.0, [WORKERS, FUSED, FREEZE], {}, "complete", "no_gain no_gain no_gain", "", None, None),
        # What helps is combined, and measured together against the job.
        (product, [WORKERS, FREEZE, FUSED], {}, "complete", "gain no_gain gain", "gain", WORKERS | FUSED, 1.8),
        (overlapping, [WORKERS, FUSED], {}, "complete", "gain gain", "no_gain", WORKERS, 5 / 3),
        (product, [WORKERS, {"loader.num_workers": 3}], {}, "complete", "gain gain", "", None, 1.5),
        (crashing, [FREEZE, WORKERS], {}, "complete", "not_counted gain", "", WORKERS, 1.5),
        (lambda s: steps(50.0, batch_size=4 + len(s)), [WORKERS], {}, "complete", "not_counted", "", None, None),
        (lambda _: GONE, [WORKERS], {}, "failed", "not_tried", "", None, None),
        (epochs, [WORKERS], {}, "complete", "no_gain", "", None, None),
        (loop, [PERSISTENT], {"of": "loop"}, "complete", "gain", "", PERSISTENT, 150 / 110),
        (starting, [CODE], {"of": "start"}, "complete", "gain", "", CODE, 4.0),
        (starting, [CODE], {}, "complete", "no_gain", "", None, None),
        (product, [CODE], {"of": "start"}, "complete", "not_counted", "", None, None),
    ],
)
def test_what_is_concluded(
    step_ms: Callable[[Mapping[str, Value]], float | Steps | Failed],
    settings: list[Mapping[str, Value]],
    of: dict[str, str],
    state: str,
    verdicts: str,
    combinations: str,
    best: Mapping[str, Value] | None,
    ratio: float | None,
) -> None:
    run = Pretended(step_ms, noise=0.004)
    found = searched(run, *settings, minutes=30, **of)
    assert (found.state, " ".join(a.verdict for a in found.attempts)) == (state, verdicts)
    assert " ".join(c.verdict for c in found.combinations) == combinations
    assert found.runs == len(run.runs)
    assert all(a.why for a in found.attempts if a.verdict in ("not_counted", "not_tried") or step_ms is epochs)
    assert (found.best is None) == (ratio is None)
    if found.best is not None:
        assert found.best.settings == best or best is None
        assert found.best.measured is not None
        assert found.best.measured.ratio == pytest.approx(ratio, rel=0.02)
        if not of:  # those are of steps
            assert (found.best.before_ns or 0) / (found.best.after_ns or 1) == pytest.approx(ratio, rel=0.05)


@pytest.mark.parametrize("order", [("step", "start"), ("start", "step")])
def test_what_shortens_the_start_and_what_shortens_a_step_are_kept_each_by_its_own_measure(
    order: tuple[Of, ...],
) -> None:
    run = Pretended(starting, noise=0.004)
    each: dict[Of, Mapping[str, Value]] = {"step": FUSED, "start": CODE}
    search = Search(run, [Candidate(each[of], (), 1.2, of) for of in order], 1800, clock=run.clock)
    search.go()
    found = search.tried(30)
    assert [a.verdict for a in (*found.attempts, *found.combinations)] == ["gain"] * 3
    assert found.best is not None
    assert found.best.measured is not None
    assert (found.best.settings, found.best.of) == (FUSED | CODE, "step")
    assert found.best.measured.ratio == pytest.approx(1.2, rel=0.02)


def test_runs_without_and_with_a_change_take_turns_and_a_drift_of_the_machine_is_in_both() -> None:
    run = Pretended(lambda _: 100.0)
    run.step_ms = lambda _: 100.0 * 1.02 ** len(run.runs)
    assert [a.verdict for a in searched(run, WORKERS).attempts] == ["no_gain"]
    assert run.runs[:3] == [{}, WORKERS, {}]
    assert all(a != b for a, b in zip(run.runs, run.runs[1:], strict=False))


def test_the_planted_fault_is_the_best_ten_times_in_ten() -> None:
    for seed in range(10):
        run = Pretended(product, noise=0.015)
        run.rng = type(run.rng)(type(run.rng.bit_generator)(seed))
        found = searched(run, FREEZE, {"env.OMP_NUM_THREADS": "1"}, WORKERS, minutes=30)
        assert found.best is not None
        assert found.best.settings == WORKERS


def test_a_job_that_fails_once_in_between_is_started_again() -> None:
    run = Pretended(product, noise=0.004)
    run.step_ms = lambda settings: Failed("port taken") if len(run.runs) == 3 else product(settings)
    assert [a.verdict for a in searched(run, WORKERS).attempts] == ["gain"]


def test_the_time_is_kept_and_goes_to_the_most_promising_changes() -> None:
    run = Pretended(product, seconds=10, noise=0.01)
    found = searched(run, WORKERS, FUSED, FREEZE, minutes=80 / 60)
    assert run.now <= 80
    assert found.state == "out_of_time"
    assert [a.verdict for a in found.attempts] == ["gain", "unclear", "not_tried"]
    # A job that has reached no steps in half of the time is given up.
    endless = Pretended(product, seconds=1_000)
    assert (searched(endless, WORKERS).state, endless.limits) == ("failed", [300])


@pytest.mark.parametrize("after", [0, 1, 2, 3, 4, 6])
def test_interrupted_anywhere_what_was_measured_is_kept(after: int) -> None:
    run = Pretended(product, noise=0.05, stop_after=after)
    found = searched(run, WORKERS, FREEZE)
    assert found.state == "interrupted"
    # Run by run: the job, workers, the job, freeze, the job, …; a change counts once it has run.
    pairs = [a.measured.pairs if a.measured else 0 for a in found.attempts]
    assert pairs == {0: [0, 0], 1: [0, 0], 2: [1, 0], 3: [1, 0], 4: [1, 1], 6: [2, 1]}[after]


DRAWN = 400


def gain_drawn(true: float, noise: float, rng: np.random.Generator, drift: float = 0.0) -> Gain:
    """Return the gain at which a trial of runs A B A B … stops; each run's step has that noise, and drifts."""
    bases = [float(rng.normal(0, noise))]
    logs: list[float] = []
    while True:
        at = 2 * len(logs)
        changed = float(rng.normal(0, noise)) - math.log(true) + drift * (at + 1)
        bases.append(float(rng.normal(0, noise)) + drift * (at + 2))
        logs.append((bases[-2] + bases[-1]) / 2 - changed)
        found = gain_of(logs, np.diff(bases).tolist())
        if answered(found):
            return found


def shares(true: float, noise: float, drift: float = 0.0) -> dict[str, float]:
    rng = np.random.default_rng(7)
    counted = Counter(verdict_of(gain_drawn(true, noise, rng, drift)) for _ in range(DRAWN))
    return {name: n / DRAWN for name, n in counted.items()}


# What share of the trials may end with each verdict: from, to.
NOTHING = {"gain": (0, 0.02), "slower": (0, 0.02)}


@pytest.mark.parametrize(
    ("true", "noise", "drift", "bounds"),
    [
        *((1.0, noise, 0.0, NOTHING | {"no_gain": (0.93, 1)}) for noise in (0.005, 0.01)),
        *((1.0, noise, 0.0, NOTHING) for noise in (0.02, 0.05)),
        *((t, noise, 0.0, {"gain": (0.97, 1)}) for t, noise in ((1.05, 0.01), (1.1, 0.02), (1.4, 0.05), (8, 0.05))),
        *((true, 0.01, 0.0, {"slower": (0.95, 1), "gain": (0, 0)}) for true in (0.7, 0.9)),
        # A drift from run to run fools nobody.
        *((1.0, 0.005, drift, {"gain": (0, 0.01)}) for drift in (-0.03, 0.03)),
        *((1.1, 0.005, drift, {"gain": (0.97, 1)}) for drift in (-0.03, 0.03)),
    ],
)
def test_the_verdict_on_a_change_is_right_at_known_rates(
    true: float, noise: float, drift: float, bounds: dict[str, tuple[float, float]]
) -> None:
    found = shares(true, noise, drift)
    for verdict, (low, high) in bounds.items():
        assert low <= found.get(verdict, 0) <= high, verdict


@pytest.mark.parametrize("noise", [0.01, 0.03])
def test_the_interval_holds_the_truth_as_often_as_it_says(noise: float) -> None:
    rng = np.random.default_rng(3)
    found = [gain_drawn(1.2, noise, rng) for _ in range(DRAWN)]
    assert np.mean([(g.low or 9) <= 1.2 <= (g.high or 0) for g in found]) >= 0.93


@pytest.mark.parametrize(
    ("gain", "is_answered"),
    [
        (Gain(1.13, 0.99, 1.29, MOST_PAIRS), False),  # it seems to gain: more pairs may show it
        (Gain(1.02, 0.9, 1.16, MOST_PAIRS), True),
        (Gain(1.02, 0.9, 1.16, MOST_PAIRS - 1), False),
        (Gain(0.7, 0.4, 1.2, MOST_PAIRS), True),
    ],
)
def test_what_seems_to_gain_is_measured_on(gain: Gain, is_answered: bool) -> None:
    assert answered(gain) == is_answered


def test_a_clear_gain_needs_few_pairs_and_is_known_to_5_percent() -> None:
    rng = np.random.default_rng(5)
    found = [gain_drawn(1.4, 0.01, rng) for _ in range(100)]
    assert np.mean([g.pairs for g in found]) < 2.6
    assert all(g.ratio / (g.low or 1e-9) <= KNOWN for g in found if g.pairs < MOST_PAIRS)


def test_how_much_runs_without_the_change_differ_counts() -> None:
    alike = [0.1, 0.1001]
    calm, restless = gain_of(alike, [0.001, -0.001, 0.001]), gain_of(alike, [0.2, -0.2, 0.2])
    assert calm.low is not None
    assert restless.low is not None
    assert verdict_of(calm) == "gain"
    assert verdict_of(restless) == "unclear"


def test_the_first_two_pairs_are_students_interval() -> None:
    # t(1) = 12.706, and the shared run widens it: (1 + 1/6) / (1 − 1/6) = 1.4.
    found = gain_of([0.10, 0.12])
    half = 12.706 * math.sqrt(1.4 * 0.0002 / 2)
    assert math.log(found.high or 0) == pytest.approx(0.11 + half)
    assert math.log(found.low or 0) == pytest.approx(0.11 - half)


MS = 1e6


@pytest.mark.parametrize(
    ("step_ns", "epoch", "minutes", "steps"),
    [
        (None, None, 10, LEAST_STEPS),
        (0.0, None, 10, LEAST_STEPS),
        (20 * MS, None, 10, 400),
        (0.1 * MS, None, 10, MOST_STEPS),
        (500 * MS, None, 10, LEAST_STEPS),
        (5_000 * MS, None, 10, FEWEST_STEPS),  # 37 s hold no more than seven of them
        (20 * MS, 200, 10, 640),
        (20 * MS, 60, 10, 400),
        (20 * MS, 5_000, 10, 400),  # such an epoch does not fit
    ],
)
def test_steps(step_ns: float | None, epoch: int | None, minutes: float, steps: int) -> None:
    assert steps_of_window(step_ns, epoch, 60 * minutes) == steps


ENVIRON = {"PATH": os.environ["PATH"]}
UNFUSED = Outcome(
    "unfused_optimizer", "found", "t", saving_ns=1e6, share=0.1, speedup=1.1, changes=(change("x", fused=(None, True)),)
)


def run_of(folder: Path, *, command: list[str] | None = None, firsts: int = 0) -> Path:
    steps = [runs.light(n, 20 * runs.MS, first=int(bool(firsts) and n % firsts == 0)) for n in range(400)]
    return runs.recorded(
        folder,
        (None, steps, {**runs.CPU, "host": os.uname().nodename, "env": {}}),
        command=command or [sys.executable, "train.py"],
        cwd=str(folder.parent),
        hosts=[os.uname().nodename],
    )


def result_of(*outcomes: Outcome) -> Result:
    return Result(run=RunInfo("run"), window=Window(100, "steps", 20e6), outcomes=outcomes)


def planned(folder: Path, *outcomes: Outcome, options: Options = Options(), **run: Any) -> Trial:  # noqa: B008 - frozen
    return prepared(run_of(folder / "run", **run), result_of(*outcomes), options, ENVIRON)


def test_each_run_measures_seconds_of_the_recorded_step_and_whole_epochs(tmp_path: Path) -> None:
    assert planned(tmp_path / "a", UNFUSED).steps == 400
    assert planned(tmp_path / "b", UNFUSED, firsts=200).steps == 640
    own = planned(tmp_path / "c", UNFUSED, options=Options(steps=17))
    assert (own.steps, own.seconds) == (17, 0.0)


def test_a_run_is_as_long_as_its_epochs_take(tmp_path: Path) -> None:
    """Steps of 20 ms, between which four times as long goes to the ends of epochs: 80 of them take 8 s."""
    took = {"setup": 3e9, "steady": 4e9, "epoch_ends": 16e9}
    budget = tuple(RunPart(part, 1, ns, ns / 23e9) for part, ns in took.items())
    trial = prepared(run_of(tmp_path / "run"), replace(result_of(UNFUSED), budget=budget), Options(), ENVIRON)
    assert trial.steps == 80
    assert trial.run_s == pytest.approx(11)


def test_nothing_to_try_runs_nothing_and_is_kept(tmp_path: Path) -> None:
    trial = planned(tmp_path)
    found = tried(trial, lambda: False)
    assert (found.state, found.attempts, found.runs) == ("complete", (), 0)
    assert kept(tmp_path / "run") == found
    assert not (tmp_path / "run/try").exists()


def test_a_job_that_fails_is_told_and_what_it_printed_is_kept(tmp_path: Path) -> None:
    told: list[Attempt | float] = []
    trial = planned(tmp_path, UNFUSED, command=[sys.executable, "-c", "raise SystemExit('no data')"])
    found = tried(trial, lambda: False, told.append)
    assert found.state == "failed"
    assert found.why.startswith("the job ended with exit code 1: no data (in a copy of its folder; --in-place")
    assert kept(tmp_path / "run") == found
    assert "no data" in (tmp_path / "run/try/0001/output.txt").read_text()
    # The next trial begins with an empty folder.
    (tmp_path / "run/try/0001/old").touch()
    tried(trial, lambda: False)
    assert not (tmp_path / "run/try/0001/old").exists()


def test_one_that_is_stopped_at_once_is_interrupted(tmp_path: Path) -> None:
    found = tried(planned(tmp_path, UNFUSED), lambda: True)
    assert (found.state, found.best) == ("interrupted", None)
    assert [a.verdict for a in found.attempts] == ["not_tried"]
    assert kept(tmp_path / "run") == found
    assert not (tmp_path / "run/try").exists()


def test_what_was_not_recorded_cannot_be_tried(tmp_path: Path) -> None:
    with pytest.raises(DlprofError, match="cannot be run again"):
        prepared(runs.foreign(tmp_path / "traces", traces.training()), result_of(UNFUSED), Options(), ENVIRON)
    path = run_of(tmp_path / "run")
    with pytest.raises(DlprofError, match="elsewhere"):
        prepared(path, result_of(UNFUSED), Options(), {**ENVIRON, "DLPROF_RUN": "elsewhere"})


@pytest.mark.parametrize(
    ("differ", "strict", "verdicts", "best"),
    [
        ((), True, "gain gain", WORKERS | FUSED),
        ((WORKERS,), True, "not_counted gain", FUSED),
        ((WORKERS,), False, "gain gain", WORKERS | FUSED),
        # Each alone is as it was, and both together are not.
        ((WORKERS | FUSED,), True, "gain gain", WORKERS),
    ],
)
def test_what_changes_the_losses_is_not_kept_unless_allowed(
    differ: tuple[Mapping[str, Value], ...], strict: bool, verdicts: str, best: Mapping[str, Value]
) -> None:
    run = Pretended(product, noise=0.004)
    candidates = [Candidate(s, ("input_wait",), 1.5) for s in (WORKERS, FUSED)]

    def compare(settings: Mapping[str, Value], _limit_s: float) -> Literal["equal", "differ"]:
        return "differ" if settings in differ else "equal"

    search = Search(run, candidates, 1_800, clock=run.clock, losses=compare, strict=strict)
    search.go()
    found = search.tried(30)
    assert " ".join(a.verdict for a in found.attempts) == verdicts
    assert found.best is not None
    assert found.best.settings == best
    assert found.best.losses == ("differ" if best in differ else "equal")
    assert [a.losses for a in found.attempts] == ["differ" if a.settings in differ else "equal" for a in found.attempts]
