"""Fits of collectives that were made by a known model, and how their groups grow."""

from __future__ import annotations

import math
from typing import Literal

import pytest

from dlprof.analysis.communication.bandwidth import bus_factor
from dlprof.analysis.scaling.transfers import fitted, grown, predicted_ns
from dlprof.result.scale import Transfers

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


def test_alone_nothing_is_exchanged() -> None:
    assert predicted_ns(fitted(rows(2))[KEY].best, 1e6, 1) == 0.0


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
