"""A gate fails for a slow-down and not for noise: counted over many pairs of the same job, and with one planted."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from dlprof.analysis.compare.gate import bootstrap, slowdown
from dlprof.errors import NotMeasured
from dlprof.result import Result
from dlprof.result.figures import Throughput
from tests.fixtures.comparisons import run
from tests.fixtures.results import MS

LIMIT = 0.05
PAIRS = 1_000


def steps(draw: np.random.Generator, n: int = 100, slower: float = 1.0) -> NDArray[np.float64]:
    """Return steps as jobs have them: each like the one before, one in fifty much longer."""
    noise = np.zeros(n)
    for i in range(1, n):
        noise[i] = 0.5 * noise[i - 1] + draw.normal(0, 0.03)
    lengths: NDArray[np.float64] = 100 * MS * slower * (1 + noise) * np.where(draw.random(n) < 0.02, 3.0, 1.0)
    return lengths


def of(lengths: NDArray[np.float64], **window: object) -> Result:
    made = run(float(lengths.mean()) / MS)
    assert made.window is not None
    return replace(made, window=replace(made.window, lengths_ns=tuple(lengths.tolist()), **window))


def test_noise_fails_hardly_any_build() -> None:
    """Fewer than 1 % of pairs of the same job, also where nothing slower at all is allowed."""
    draw = np.random.default_rng(5)
    found = [bootstrap(steps(draw), steps(draw), n)[1:] for n in range(PAIRS)]
    assert sum(low > 1 and high > 1 + LIMIT for low, high in found) < PAIRS / 100
    assert sum(low > 1 for low, _ in found) < PAIRS / 100


def test_a_slow_down_of_five_percent_over_a_hundred_steps_is_found() -> None:
    draw = np.random.default_rng(6)
    found = [slowdown(of(steps(draw)), of(steps(draw, slower=1.05)), n).fails(LIMIT) for n in range(100)]
    assert sum(found) >= 90


def test_a_slow_down_well_below_the_limit_passes() -> None:
    draw = np.random.default_rng(7)
    found = [slowdown(of(steps(draw, 400)), of(steps(draw, 400, slower=1.015)), n).fails(LIMIT) for n in range(50)]
    assert sum(found) <= 1


def test_the_interval_holds_the_truth() -> None:
    draw = np.random.default_rng(8)
    found = [bootstrap(steps(draw), steps(draw, slower=1.1), n) for n in range(300)]
    assert sum(low <= 1.1 <= high for _, low, high in found) >= 0.96 * 300


def test_other_batches_compare_by_their_time_a_sample() -> None:
    draw = np.random.default_rng(9)
    one, other = (Throughput(n * 10, None, n, "loader") for n in (32.0, 16.0))
    found = slowdown(of(steps(draw), throughput=one), of(steps(draw, slower=0.6), throughput=other))
    assert found.ratio == pytest.approx(1.2, rel=0.02)
    assert found.what == "the time of a sample"
    assert found.fails(LIMIT)


def test_results_without_lengths_compare_by_their_means() -> None:
    found = slowdown(run(100), run(110))
    assert found.ratio == pytest.approx(1.1)
    assert found.what == "the mean step"
    assert found.fails(LIMIT)
    assert not slowdown(run(100), run(101)).fails(LIMIT)


def test_what_is_no_run_of_the_same_job_is_not_judged() -> None:
    other = run(110)
    for changed in (
        replace(other, run=replace(other.run, command=("python", "other.py"))),
        replace(other, run=replace(other.run, device="NVIDIA H100")),
        replace(other, window=None),
        run(110, noise=None),
    ):
        with pytest.raises(NotMeasured):
            slowdown(run(100), changed)


def test_the_words() -> None:
    words = slowdown(run(100), run(110)).words
    assert words.startswith("10 % slower (99 % interval +8.")
    assert "faster" in slowdown(run(100), run(90)).words
