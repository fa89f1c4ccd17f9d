"""A measurement is read back as it is; its bandwidths are nccl-tests', and it knows slow pairs of ranks."""

from __future__ import annotations

import pytest

from dlprof.errors import DlprofError
from dlprof.result.bandwidth import Bandwidth, Fit, Pair, Timing, bus_factor, from_json, to_json

TIMING = Timing("all_reduce", 8_000_000, 2_000_000, 1e6, 0.9e6, 1.3e6, 20, 1, True)
FOUR = Bandwidth("gloo", ("a", "a", "b", "b"), "", "float32", 1, (TIMING, Timing("all_to_all", 8, why="it cannot")))


@pytest.mark.parametrize(
    ("collective", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 1.75),
        ("all_gather", 4, 0.75),
        ("all_to_all", 4, 0.75),
        ("broadcast", 8, 1),
        ("send_recv", 8, 1),
    ],
)
def test_the_factors_are_those_of_nccl_tests(collective: str, ranks: int, factor: float) -> None:
    assert bus_factor(collective, ranks) == factor


def test_bandwidths_of_a_timing() -> None:
    assert TIMING.algbw == pytest.approx(8e9)
    assert TIMING.busbw(4) == pytest.approx(12e9)
    assert FOUR.timings[1].busbw(4) is None


def test_it_is_read_back() -> None:
    fit = Fit("all_reduce", 1e-5, 1e-9, None, None, 0.1)
    whole = Bandwidth("nccl", ("a", "b"), "H100", "float32", 1, (TIMING,), (Pair((0, 1), 8, 1e3),), (fit,))
    assert from_json(to_json(whole)) == whole


def test_one_file_for_each_backend_and_shape() -> None:
    assert FOUR.file == "bandwidth-gloo-4-ranks-2-hosts.json"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 2}, "format 2; this dlprof reads format 1"),
        ({"timings": [{"collective": "all_reduce", "bytes": 8, "count": 2, "ns": -1.0}]}, "impossible"),
        ({"timings": [{"collective": "all_reduce", "bytes": 8, "count": 2, "ns": 1e300}]}, "impossible"),
        ({"timings": 3}, "not what `dlprof bandwidth` writes"),
        ({"pairs": [{"ranks": [0, 9], "bytes": 8, "ns": 1.0}]}, "none of its own"),
    ],
)
def test_what_is_none_is_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(DlprofError, match=says):
        from_json({**to_json(FOUR), **change})


@pytest.mark.parametrize("data", [None, [], {}, {"format": 1}])
def test_other_files_are_refused(data: object) -> None:
    with pytest.raises(DlprofError, match="no file of"):
        from_json(data)


def pairs(**slow: float) -> Bandwidth:
    """Return all pairs of four ranks on two hosts: 1 ms within a host and 4 ms between two, unless named "r0_2"."""
    made = [
        Pair((a, b), 1 << 20, slow.get(f"r{a}_{b}", 1e6 if a // 2 == b // 2 else 4e6))
        for a in range(4)
        for b in range(a + 1, 4)
    ]
    return Bandwidth("gloo", FOUR.hosts, "", "float32", 1, (TIMING,), tuple(made))


def test_a_pair_is_held_against_those_like_it() -> None:
    assert pairs().slow_pairs == ()
    ((pair, factor),) = pairs(r1_2=9e6).slow_pairs
    assert (pair.ranks, factor) == ((1, 2), 2.25)
