"""Runs by size and the step on more ranks: efficiency, collectives, lateness, and what is predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pytest
from msgspec.structs import replace

from dlprof.analysis.communication.bandwidth import bus_factor
from dlprof.analysis.scaling.predictions import (
    COLUMNS,
    Change,
    Fits,
    Lateness,
    fitted,
    grown,
    predicted_ns,
    replays,
    replays_of,
    studied,
    uncertainty,
)
from dlprof.analysis.scaling.study import Named, sizes
from dlprof.result import Fact, ForeignLoad, Result, TimePart
from dlprof.result.scale import TRANSFER, WAITING, Fit, Scaling, Study, Transfers
from tests.fixtures import runs, traces
from tests.fixtures.scaling import MS, at, latest, named, transfer, weak


def test_weak_scaling() -> None:
    found = sizes(named(four=at(4, 125), one=at(1, 100), two=at(2, 110)))
    assert (found.mode, found.left_out, found.doubts) == ("weak", (), ())
    assert [s.ranks for s in found.sizes] == [1, 2, 4]
    assert [s.efficiency for s in found.sizes] == pytest.approx([1, 100 / 110, 100 / 125])
    assert [s.speedup for s in found.sizes] == pytest.approx([1, 2 / 1.1, 4 / 1.25])
    assert [s.joules for s in found.sizes] == pytest.approx([100 * 0.1 / 32, 100 * 0.11 / 32, 100 * 0.125 / 32])
    assert found.sizes[1].mfu == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("mode", "of", "speedup", "efficiency", "doubt"),
    [
        ("strong", (at(1, 100, 64), at(4, 40, 64)), 2.5, 2.5 / 4, None),
        ("mixed", (at(1, 100, 64), at(4, 40, 100)), None, None, "neither"),
        # Without samples each rank is taken to do the same.
        ("", (at(1, 100, 0), at(2, 125, 0)), None, 0.8, "How many samples"),
    ],
)
def test_other_modes(
    mode: str, of: tuple[Result, Result], speedup: float | None, efficiency: float | None, doubt: str | None
) -> None:
    found = sizes(named(one=of[0], more=of[1]))
    assert found.mode == mode
    assert speedup is None or found.sizes[1].speedup == pytest.approx(speedup)
    assert efficiency is None or found.sizes[1].efficiency == pytest.approx(efficiency)
    assert found.doubts == () if doubt is None else doubt in found.doubts[0]


def test_runs_of_one_size_count_together_with_what_they_differ_by() -> None:
    found = sizes(named(a=at(2, 100), b=at(2, 110), c=at(2, 120)))
    (size,) = found.sizes
    assert size.runs == ("a", "b", "c")
    assert size.step_ns == pytest.approx(110 * MS)
    assert size.noise_ns == pytest.approx(10 * MS / 3**0.5)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (at(2, 100, facts=(Fact("Precision", "autocast dtype", "bfloat16"),)), "autocast dtype none → bfloat16"),
        (replace(at(2, 100), window=None), "no steady step"),
        (replace(at(2, 100), run=replace(at(2, 100).run, command=("python", "other.py"))), "another script"),
        (replace(at(2, 100), run=replace(at(2, 100).run, missing_ranks=(1,))), "1 rank of 2 is missing"),
        (at(2, 100, 48), "other samples"),
    ],
)
def test_what_is_no_size_of_the_job_is_told_and_not_averaged(other: Result, why: str) -> None:
    found = sizes(named(one=at(1, 100), two=at(2, 110), other=other))
    assert [s.ranks for s in found.sizes] == [1, 2]
    assert found.sizes[1].step_ns == pytest.approx(110 * MS)
    ((name, said),) = found.left_out
    assert name == "other"
    assert why in said


def test_what_follows_from_the_size_is_no_other_setting() -> None:
    one = at(1, 100, facts=(Fact("Optimizer", "lr", "0.1"), Fact("Loader", "batches", "64")))
    more = (Fact("Optimizer", "lr", "0.2"), Fact("Loader", "batches", "32"), Fact("Model", "ddp.bucket_cap_mb", "25"))
    assert sizes(named(one=one, two=at(2, 110, facts=more))).left_out == ()
    # Of two sizes with more than one rank each, other buckets are another setting.
    other = (*more[:2], Fact("Model", "ddp.bucket_cap_mb", "1"))
    found = sizes(named(two=at(2, 110, facts=more), four=at(4, 110, facts=other)))
    assert "bucket_cap_mb 25 → 1" in found.left_out[0][1]


def test_exposed_communication_is_transfer_and_waiting() -> None:
    parts = tuple(
        TimePart(r, c, ns * MS, 0.0) for r in (0, 1) for c, ns in (("computation", 80), ("communication", 30))
    )
    (size,) = sizes(named(two=at(2, 110, time=parts, scaling=Scaling(wait_ns=12 * MS)))).sizes
    assert size.parts == pytest.approx({"computation": 80 * MS, TRANSFER: 18 * MS, WAITING: 12 * MS})


def test_foreign_load_and_nothing_at_all() -> None:
    load = ForeignLoad("h", 2.0, 2.0, 1.0, disturbs=True)
    found = sizes(named(one=replace(at(1, 100), foreign_load=load)), [("broken", "cannot be read")])
    assert "outside the job" in found.doubts[0]
    assert found.left_out == (("broken", "cannot be read"),)
    assert sizes([]).sizes == ()


# -- collectives of a known model, fitted and on more ranks

START, HOP, BYTE = 20_000.0, 2_000.0, 0.01  # ns; ns a byte: 100 GB/s
KEY = ("all_reduce", False)


def rows(
    ranks: int, hops: Literal["ring", "tree"] = "ring", sizes: tuple[float, ...] = (4e3, 1e6, 64e6), hosts: int = 1
) -> list[Transfers]:
    far = ranks - 1 if hops == "ring" else math.log2(ranks)
    took = [START + HOP * far + BYTE * bus_factor("all_reduce", ranks) * size for size in sizes]
    return [Transfers("all_reduce", ranks, hosts, 3.0, ns, size) for ns, size in zip(took, sizes, strict=True)]


@pytest.mark.parametrize("hops", ["ring", "tree"])
def test_the_model_is_found_again_and_goes_on(hops: Literal["ring", "tree"]) -> None:
    fits = fitted([*rows(2, hops), *rows(4, hops), *rows(8, hops)])[KEY]
    best = fits.best
    assert best.hops == hops
    assert [best.start_ns, best.hop_ns, best.ns_per_byte] == pytest.approx([START, HOP, BYTE])
    assert best.off < 1e-6
    assert fits.other is None  # the measurements tell the two apart
    (true,) = rows(256, hops, (1e6,))
    assert fits.predicted_ns(1e6, 256) == pytest.approx((true.transfer_ns, true.transfer_ns))


def test_one_number_of_ranks_leaves_the_growth_open() -> None:
    fits = fitted(rows(4))[KEY]
    low, high = fits.predicted_ns(4e3, 64)
    assert fits.best.hops == ""
    # From a start that does not grow to one that is all hops.
    start = START + 3 * HOP
    assert [low, high] == pytest.approx([start + 79, start * 63 / 3 + 79], rel=0.01)


def test_noise_keeps_both_forms_possible() -> None:
    noisy = [
        Transfers(r.collective, r.ranks, 1, r.count, r.transfer_ns * (1.1 if r.ranks == 4 else 1.0), r.bytes)
        for n in (2, 4, 8)
        for r in rows(n)
    ]
    assert fitted(noisy)[KEY].other is not None


def test_several_hosts_are_fitted_apart() -> None:
    fits = fitted([*rows(2), *rows(8), *(Transfers("all_reduce", 16, 2, 1.0, 9e6, 1e6),)])
    assert set(fits) == {KEY, ("all_reduce", True)}
    assert fits[KEY].best.off < 1e-6


def test_collectives_of_unknown_size_show_their_start() -> None:
    fits = fitted([Transfers("barrier", n, 1, 1.0, START + HOP * (n - 1)) for n in (2, 4, 8)])
    assert predicted_ns(fits["barrier", False].best, None, 16) == pytest.approx(START + 15 * HOP)
    assert predicted_ns(fitted(rows(2))[KEY].best, 1e6, 1) == 0.0  # alone nothing is exchanged


def test_groups_that_have_as_many_ranks_at_every_size_stay() -> None:
    tensor = [Transfers("all_gather", 4, 1, 1.0, 1e5, 1e6)]
    before = {8: [*rows(8), *tensor]}
    now = [*rows(16), *tensor, Transfers("reduce_scatter", 4, 1, 1.0, 1e5, 1e6)]
    made = grown(now, before, 16, 64)
    # The group of 4 that no other size has is a quarter of the job.
    assert made.ranks == (64, 64, 64, 4, 16)
    fits = fitted([*rows(8), *now])
    assert made.step_ns(fits)[0] > grown(now, before, 16, 16).step_ns(fits)[0]


def test_a_collective_that_took_no_time_is_none() -> None:
    empty = Transfers("barrier", 8, 1, 1.0, 0.0)
    fits = fitted([*rows(4), *rows(8), empty])
    assert ("barrier", False) not in fits
    with_it, without = (grown(r, {}, 8, 16).step_ns(fits) for r in ([*rows(8), empty], rows(8)))
    assert with_it == without


# -- a replay of steps with a known answer

STEP, GEMM, REDUCE = 1_000_000, 600_000, 200_000
# 1 µs for every other rank.
FITS = {("all_reduce", False): Fits(Fit("all_reduce", 0.0, 1_000.0, 0.0, "ring", 0.0))}


def job() -> dict[str, Any]:
    """Steps of 1 ms: a kernel, the all-reduce of 101 ranks that waits for it, and a host that waits for both."""
    events: list[Any] = []
    for n in range(5):
        t = n * STEP
        events += [traces.step(n, t, STEP)]
        events += traces.launched("gemm", t + 3_000, t + 100_000, GEMM, 10 * n + 2)
        events += traces.launched(
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            t + 10_000, t + 100_000 + GEMM, REDUCE, 10 * n + 3,
        )  # fmt: skip
        events += [traces.call("cudaStreamSynchronize", t + 20_000, 80_000 + GEMM + REDUCE, 10 * n + 4)]
    return traces.trace(*events, world_size=101)


def ratio(folder: Path, change: Change) -> float:
    frame = replays((Change({}), change), FITS, False, runs.rank_of(folder, job()))
    assert tuple(frame.columns) == COLUMNS
    by = frame[frame["other"] == 0].set_index("change")["ratio"]
    assert by[0] == pytest.approx(1.0)
    return float(by[1])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (Change({("all_reduce", 101): (301, False)}), 1.2),
        (Change({("all_reduce", 4): (301, False)}), 1.0),
        # Of the 200 µs of an all-reduce 100 are its transfer, and the rest is waiting.
        (Change({}, compute=0.5), 1 - 0.3 - 0.05),
    ],
    ids=["a group of more ranks", "other groups stay", "less work is less waiting too"],
)
def test_a_step_is_longer_by(tmp_path: Path, change: Change, expected: float) -> None:
    assert ratio(tmp_path, change) == pytest.approx(expected, abs=0.01)


def test_a_rank_without_a_device_or_a_run_has_no_replay(tmp_path: Path) -> None:
    made = traces.trace(traces.step(1, 0, STEP), traces.op("aten::mm", 0, STEP), world_size=1)
    assert isinstance(frame := replays((Change({}),), FITS, False, runs.rank_of(tmp_path, made)), pd.DataFrame)
    assert len(frame) == 0
    assert replays_of({})(4, (Change({}),), FITS) == {}


# -- how late the latest of n ranks is


def quantiles(values: np.ndarray) -> tuple[float, ...]:
    pieces = np.array_split(np.sort(values), min(64, len(values))) if len(values) else ()
    return tuple(float(piece.mean()) for piece in pieces)


DRAW = np.random.default_rng(1)
EXPONENTIAL, NORMAL, UNIFORM = (DRAW.exponential(1, 20_000), DRAW.normal(0, 1, 20_000), DRAW.uniform(0, 1, 20_000))
# Harter: Expected Values of Normal Order Statistics, Biometrika 48, 1961.
HARTER = {2: 0.5642, 4: 1.0294, 8: 1.4236, 64: 2.3437}
ONE_SLOW_KIND = np.array([0.0] * 750 + [100.0] * 250)


@pytest.mark.parametrize(
    ("values", "ranks", "tail", "known"),
    [
        *((EXPONENTIAL, n, True, sum(1 / k for k in range(2, n + 1))) for n in (2, 8, 64, 1024)),  # harmonic numbers
        *((NORMAL, n, True, late) for n, late in HARTER.items()),
        (UNIFORM, 1000, False, 0.5),  # bounded without a tail
        (UNIFORM, 3, True, 3 / 4 - 1 / 2),
        *((ONE_SLOW_KIND, n, True, 75.0) for n in (64, 4096)),  # it saturates
        (np.empty(0), 8, True, 0.0),
        (UNIFORM, 1, True, 0.0),
    ],
)
def test_the_latest_of_single_steps(values: np.ndarray, ranks: int, tail: bool, known: float) -> None:
    found = Lateness((), quantiles(values)).mean_of_latest(ranks, tail=tail)
    assert found == pytest.approx(known, rel=0.1 if tail and values is not ONE_SLOW_KIND else 0.05)


def test_a_few_uneven_ranks_are_taken_to_be_normally_distributed() -> None:
    uneven = quantiles(np.random.default_rng(5).normal(0.0, 1.0, 16))
    made = Lateness(uneven, ())
    assert made.mean_of_latest(64) == pytest.approx(2.3437 * made.spread_ns, rel=0.03)
    assert made.mean_of_latest(64, tail=False) == pytest.approx(max(uneven) - np.mean(uneven), rel=0.1)
    assert uncertainty(9) == pytest.approx(0.25)


def test_many_ranks_show_their_distribution_and_both_kinds_add_up() -> None:
    made = Lateness(quantiles(np.random.default_rng(6).uniform(0.0, 1.0, 1024)), ())
    assert made.mean_of_latest(4096) == pytest.approx(0.5, rel=0.03)
    # The sum of two normal draws of 3 and 4 is one of 5.
    assert Lateness(quantiles(3 * NORMAL), quantiles(4 * NORMAL)).mean_of_latest(8) == pytest.approx(
        5 * HARTER[8], rel=0.05
    )


# -- the step on more ranks


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


@pytest.mark.slow
def test_all_of_it_from_simulated_gpus(tmp_path: Path) -> None:
    from benchmarks.scaling import FAMILIES, study
    from simulator import play

    family = next(f for f in FAMILIES if "behind" in f.name)
    made = study(family, 1, tmp_path, (2, 4), 8)
    true = play.true(family.make(1, 8), warm=10, steps=20).period_ns
    assert predicted(made, 8) == pytest.approx(true, rel=0.03)
    assert predicted(made, 8) > 1.005 * made.sizes[-1].step_ns
