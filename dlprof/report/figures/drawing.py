"""What all figures share: colours, axes, bars and layout, and the table of the same values.

Figures are plotly specifications: plain data in light colours, no more of it than a screen can show. plotly interprets
markup, links and templates in texts: every text passes `drawn`, and no text of a run becomes part of a template. Axes
are numeric, with their labels as tick texts, so that no label is taken for a date.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from msgspec import Struct

from dlprof.plain import NBSP, plain
from dlprof.report import formatting, looks

ROWS = 200  # of a table
BARRED = 3  # rows from which on the shares of a table have bars
LANES = 64  # of a timeline, and lines of a figure

INK, MUTE, LINE, CARD, HOT = "#1d1f24", "#5d626d", "#e6e3dd", "#ffffff", "#a32a6f"
ON_DARK, ON_LIGHT = "#fffffe", "#16181c"  # text inside bars; the same in both themes
NAMED: Mapping[str, str] = {"ink": INK, "mute": MUTE, "line": LINE, "card": CARD, "hot": HOT}  # in the style sheet
# Lines of no category have colours that no category has.
SERIES = ("#33415c", "#b5651d", "#5f8f8b", "#8d7aa8", "#7d8597", "#6b705c")

# What each light colour becomes on a dark page.
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


class Table(Struct, frozen=True):
    """Headings and rows of written cells; `numeric`: which columns are aligned to the right."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[bool, ...]
    note: str = ""
    shares: tuple[tuple[str, ...], ...] = ()  # width of each cell's bar in percent, "" without one; (): no bars


class Figure(Struct, frozen=True):
    """One figure: its description, what plotly draws (None: only a table), and the same values as a table."""

    label: str
    spec: dict[str, Any] | None
    table: Table
    legend: tuple[str, ...] = ()  # categories
    note: str = ""
    title: str = ""


def drawn(text: object, limit: int = 120) -> str:
    """Return text that plotly draws literally."""
    return escape(plain(text, limit), quote=False)


def number(value: Any) -> float | None:
    """Return a finite number as float; None for anything else."""
    if isinstance(value, (int, float)) and math.isfinite(value):
        return float(value)
    return None


def rounded(value: float | None, digits: int = 6) -> float | int | None:
    """Round to significant digits: six are more exact than a screen, also zoomed in; without zoom four do."""
    if value is None:
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def layout(height: int, left: int, **more: Any) -> dict[str, Any]:
    """Return the layout of a figure; `height` and `left`, the margin for labels, in pixels."""
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
    """Return an axis without zoom, whose tick labels carry the unit."""
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


def lanes(labels: Sequence[str], **more: Any) -> dict[str, Any]:
    """Return the y axis of horizontal bars at 0, 1, 2, … with their labels; 0 is on top."""
    ticks = {"tickvals": list(range(len(labels))), "ticktext": [drawn(t, 40) for t in labels]}
    return axis(**{"autorange": "reversed", **ticks, "showgrid": False, **more})


def bars(x: Sequence[Any], y: Sequence[Any], colour: Any, hover: Iterable[str], edge: float = 0, **more: Any) -> Any:
    """Return a trace of horizontal bars; `colour`: of all or of each, `edge`: width of their outline."""
    return {
        "type": "bar",
        "orientation": "h",
        "y": y,
        "x": x,
        "marker": {"color": colour, "line": {"color": CARD, "width": edge}},
        "hoverinfo": "text",
        "hovertext": [drawn(text, 180) for text in hover],
        **more,
    }


def bar_text(texts: Sequence[str], colour: Any, size: float = 11, anchor: str = "middle") -> dict[str, Any]:
    """Return the part of a trace that writes a text inside each bar."""
    return {
        "text": texts,
        "textposition": "inside",
        "insidetextanchor": anchor,
        "textangle": 0,
        "insidetextfont": {"size": size, "color": colour},
    }


def margin(labels: Iterable[str]) -> int:
    """Return the pixels that the longest label needs, from the mean width of a letter at this size."""
    longest = max((len(label) for label in labels), default=0)
    return min(max(16 + round(6.6 * longest), 48), 230)


def inside(colour: str) -> str:
    """Return the colour of text, light or dark, with more contrast on a background (WCAG relative luminance)."""

    def linear(hexadecimal: str) -> float:
        value = int(hexadecimal, 16) / 255
        return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4

    luminance = 0.2126 * linear(colour[1:3]) + 0.7152 * linear(colour[3:5]) + 0.0722 * linear(colour[5:7])
    # At 0.18, white and black have equal contrast.
    return ON_LIGHT if luminance > 0.18 else ON_DARK


def more(left: int, what: str) -> str:
    """Say how many are left out of a figure or a table; "" where none is."""
    return f"{left:,} more {what} are in result.json." if left > 0 else ""


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], numeric: Sequence[bool] = ()) -> Table:
    """Return the first ROWS rows as a table of formatted cells; short rows and headings are filled with "".

    Columns of numbers, or those of `numeric`, are set flush right; columns of shares have bars from BARRED rows on.
    """
    width = max([len(columns), *(len(row) for row in rows[:ROWS])], default=0)
    names = [*columns, *[""] * (width - len(columns))]
    values = [[*row, *[""] * (width - len(row))] for row in rows[:ROWS]]
    for i in (i for i, name in enumerate(names) if name == "kernel"):
        for row, short in zip(values, formatting.kernels([str(row[i]) for row in values]), strict=True):
            row[i] = short
    shown = tuple(tuple(formatting.cell(v, c) for v, c in zip(row, names, strict=True)) for row in values)
    figures = [i > 0 and _figures([row[i] for row in values]) for i in range(width)]
    barred = [of and formatting.suffix(name) == "share" for of, name in zip(figures, names, strict=True)]
    shares = [[_percent(v) if bar else "" for v, bar in zip(row, barred, strict=True)] for row in values]
    return Table(
        tuple(formatting.header(c) for c in names),
        shown,
        tuple(numeric or figures),
        more(len(rows) - len(shown), "rows"),
        tuple(map(tuple, shares)) if len(rows) >= BARRED and any(barred) else (),
    )


def _figures(cells: Sequence[Any]) -> bool:
    """Return whether a column holds nothing but numbers."""
    known = [cell for cell in cells if cell is not None and cell != ""]
    return bool(known) and all(isinstance(cell, int | float) and not isinstance(cell, bool) for cell in known)


def _percent(value: Any) -> str:
    share = number(value)
    return "" if share is None else f"{min(max(100 * share, 0.0), 100.0):g}"
