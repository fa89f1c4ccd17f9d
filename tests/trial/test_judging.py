"""The verdict on a change is right at known error rates: on pairs drawn with a known gain, noise and drift."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from dlprof.result.tried import Gain
from dlprof.trial.search import KNOWN, MOST_PAIRS, answered, gain_of, verdict_of

DRAWN = 400


def drawn(true: float, noise: float, rng: np.random.Generator, drift: float = 0.0) -> Gain:
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


def verdicts(true: float, noise: float, drift: float = 0.0) -> dict[str, float]:
    rng = np.random.default_rng(7)
    counted = Counter(verdict_of(drawn(true, noise, rng, drift)) for _ in range(DRAWN))
    return {name: n / DRAWN for name, n in counted.items()}


@pytest.mark.parametrize("noise", [0.005, 0.01, 0.02, 0.05])
def test_what_gains_nothing_is_next_to_never_a_gain(noise: float) -> None:
    found = verdicts(1.0, noise)
    assert found.get("gain", 0) <= 0.02
    assert found.get("slower", 0) <= 0.02
    if noise <= 0.01:
        assert found["no_gain"] >= 0.93


@pytest.mark.parametrize(("true", "noise"), [(1.05, 0.01), (1.1, 0.02), (1.4, 0.05), (8.0, 0.05)])
def test_what_gains_is_found(true: float, noise: float) -> None:
    assert verdicts(true, noise)["gain"] >= 0.97


@pytest.mark.parametrize("true", [0.7, 0.9])
def test_what_is_slower_is_never_a_gain(true: float) -> None:
    found = verdicts(true, 0.01)
    assert found["slower"] >= 0.95
    assert "gain" not in found


@pytest.mark.parametrize("drift", [-0.03, 0.03])
def test_a_drift_from_run_to_run_fools_nobody(drift: float) -> None:
    assert verdicts(1.0, 0.005, drift).get("gain", 0) <= 0.01
    assert verdicts(1.1, 0.005, drift)["gain"] >= 0.97


@pytest.mark.parametrize("noise", [0.01, 0.03])
def test_the_interval_holds_the_truth_as_often_as_it_says(noise: float) -> None:
    rng = np.random.default_rng(3)
    found = [drawn(1.2, noise, rng) for _ in range(DRAWN)]
    assert np.mean([(g.low or 9) <= 1.2 <= (g.high or 0) for g in found]) >= 0.93


def test_a_clear_gain_needs_few_pairs_and_is_known_to_5_percent() -> None:
    rng = np.random.default_rng(5)
    found = [drawn(1.4, 0.01, rng) for _ in range(100)]
    assert np.mean([g.pairs for g in found]) < 2.6
    assert all(g.ratio / (g.low or 1e-9) <= KNOWN for g in found if g.pairs < MOST_PAIRS)


def test_a_single_pair_says_nothing() -> None:
    found = gain_of([math.log(3)])
    assert found.ratio == pytest.approx(3)
    assert (found.low, found.pairs) == (None, 1)
    assert verdict_of(found) == "unclear"
    assert not answered(found)
    with pytest.raises(ValueError, match="no pair"):
        gain_of([])


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
