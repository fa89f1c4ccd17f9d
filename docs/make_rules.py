"""Writes the manuals of all rules into rules.md, behind its hand-written part: `make docs`."""

from __future__ import annotations

from pathlib import Path

from dlprof.analysis.rules import RULES

PAGE = Path(__file__).with_name("rules.md")
MARK = "<!-- From here on `make docs` writes this page from the rules' manuals. -->\n"


def page(text: str) -> str:
    """Return the page with its generated part made anew: a table of all rules, and the manual of each."""
    by_hand = text.partition(MARK)[0]
    rows = "".join(f"| [`{rule.id}`](#{rule.id}) | {rule.manual.splitlines()[0]} |\n" for rule in RULES)
    manuals = "".join(f"\n## {rule.id}\n\n{rule.manual}\n" for rule in RULES)
    return f"{by_hand}{MARK}\n## All rules\n\n| rule | finds |\n|---|---|\n{rows}{manuals}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
