"""A measurement in words: its fastest, its fits, its table, and what was slow, wrong or not measured."""

from __future__ import annotations

from dlprof.report.compare import summary as summaries
from dlprof.report.compare.bandwidth import summary
from dlprof.result.bandwidth import Bandwidth, Fit, Pair, Timing

FAST = Timing("all_reduce", 8_000_000, 2_000_000, 1e6, 0.9e6, 1.5e6, 20, 1, True)
SMALL = Timing("all_reduce", 1_000, 250, 2e4, 1.9e4, 2.1e4, 20, 50, True)
FIT = Fit("all_reduce", 1e-5, 1 / 7.7e9, 1e-6, 0.1 / 7.7e9, 0.05)


def text(*timings: Timing, width: int = 88, **more: object) -> str:
    of = Bandwidth("nccl", ("n1", "n1", "n2", "n2"), "H100", "float32", 1, timings, **more)  # type: ignore[arg-type]
    return " ".join(summaries.text(summary(of), width).split())


def test_the_fastest_and_the_fits() -> None:
    said = text(SMALL, FAST, fits=(FIT,), versions={"torch": "2.13", "nccl": "2.27.5"})
    assert "nccl · 4 ranks on 2 hosts · H100 · float32 · torch 2.13, nccl 2.27.5" in said
    assert "all_reduce reaches 12 GB/s on the bus, with 8 MB." in said
    assert "all_reduce 10.0 µs ± 1.00 µs, 7.70 GB/s ± 10 % (times 5.0 % off)" in said


def test_a_row_has_what_nccl_tests_prints() -> None:
    said = text(SMALL, FAST)
    assert "collective size count time spread × algbw/s busbw/s" in said
    assert "all_reduce 8 MB 2,000,000 1.00 ms 0.90–1.50 8 GB 12 GB" in said


def test_it_fits_a_terminal_of_eighty_columns() -> None:
    of = Bandwidth(
        "gloo",
        ("n1", "n1"),
        "",
        "float32",
        1,
        (Timing("reduce_scatter", 268_435_456, 67_108_864, 1.5e8, 1.4e8, 1.6e8, 20, 1, True),),
    )
    lines = summaries.text(summary(of), 80).splitlines()
    assert any(line.startswith("  reduce_scatter  268.4 MB  67,108,864") for line in lines)


def test_collectives_stand_together() -> None:
    other = Timing("send_recv", 1_000, 250, 1e4, 1e4, 1e4, 20, 1, True)
    rows = summary(Bandwidth("gloo", ("a", "a"), "", "float32", 1, (SMALL, other, FAST))).table.rows
    assert [row[0] for row in rows] == ["all_reduce", "all_reduce", "send_recv"]


def test_what_was_wrong_slow_or_missing_is_said() -> None:
    wrong = Timing("all_gather", 8, 2, 1e3, 1e3, 1e3, 20, 1, False)
    lacking = Timing("all_to_all", 8, why="gloo does not support alltoall")
    local = [Pair((0, 1), 1_000_000, 1e6), Pair((2, 3), 1_000_000, 4e6)]
    of = Bandwidth(
        "gloo", ("n1", "n1", "n2", "n2"), "", "float32", 1, (wrong, lacking), tuple(local), state="out_of_time",
        warnings=("all_gather of 8 bytes gave a wrong result",),
    )  # fmt: skip
    made = summary(of)
    said = " ".join(summaries.text(made, 88).split())
    assert not made.good
    assert "WRONG" in said
    assert "gloo does not support alltoall" in said
    assert "rank 2 (n2) and rank 3 (n2) exchange at 250 MB/s, 4.00 × as long as the median of like pairs" in said
    assert "The time was up before all sizes were measured." in said


def test_nothing_measured() -> None:
    made = summary(Bandwidth("gloo", ("a", "b"), "", "float32", 1, (Timing("all_reduce", 8, why="no"),)))
    assert made.headline == "Nothing could be measured."
