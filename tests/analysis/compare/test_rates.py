"""Two runs by samples a second: where their steps do different work, they compare by nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from dlprof.analysis.compare.comparison import compare, rates, to_json
from dlprof.result import Fact, Result
from dlprof.result.figures import Throughput
from tests.fixtures.comparisons import found, run


def at(step: float, samples: float | None, tokens: float | None = None, *, ranks: int = 1, of: str = "job") -> Result:
    """Return a run whose step takes so many ms, for so many samples and tokens."""
    result = run(step, ranks=ranks)
    assert result.window is not None
    per_s = 1000 / step
    t = Throughput(
        samples and samples * per_s,
        tokens and tokens * per_s,
        samples,
        "loader",
        tokens,
        of=of,  # type: ignore[arg-type]
    )
    return replace(result, window=replace(result.window, throughput=t))


def test_half_the_batch_is_not_faster_for_that() -> None:
    c: Any = compare(at(100, 32), at(60, 16))
    assert (c.rates.unit, c.rates.ratio, c.rates.verdict) == ("samples", pytest.approx(0.833, rel=1e-3), "slower")
    assert not c.rates.same_work
    assert c.other_work == ("a step is of 32 samples in A and of 16 in B",)
    assert "compared by samples a second" in c.doubts[0]
    assert to_json(c)["rates"]["verdict"] == "slower"


def test_runs_of_the_same_work_compare_by_their_steps() -> None:
    c: Any = compare(at(100, 32), at(60, 32))
    assert c.other_work == ()
    assert (c.rates.ratio, c.rates.verdict) == (pytest.approx(1 / 0.6), "faster")


def test_strong_scaling_is_the_same_work() -> None:
    assert compare(at(100, 32), at(60, 32, ranks=2)).other_work == ()


def test_more_ranks_with_their_own_batches_compare_by_samples() -> None:
    c = compare(at(100, 32), at(110, 64, ranks=2))
    assert c.rates is not None
    assert c.rates.ratio == pytest.approx(2 / 1.1)
    assert len(c.other_work) == 1


def test_longer_sequences_compare_by_tokens() -> None:
    r: Any = rates(at(100, 8, 800), at(150, 8, 1600))
    assert (r.unit, r.ratio) == ("tokens", pytest.approx(2 / 1.5))
    assert (r := rates(at(100, 8, 800), at(150, 16, 1600))) is not None
    assert r.unit == "samples"
    assert (r := rates(at(100, None, 800), at(150, 16, 1600))) is not None
    assert r.unit == "tokens"


def test_without_throughput_another_batch_has_no_verdict() -> None:
    a, b = (replace(run(step), facts=(Fact("Loader", "batch size", n),)) for step, n in ((100, "32"), (50, "16")))
    c = compare(a, b)
    assert (c.rates, c.other_work) == (None, ("batch size is 32 in A and 16 in B",))
    assert c.prediction is None


def test_ranks_compare_with_ranks_of_as_many_alone() -> None:
    assert rates(at(100, 8, of="rank"), at(90, 8, of="rank")) is not None
    assert rates(at(100, 8, of="rank", ranks=2), at(90, 8, of="rank")) is None
    assert rates(at(100, 8, of="rank"), at(90, 8)) is None


def test_noise_of_a_rate() -> None:
    assert (r := rates(at(100, 8), at(99.5, 16))) is not None
    assert r.noise == pytest.approx(2.01 * (0.005**2 * 2) ** 0.5, rel=0.01)
    unknown = run(99.5, found("x", 1), noise=None)
    assert unknown.window is not None
    t = Throughput(16.0, None, 1.6, "loader")
    other = replace(unknown, window=replace(unknown.window, throughput=t))
    assert (r := rates(at(100, 8), other)) is not None
    assert (r.noise, r.verdict) == (None, "unknown")
