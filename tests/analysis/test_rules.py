"""The lists of rules and panels hold every file, and each rule has what the page and `dlprof explain` show of it."""

from __future__ import annotations

import importlib
from pathlib import Path

from dlprof.analysis.panel import Picture
from dlprof.analysis.panels import PICTURES
from dlprof.analysis.rules import RULES
from tests.fixtures.places import ROOT

ANALYSIS = ROOT / "dlprof" / "analysis"
# Command lines, names of kernels in C++, and paths and names of people.
# Those that read sentences of others: of users, lines of their scripts, names of modules and operators, diffs, style
# sheets.
READ_OTHERS = {
    "advice.py",
    "code.py",
    "deterministic.py",
    "endings.py",
    "formatting.py",
    "html.py",
    "idioms.py",
    "modules.py",
    "screen.py",
    "settings.py",
    "verdict.py",
    "whatif.py",
}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_every_rule_and_every_panel_is_listed_once() -> None:
    rules = sorted(ANALYSIS.glob("*/rules/[!_]*.py"), key=lambda path: path.stem)
    assert list(RULES) == [importlib.import_module(module_of(path)).RULE for path in rules]
    panels = [vars(importlib.import_module(module_of(path))) for path in ANALYSIS.glob("panels/[!_]*.py")]
    pictures = [value for names in panels for value in names.values() if isinstance(value, Picture)]
    assert sorted(map(id, PICTURES)) == sorted(map(id, pictures))


def test_a_manual_says_what_would_be_saved_and_what_to_change() -> None:
    for rule in RULES:
        assert "Saving" in rule.manual, rule.id
        assert "What to change" in rule.manual, rule.id
        assert rule.title, rule.id
        assert not rule.title.endswith("."), rule.id


def test_no_regular_expression_reads_our_own_sentences() -> None:
    """Figures are passed as figures; what a sentence means is for people."""
    writers = [*ANALYSIS.glob("*.py"), *ANALYSIS.glob("*/rules/*.py"), *ANALYSIS.glob("panels/*.py")]
    writers += [*ANALYSIS.glob("compare/*.py"), *(ROOT / "dlprof" / "report").rglob("*.py")]
    found = {path.name for path in writers if "\nimport re\n" in path.read_text()}
    assert found <= READ_OTHERS
