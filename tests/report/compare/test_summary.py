"""A verdict, a table and figures: for any width of a terminal, and as a page that runs nothing of anybody's."""

from __future__ import annotations

import pytest

from dlprof.report.compare.summary import Summary, page, text
from dlprof.report.terminal import columns
from dlprof.result import Panel

TABLE = Panel(
    "table",
    "The runs",
    (("1 fp32", 100.0, 5e7, "", None), ("2 bf16", 150.5, 3e7, "precision fp32 → bf16 " * 6, None)),
    ("run", "samples a second", "step_ns", "what changed", "J a sample"),
    note="A note.",
)
BARS = Panel("bars", "By run", (("1", 100.0), ("2", 150.5)), unit="samples/s")
SUMMARY = Summary(
    "train.py",
    "The last run is 1.50 × as fast.",
    TABLE,
    second="By bf16.",
    lede="train.py · 2 runs",
    notices=("c is left out: broken",),
    tiles=(("150", "samples a second"),),
    panels=(BARS,),
    bars="samples a second",
)
HOSTILE = "</script><script>alert(1)</script>\x1b[2J\u202e"


@pytest.mark.parametrize("width", [40, 60, 88, 110, 200])
def test_lines_fit(width: int) -> None:
    said = text(SUMMARY, width)
    assert max(map(columns, said.split("\n"))) <= width
    for part in ("1.50 ×", "By bf16.", "! c is left out", "1 fp32", "150", "bf16", "A note."):
        assert part in said
    assert "J a sample" not in said  # nothing is known of it


def test_bars_are_as_long_as_their_values() -> None:
    lines = [line for line in text(SUMMARY, 110).split("\n") if "█" in line]
    assert [line.count("█") for line in lines] == [8, 12]


def test_colour_adds_codes_and_nothing_else() -> None:
    import re

    assert re.sub(r"\x1b\[[0-9;]*m", "", text(SUMMARY, 88, colour=True)) == text(SUMMARY, 88)


def test_the_page_holds_it_all() -> None:
    made = page(SUMMARY)
    for part in ("<title>train.py", "1.50", "c is left out: broken", "By run", "The runs", "plotly", "precision fp32"):
        assert part in made
    assert "http-equiv" in made


def test_hostile_texts_stay_texts() -> None:
    table = Panel("table", HOSTILE, ((HOSTILE, 1.0),), (HOSTILE, "x"))
    hostile = Summary(HOSTILE, HOSTILE, table, HOSTILE, HOSTILE, (HOSTILE,), ((HOSTILE, HOSTILE),))
    made = page(hostile)
    assert "<script>alert" not in made
    assert "\x1b" not in made
    said = text(hostile, 80)
    assert "\x1b" not in said
    assert "\u202e" not in said


def test_a_summary_without_rows() -> None:
    empty = Summary("x", "Nothing.", Panel("table", "The runs", ()))
    assert text(empty) == "  Nothing.\n"
    assert "Nothing." in page(empty)
