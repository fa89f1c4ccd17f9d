"""Writes what is said of every format into sources.md, behind its hand-written part: `make docs`."""

from __future__ import annotations

from pathlib import Path

from dlprof.read.formats import Format, formats

PAGE = Path(__file__).with_name("sources.md")
MARK = "<!-- From here on `make docs` writes this page from the formats themselves. -->\n"


def page(text: str) -> str:
    """Return the page with its generated part made anew: a table of all formats, and what is said of each."""
    by_hand = text.partition(MARK)[0]
    rows = "".join(f"| [`{one.name}`](#{one.name}) | {one.title} | {_state(one)} |\n" for one in formats())
    said = "".join(f"\n## {one.name}\n\n{_described(one)}" for one in formats())
    return f"{by_hand}{MARK}\n## All formats\n\n| name | what it is | |\n|---|---|---|\n{rows}{said}"


def _state(one: Format) -> str:
    return "known, not read" if one.read is None else "read" if one.seen else "read; no real file seen yet"


def _described(one: Format) -> str:
    return "".join(f"* {label}: {text.replace('<', '&lt;')}\n" for label, text in one.described.items())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
