"""What all figures are drawn with: their colours, axes and layout, and the table that stands beside each.

Figures are plotly specifications: plain data in light colours, no more of it than a screen can show. plotly reads
markup, links and templates in the texts that it draws: every text passes `drawn`, and no text of a run becomes part of
a template. Axes are numeric, with their labels as tick texts, so that no label is taken for a date.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from dlprof.plain import NBSP, plain
from dlprof.report import formatting, looks

ROWS = 200  # of a table
BARRED = 3  # rows of a table from which on its shares have bars
LANES = 64  # of a timeline, and lines of a figure

INK, MUTE, LINE, CARD, HOT = "#1d1f24", "#5d626d", "#e6e3dd", "#ffffff", "#a32a6f"
ON_DARK, ON_LIGHT = "#fffffe", "#16181c"  # text inside bars; the same in both themes
# Lines that stand for no category have colours that no category has.
SERIES = ("#33415c", "#b5651d", "#5f8f8b", "#8d7aa8", "#7d8597", "#6b705c")

# What each light colour becomes on a dark page. Categories have theirs in `words`.
DARK: Mapping[str, str] = {
    INK: "#eceef2",
    MUTE: "#a3a9b5",
    LINE: "#2f343d",
    CARD: "#1d2026",
    HOT: "#ec86bd",
    "#33415c": "#c3cbdc",
    "#b5651d": "#e39a57",
    "#5f8f8b": "#86bab5",
    "#8d7aa8": "#b8a5d6",
    "#7d8597": "#8f98aa",
    "#6b705c": "#a5ab90",
    **{c.light: c.dark for c in looks.DRAWN.values() if c.light != c.dark},
}

FONT = 'Inter, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'


@dataclass(frozen=True)
class Table:
    """Headings and rows of written cells; `numeric` says which columns are set flush right."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[bool, ...]
    note: str = ""
    shares: tuple[
        tuple[str, ...], ...
    ] = ()  # of each cell how many percent wide its bar is, "" without one; () for none


@dataclass(frozen=True)
class Figure:
    """One figure: what plotly draws (None for a mere table), what it shows in words, and the same as a table."""

    title: str
    label: str
    spec: dict[str, Any] | None
    table: Table
    legend: tuple[str, ...] = ()
    note: str = ""


def drawn(text: object, limit: int = 120) -> str:
    """Text for plotly to draw as it is."""
    return escape(plain(text, limit), quote=False)


def number(value: Any) -> float | None:
    """A finite number, or nothing."""
    if isinstance(value, (int, float)) and math.isfinite(value):
        return float(value)
    return None


def rounded(value: float | None, digits: int = 6) -> float | int | None:
    """Six digits place a point more exactly than a screen can, zoomed in as well; what is never zoomed needs four."""
    if value is None:
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def layout(height: int, left: int, **more: Any) -> dict[str, Any]:
    """Return the layout of a figure so many pixels high, with so many on the left for labels."""
    return {
        "height": height,
        "margin": {"l": left, "r": 20, "t": 8, "b": 28},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 12, "color": MUTE},
        "showlegend": False,
        "hoverlabel": {"bgcolor": CARD, "bordercolor": LINE, "font": {"family": FONT, "size": 12, "color": INK}},
        "separators": ".,",
        **more,
    }


def axis(unit: str = "", **more: Any) -> dict[str, Any]:
    """An axis that lies still; each of its numbers carries the unit."""
    return {
        "ticksuffix": NBSP + drawn(unit, 24) if unit else "",
        "gridcolor": LINE,
        "zeroline": False,
        "fixedrange": True,
        "ticks": "outside",
        "ticklen": 5,
        "tickcolor": "rgba(0,0,0,0)",
        "tickfont": {"size": 11.5, "color": MUTE},
        **more,
    }


def margin(labels: Iterable[str]) -> int:
    """Pixels that the longest label needs, from the mean width of a letter at this size."""
    longest = max((len(label) for label in labels), default=0)
    return min(max(16 + round(6.6 * longest), 48), 230)


def inside(colour: str) -> str:
    """Return the colour of text, light or dark, that stands out better on a background (WCAG relative luminance)."""

    def linear(hexadecimal: str) -> float:
        value = int(hexadecimal, 16) / 255
        return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4

    luminance = 0.2126 * linear(colour[1:3]) + 0.7152 * linear(colour[3:5]) + 0.0722 * linear(colour[5:7])
    # Equal contrast against white and against black lies at 0.18.
    return ON_LIGHT if luminance > 0.18 else ON_DARK


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """Return the first rows as a table of written cells; what is missing of a row or of the headings stays empty.

    Columns of numbers are set flush right, those of shares have bars where there are so many that bars tell them apart.
    """
    width = max([len(columns), *(len(row) for row in rows[:ROWS])], default=0)
    names = [*columns, *[""] * (width - len(columns))]
    values = [[*row, *[""] * (width - len(row))] for row in rows[:ROWS]]
    shown = tuple(tuple(formatting.cell(v, c) for v, c in zip(row, names, strict=True)) for row in values)
    numeric = tuple(i > 0 and _figures([row[i] for row in values]) for i in range(width))
    barred = [figures and formatting.suffix(name) == "share" for figures, name in zip(numeric, names, strict=True)]
    shares = [[_percent(v) if bar else "" for v, bar in zip(row, barred, strict=True)] for row in values]
    left = len(rows) - len(shown)
    return Table(
        tuple(formatting.header(c) for c in names),
        shown,
        numeric,
        f"{left:,} more rows are in result.json." if left > 0 else "",
        tuple(map(tuple, shares)) if len(rows) >= BARRED and any(barred) else (),
    )


def _figures(cells: Sequence[Any]) -> bool:
    """Say whether a column holds numbers, to be set flush right."""
    known = [cell for cell in cells if cell is not None and cell != ""]
    return bool(known) and all(isinstance(cell, int | float) and not isinstance(cell, bool) for cell in known)


def _percent(value: Any) -> str:
    share = number(value)
    return "" if share is None else f"{min(max(100 * share, 0.0), 100.0):g}"
