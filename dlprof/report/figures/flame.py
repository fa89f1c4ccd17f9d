"""Flame graphs: who called whom, the outermost frame on top, each as wide as its number of samples."""

from __future__ import annotations

from dlprof.plain import plain
from dlprof.report import formatting, looks
from dlprof.report.figures import drawing
from dlprof.report.figures.drawing import Figure, axis, drawn, number, rounded
from dlprof.result import Panel

FRAMES = 1_500  # that are drawn; others are narrower than a pixel
DEPTH = 48
NAMED = 60  # functions in the table


def flame(evidence: Panel) -> Figure:
    """Draw a bar per frame; a click on one zooms to it."""
    frames = [
        (int(depth), start, width, str(row[3]), str(row[4] or "other"))
        for row in evidence.rows
        if (depth := number(row[0])) is not None
        and (start := number(row[1])) is not None
        and (width := number(row[2])) is not None
        and 0 <= depth < DEPTH
        and width > 0
    ]
    frames = sorted(frames, key=lambda f: -f[2])[:FRAMES]
    end = max((start + width for _, start, width, _, _ in frames), default=1.0)
    whole = sum(width for depth, _, width, _, _ in frames if depth == 0) or end
    deepest = max((f[0] for f in frames), default=0)
    unit = plain(evidence.unit, 24)
    colours = [looks.look(f[4]).light for f in frames]
    hover = (
        f"{plain(name, 90)} · {formatting.quantity(width, unit)} · {formatting.percent(width / whole)}"
        for _, _, width, name, _ in frames
    )
    names = [drawn(name, 60) for _, _, _, name, _ in frames]
    trace = drawing.bars(
        [rounded(f[2]) for f in frames],
        [f[0] for f in frames],
        colours,
        hover,
        0.5,
        base=[rounded(f[1]) for f in frames],
        width=0.94,
        constraintext="none",
        **drawing.bar_text(names, [drawing.inside(c) for c in colours], anchor="start"),
    )
    arranged = drawing.layout(
        21 * (deepest + 1) + 40,
        20,
        barmode="overlay",
        xaxis=axis(range=[0, rounded(end)], fixedrange=False, showticklabels=False, showgrid=False),
        yaxis=axis(range=[deepest + 0.5, -0.5], showticklabels=False, showgrid=False),
        dragmode="zoom",
        hovermode="closest",
        meta={"click": "zoom"},
    )
    # A function that is called in several places is one row; recursive calls count each time.
    seen: dict[tuple[str, str], float] = {}
    for _, _, width, name, category in frames:
        seen[name, category] = seen.get((name, category), 0.0) + width
    rows = [
        (name, looks.look(category).name, formatting.quantity(width, unit), width / whole)
        for (name, category), width in sorted(seen.items(), key=lambda item: -item[1])[:NAMED]
    ]
    table = drawing.plain_table(("function", "whose", unit, "share"), rows, (False, False, True, True))
    label = f"Flame graph: {plain(evidence.title, 160)}; {formatting.counted(len(frames), 'frame')}."
    categories = tuple(formatting.ordered(f[4] for f in sorted(frames) if f[0]))
    return Figure(label, {"data": [trace], "layout": arranged}, table, categories)
