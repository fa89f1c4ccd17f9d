"""The step on more ranks, from sizes that follow a known model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from dlprof.analysis.scaling.predictions import studied
from dlprof.analysis.scaling.replayed import Change
from dlprof.analysis.scaling.study import Named, sizes
from dlprof.analysis.scaling.transfers import Fits
from dlprof.result import Result
from dlprof.result.scale import Study
from tests.fixtures.scaling import MS, at, latest, named, transfer, weak


def predicted(study: Study, ranks: int) -> float:
    return next(p.step_ns for p in study.predictions if p.ranks == ranks)


def test_weak_scaling_goes_on_by_its_model() -> None:
    study = studied("job", sizes(named(a=weak(1), b=weak(2), c=weak(4), d=weak(8))), [4, 64, 512])
    assert [p.ranks for p in study.predictions] == [64, 512]
    for ranks in (64, 512):
        known = weak(ranks).window
        assert known is not None
        assert predicted(study, ranks) == pytest.approx(known.step_ns, rel=0.002)
    assert study.check is not None
    assert study.check.step_ns == pytest.approx(study.sizes[-1].step_ns, rel=0.01)
    p = study.predictions[0]
    assert p.low_ns < p.step_ns < p.high_ns
    assert p.efficiency == pytest.approx(study.sizes[0].step_ns / p.step_ns)
    assert p.efficiency_low < p.efficiency < p.efficiency_high
    assert p.samples_per_s == pytest.approx(64 * 32 * 1e9 / p.step_ns)
    assert [p.transfer_ns, p.wait_ns] == pytest.approx([transfer(64), latest(64)], rel=0.01)
    assert any("one host" in doubt for doubt in study.doubts)


def test_strong_scaling_computes_less_and_keeps_what_no_batch_needs() -> None:
    def strong(ranks: int) -> Result:
        own = 10 + 640 / ranks
        made = weak(ranks, own)
        assert made.window is not None
        return at(ranks, made.window.step_ns / MS, 512, time=made.time, scaling=made.scaling)

    study = studied("job", sizes(named(a=strong(2), b=strong(4), c=strong(8))), [32])
    known = strong(32).window
    assert study.mode == "strong"
    assert known is not None
    assert predicted(study, 32) == pytest.approx(known.step_ns, rel=0.02)
    assert study.predictions[0].efficiency == pytest.approx(study.sizes[0].step_ns * 2 / 32 / known.step_ns, rel=0.02)


def test_what_the_largest_size_was_off_by_widens_the_interval() -> None:
    steady = studied("job", sizes(named(a=weak(2), b=weak(4), c=weak(8))), [64]).predictions[0]
    slower = studied("job", sizes(named(a=weak(2), b=weak(4), c=weak(8, own=110))), [64]).predictions[0]
    assert slower.high_ns - slower.low_ns > 3 * (steady.high_ns - steady.low_ns)


def test_replays_take_the_place_of_the_exposed_transfer() -> None:
    asked: list[tuple[int, Sequence[Change]]] = []

    def replays(
        ranks: int, changes: Sequence[Change], _fits: Mapping[tuple[str, bool], Fits]
    ) -> dict[int, tuple[float, float]]:
        asked.append((ranks, changes))
        return dict.fromkeys(range(len(changes)), (1.5, 1.6))

    study = studied("job", sizes(named(a=weak(2), b=weak(8))), [64], replays)
    step = study.sizes[-1].step_ns
    grown = latest(64) - latest(8)
    assert predicted(study, 64) == pytest.approx(1.5 * step + grown, rel=0.01)
    assert study.predictions[0].high_ns > 1.6 * step
    assert asked[-1] == (8, [Change({("all_reduce", 8): (64, False)}, 1.0)])


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        (named(a=weak(2)), "one size"),
        (named(a=at(1, 100, 64), b=at(4, 40, 100)), "neither"),
        (named(a=weak(1), b=at(2, 100)), "collectives of the largest size are not known"),
    ],
)
def test_why_nothing_is_predicted(runs: list[Named], why: str) -> None:
    study = studied("job", sizes(runs), [64])
    assert study.predictions == ()
    assert why in study.why


def test_one_size_with_collectives_bounds_their_growth() -> None:
    study = studied("job", sizes(named(a=weak(1), b=weak(2))), [16])
    assert any("Only one size has collectives" in doubt for doubt in study.doubts)
    (p,) = study.predictions
    assert p.low_ns < p.step_ns < p.high_ns


def test_all_of_it_from_simulated_gpus(tmp_path: Path) -> None:
    from benchmarks.scaling import FAMILIES, study
    from simulator import play

    family = next(f for f in FAMILIES if "behind" in f.name)
    made = study(family, 1, tmp_path, (2, 4), 16)
    true = play.true(family.make(1, 16), warm=10, steps=20).period_ns
    assert predicted(made, 16) == pytest.approx(true, rel=0.03)
    assert predicted(made, 16) > 1.005 * made.sizes[-1].step_ns
