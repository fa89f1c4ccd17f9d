"""Runs by size: efficiency, mode, and which runs belong to no size."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from dlprof.analysis.scaling.study import sizes
from dlprof.result import Fact, ForeignLoad, Result, TimePart
from dlprof.result.scale import TRANSFER, WAITING, Scaling
from tests.fixtures.scaling import MS, at, named


def test_weak_scaling() -> None:
    found = sizes(named(four=at(4, 125), one=at(1, 100), two=at(2, 110)))
    assert (found.mode, found.left_out, found.doubts) == ("weak", (), ())
    assert [s.ranks for s in found.sizes] == [1, 2, 4]
    assert [s.efficiency for s in found.sizes] == pytest.approx([1, 100 / 110, 100 / 125])
    assert [s.speedup for s in found.sizes] == pytest.approx([1, 2 / 1.1, 4 / 1.25])
    assert [s.joules for s in found.sizes] == pytest.approx([100 * 0.1 / 32, 100 * 0.11 / 32, 100 * 0.125 / 32])
    assert found.sizes[1].mfu == pytest.approx(0.4)


def test_strong_scaling() -> None:
    found = sizes(named(one=at(1, 100, 64), four=at(4, 40, 64)))
    assert found.mode == "strong"
    assert [found.sizes[1].speedup, found.sizes[1].efficiency] == pytest.approx([2.5, 2.5 / 4])


def test_batches_of_neither_kind() -> None:
    found = sizes(named(one=at(1, 100, 64), four=at(4, 40, 100)))
    assert found.mode == "mixed"
    assert "neither" in found.doubts[0]


def test_without_samples_each_rank_is_taken_to_do_the_same() -> None:
    found = sizes(named(one=at(1, 100, 0), two=at(2, 125, 0)))
    assert found.mode == ""
    assert found.sizes[1].efficiency == pytest.approx(0.8)
    assert "How many samples" in found.doubts[0]


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
