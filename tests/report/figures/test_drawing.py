"""What all figures share: tables, and text that stands out."""

from __future__ import annotations

from dlprof.plain import NBSP
from dlprof.report import looks
from dlprof.report.figures import drawing, shapes
from dlprof.result import Panel


def test_columns_of_figures_are_told_from_columns_of_words() -> None:
    rows = (("7", 7, "5 of 8", "", None, True), ("1", 1.5, "0 of 8", "", 4, False))
    assert shapes.panel(Panel("table", "t", rows)).table.numeric == (False, True, False, False, True, False)


def test_long_tables_are_cut_with_a_word_and_cells_carry_units() -> None:
    panel = Panel(
        "table",
        "t",
        tuple((f"r{i}", 1.5e6, 0.25, 2048) for i in range(drawing.ROWS + 30)),
        ("name", "mean_ns", "x_share", "n_bytes"),
    )
    table = shapes.panel(panel).table
    assert len(table.rows) == drawing.ROWS
    assert table.note == "30 more rows are in result.json."
    assert table.columns == ("name", "mean", "x share", "n")
    assert [c.replace(NBSP, " ") for c in table.rows[0]] == ["r0", "1.50 ms", "25 %", "2.05 kB"]
    assert table.numeric == (False, True, True, True)


def test_text_on_a_bar_stands_out_in_both_themes() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for look in looks.DRAWN.values():
        for background in (look.light, look.dark):
            low, high = sorted((luminance(drawing.inside(look.light)), luminance(background)))
            assert (high + 0.05) / (low + 0.05) >= 3, look.name  # WCAG 2.1, 1.4.11


def test_columns_of_shares_have_bars_as_wide_as_they_are() -> None:
    rows = (("a", 0.31, 1.2e7, 1.4), ("b", 0.0004, 3, ""), ("c", None, None, 0))
    columns = ("name", "x_share", "takes_ns", "of it_share")
    table = shapes.panel(Panel("table", "t", rows, columns)).table
    assert table.columns == ("name", "x share", "takes", "of it share")
    assert table.numeric == (False, True, True, True)
    assert [[cell.replace(NBSP, " ") for cell in row[1:]] for row in table.rows] == [
        ["31 %", "12.0 ms", "140 %"],
        ["< 0.1 %", "3 ns", ""],
        ["—", "—", "0 %"],
    ]
    assert [row[1] for row in table.shares] == ["31", "0.04", ""]
    assert [row[3] for row in table.shares] == ["100", "", "0"]
    assert {row[2] for row in table.shares} == {""}
    assert shapes.panel(Panel("table", "t", rows[:2], columns)).table.shares == ()


def test_a_factor_is_written_as_one() -> None:
    table = shapes.panel(Panel("table", "t", (("a", 1.438),), ("change", "speed_times"))).table
    assert (table.columns, table.rows) == (("change", "speed"), (("a", f"1.44{NBSP}×"),))
