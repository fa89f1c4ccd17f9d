"""The time of each line of the functions that --lines named."""

from __future__ import annotations

import pandas as pd

from dlprof.analysis.engine import Frame, needs
from dlprof.analysis.host.stacks import line_times
from dlprof.analysis.panel import Picture
from dlprof.result import Panel
from dlprof.units import duration

# Functions whose lines are shown, and lines of each.
MOST_FUNCTIONS = 8
MOST_LINES = 50


_FUNCTION = ["role", "function", "file"]


def draw(line_times: Frame = needs(line_times)) -> list[Panel]:
    """Return the source of each function that --lines named, with the time of each line over all ranks."""
    ranks = line_times["rank"].nunique()
    lines = line_times.groupby([*_FUNCTION, "line", "source"], as_index=False)[["hits", "dur_ns"]].sum()
    functions = [part for _, part in lines.groupby(_FUNCTION)]
    functions.sort(key=lambda part: -int(part["dur_ns"].sum()))
    return [_lines_panel(part, ranks) for part in functions[:MOST_FUNCTIONS]]


def _lines_panel(part: pd.DataFrame, ranks: int) -> Panel:
    total, left = int(part["dur_ns"].sum()), len(part) - MOST_LINES
    role, function, file = part[_FUNCTION].iloc[0]
    shown = part.nlargest(MOST_LINES, "dur_ns").sort_values("line")
    rows = tuple(
        (
            int(line),
            # Blank is a line that never ran: most are no statements.
            *((int(hits), int(ns), float(ns / hits), float(ns / total) if total else "") if hits else ("",) * 4),
            # A browser would drop the indentation.
            text[: len(text) - len(text.lstrip())].expandtabs(4).replace(" ", "\u00a0") + text.strip(),
        )
        for line, hits, ns, text in shown[["line", "hits", "dur_ns", "source"]].itertuples(index=False)
    )
    where = "in the loader's workers" if role == "worker" else "in the rank"
    note = f"{file}: {duration(total)} together{f', over {ranks} ranks' if ranks > 1 else ''}."
    if left > 0:
        note += f" {left} lines that took less are left out."
    columns = ("line", "hits", "time_ns", "a hit_ns", "share", "source")
    return Panel("table", f"Line by line: {function}, {where}", rows, columns, note=note)


PICTURE = Picture(draw)
