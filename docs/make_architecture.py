"""Draws how data flows from a script to the page, from the code's own lists: `make docs`.

Boxes are what there is: collectors and samplers, the tables that they and other tools' files fill, the measures and
rules of each subject, and what is made of the result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from textwrap import wrap
from typing import NamedTuple

from dlprof.analysis.diagnosis import wanted
from dlprof.analysis.engine import all_needed
from dlprof.analysis.rules import RULES
from dlprof.commands import GROUPS
from dlprof.read.formats import formats
from dlprof.read.sources import SOURCES
from dlprof.schema import TABLES

PAGE = Path(__file__).parent / "pictures" / "architecture.svg"

WIDTH, TOP, LINE, PAD, GAP = 1240, 66, 15, 9, 10
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1b1f24}.h{font-weight:600}.c{font-size:15px;font-weight:600}"
    ".m{fill:#57606a;font-size:11px}rect{rx:5px;fill:#f6f8fa;stroke:#afb8c1}.bg{fill:#fff;stroke:none}"
    "path{stroke:#57606a;fill:none;stroke-width:1.5}"
)


class Box(NamedTuple):
    """A box with a heading and lines below it."""

    heading: str
    lines: Sequence[str]

    @property
    def height(self) -> int:
        """Its height in pixels."""
        return 2 * PAD + LINE * (1 + len(self.lines))


class Column(NamedTuple):
    """What stands below each other, from `x` on, `width` wide, with a title and a folder."""

    title: str
    folder: str
    x: int
    width: int
    boxes: Sequence[Box]


def columns() -> list[Column]:
    """Return the columns of the picture, from the script to the page."""
    return [
        Column("record", "dlprof/record, in the job", 20, 200, _recorders()),
        Column("read", "dlprof/read: files → tables", 270, 230, _tables()),
        Column("measure", "dlprof/analysis: measures → rules", 550, 420, _subjects()),
        Column("show", "dlprof/result, report, trial, exports", 1020, 200, _shown()),
    ]


def _recorders() -> list[Box]:
    written = defaultdict(list)
    for source in SOURCES:
        folder, _, module = source.recorder.partition("/")
        written[folder].append(f"{module.removesuffix('.py')} → {source.files[0] if not source.within else source.log}")
    beside = {"samplers": "samplers, beside the ranks"}
    return [
        *(Box(beside.get(name, f"{name}, in each rank"), sorted(lines)) for name, lines in sorted(written.items())),
        Box("other tools' files", _wrapped((one.name for one in formats() if one.read), 28)),
    ]


def _tables() -> list[Box]:
    return [Box("tables of one rank (schema.py)", _wrapped(TABLES, 36)), Box("facts of a rank, facts of the job", [])]


def _subjects() -> list[Box]:
    measures: dict[str, int] = defaultdict(int)
    for measure in all_needed(wanted(RULES)):
        measures[measure.function.__module__.split(".")[2]] += 1
    rules = defaultdict(list)
    for rule in RULES:
        rules[rule.check.__module__.split(".")[2]].append(rule.id)
    named = sorted(measures, key=lambda subject: (subject != "timeline", subject))
    return [Box(f"{subject}: {measures[subject]} measures", _wrapped(rules[subject], 60)) for subject in named]


def _shown() -> list[Box]:
    return [
        Box("diagnosis.py", ["asks every rule, orders what", "is found, groups it by cause"]),
        Box("result.json", ["figures and changes,", "no sentences to take apart"]),
        *(Box(f"commands that {group}", _wrapped(names, 30)) for group, names in GROUPS.items()),
    ]


def _wrapped(names: Iterable[str], width: int) -> list[str]:
    return wrap(", ".join(names), width, break_long_words=False)


def page(_: str = "") -> str:
    """Return the picture as SVG."""
    drawn, bottom = [], 0
    all_columns = columns()
    for column in all_columns:
        y = TOP
        drawn.append(f'<text class="c" x="{column.x}" y="26">{column.title}</text>')
        drawn.append(f'<text class="m" x="{column.x}" y="44">{escape(column.folder)}</text>')
        for box in column.boxes:
            drawn.append(f'<rect x="{column.x}" y="{y}" width="{column.width}" height="{box.height}"/>')
            for n, line in enumerate((box.heading, *box.lines)):
                kind = "h" if n == 0 else "m"
                at = y + PAD + 11 + LINE * n
                drawn.append(f'<text class="{kind}" x="{column.x + PAD}" y="{at}">{escape(line)}</text>')
            y += box.height + GAP
        bottom = max(bottom, y)
    for left, right in pairwise(all_columns):
        begin, end = left.x + left.width + 8, right.x - 8
        drawn.append(f'<path d="M{begin} {TOP + 20}H{end}m-7 -5l7 5l-7 5"/>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom}" role="img">'
    title = "<title>From a script to the page</title>"
    ground = f'<rect class="bg" width="{WIDTH}" height="{bottom}"/>'
    return "\n".join([head, title, f"<style>{STYLE}</style>", ground, *drawn, "</svg>"]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
