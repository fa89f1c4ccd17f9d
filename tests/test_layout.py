"""The repository is laid out as its design says: whoever looks for a thing finds it, and its test beside it."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dlprof.analysis.engine import Measure, needs_of
from dlprof.analysis.panels import PICTURES
from dlprof.analysis.rules import RULES
from dlprof.analysis.subjects import SUBJECTS, every_measure

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dlprof"
TESTS = ROOT / "tests"
# Names that say nothing of what is in the file, so that anything ends there.
VAGUE = {"utils", "util", "helpers", "helper", "common", "misc", "base"}

RULE_FILES = {p.stem: p for p in PACKAGE.glob("analysis/*/rules/[!_]*.py")}
PANEL_FILES = {p.stem: p for p in PACKAGE.glob("analysis/*/panels/[!_]*.py")}
# Tests of more than one module, and what is only lists: the tests of every rule and every panel are theirs.
BEYOND = {
    "browser",
    "frameworks",
    "robustness",
    "test_consistency.py",
    "test_docs.py",
    "test_layout.py",
    "test_reference.py",
}
ONLY_LISTS = {"analysis/panels.py", "analysis/rules.py"}


def tracked(*patterns: str) -> list[Path]:
    """List the project's files that git knows; all there are where this is no checkout."""
    done = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return [ROOT / line for line in done.stdout.splitlines() if (ROOT / line).exists()]
    return [p for pattern in patterns for p in ROOT.rglob(pattern) if ".venv" not in p.parts]


def of_module(path: Path) -> str:
    """Name the module of such a file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_a_rules_id_is_its_file_name_and_all_are_listed_in_order() -> None:
    assert [r.id for r in RULES] == sorted(RULE_FILES)
    listed = inspect.getsource(importlib.import_module("dlprof.analysis.rules")).partition("RULES")[2]
    lines = [line.strip() for line in listed.splitlines() if ".RULE" in line]
    assert lines == [f"{name}.RULE," for name in sorted(RULE_FILES)]


@pytest.mark.parametrize("name", sorted(RULE_FILES))
def test_a_rule_has_a_manual_and_a_title(name: str) -> None:
    (rule,) = (r for r in RULES if r.id == name)
    assert importlib.import_module(of_module(RULE_FILES[name])).RULE is rule
    # What it looks at, what removing it would save, and what to do.
    assert "Saving" in rule.manual
    assert "What to change" in rule.manual
    assert rule.title
    assert not rule.title.endswith(".")


def test_every_panel_is_listed_once() -> None:
    pictures = [importlib.import_module(of_module(path)).PICTURE for path in PANEL_FILES.values()]
    assert sorted(map(id, pictures)) == sorted(map(id, PICTURES))


def keywords(name: str, call: str) -> list[set[str | None]]:
    """List the names of the arguments of each such call in a rule's file."""
    return [
        {keyword.arg for keyword in node.keywords}
        for node in ast.walk(ast.parse(RULE_FILES[name].read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == call
    ]


@pytest.mark.parametrize("name", sorted(RULE_FILES))
def test_a_finding_says_what_it_saw_what_to_do_and_how_sure_it_is(name: str) -> None:
    explained = keywords(name, "Explanation")
    assert explained
    for said in explained:
        assert {"title", "summary", "evidence", "changes", "sure"} <= said
    # A risk saves nothing.
    estimates = keywords(name, "Estimate")
    assert any("gone_ns" in e or ("by_rank_ns" in e and e & {"saving_ns", "scope"}) for e in estimates)


# Figures are passed as figures. What a sentence means is for people: nothing takes it apart again.
READ_OTHERS = {
    "analysis/settings.py",  # command lines
    "report/formatting.py",  # C++ names of kernels
    "report/sharing.py",  # paths and names of people
}
WRITES_OR_JUDGES = sorted(
    path
    for path in (
        *(PACKAGE / "analysis").glob("*.py"),
        *(PACKAGE / "analysis" / "compare").glob("*.py"),
        *RULE_FILES.values(),
        *PANEL_FILES.values(),
        *(PACKAGE / "report").rglob("*.py"),
    )
    if path.relative_to(PACKAGE).as_posix() not in READ_OTHERS
)


@pytest.mark.parametrize("path", WRITES_OR_JUDGES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_regular_expression_reads_our_own_sentences(path: Path) -> None:
    imports = {
        alias.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert "re" not in imports


MEASURES = sorted(
    p for p in PACKAGE.glob("analysis/*/*.py") if re.search(r"^@(\w+_rank|across_ranks)$", p.read_text(), re.M)
)
JUDGES = ("diagnosis", "estimate", "overview", "panel", "panels", "rules")


@pytest.mark.parametrize("path", MEASURES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_measure_knows_no_rule_and_no_panel(path: Path) -> None:
    """Measures are made from tables; what is said of them, and drawn, comes after."""
    imported = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    parts = {part for name in imported if name.startswith("dlprof.analysis.") for part in name.split(".")[2:]}
    assert parts & set(JUDGES) == set()


def named_elsewhere(measures: Iterable[Measure[Any]], named: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return which modules name a measure that stands in the file of another one's rule or panel."""
    subjects = {f"dlprof.analysis.{subject}" for subject in SUBJECTS}
    of = {m.name: m.function.__module__ for m in measures if m.function.__module__.rpartition(".")[0] not in subjects}
    return {(module, name) for module, name in named if of.get(name, module) != module}


def test_a_measure_in_a_rules_file_is_that_rules_alone() -> None:
    """What a second one needs stands in the subject's folder: no rule stands on another."""
    functions = [rule.check for rule in RULES] + [picture.draw for picture in PICTURES]
    named = [(f.__module__, need.name) for f in functions for need in needs_of(f)]
    named += [(rule.explain.__module__, need.name) for rule in RULES for need in needs_of(rule.explain, given=1)]
    named += [(m.function.__module__, need.name) for m in every_measure() for need in m.needs]
    assert named_elsewhere(every_measure(), named) == set()


def test_a_measure_that_another_rule_names_is_noticed() -> None:
    def own(breakdown: pd.DataFrame) -> pd.DataFrame:
        return breakdown

    own.__module__ = "dlprof.analysis.step.rules.one"
    measure = Measure("own", own, every_measure()[0].scope, needs_of(own))
    named = [("dlprof.analysis.step.rules.one", "own"), ("dlprof.analysis.step.rules.two", "own")]
    assert named_elsewhere([*every_measure(), measure], [*named, ("dlprof.analysis.step.rules.two", "breakdown")]) == {
        ("dlprof.analysis.step.rules.two", "own")
    }


def test_every_file_says_what_it_is_for() -> None:
    silent = [
        str(p.relative_to(ROOT))
        for p in tracked("dlprof/*.py", "tests/*.py")
        if not ast.get_docstring(ast.parse(p.read_text()))
    ]
    assert silent == []


def test_no_file_has_a_name_that_says_nothing() -> None:
    files = tracked("*.py", "*.md", "*.js", "*.css", "*.html")
    assert len(files) > 50
    assert [str(p.relative_to(ROOT)) for p in files if p.stem.lower().strip("_") in VAGUE] == []


def test_folders_are_at_most_four_levels_deep() -> None:
    deep = {str(p.relative_to(ROOT).parent) for p in tracked("dlprof") if len(p.relative_to(PACKAGE).parts) > 4}
    assert deep == set()


def test_a_module_and_its_test_stand_at_the_same_place() -> None:
    """What tests/FOLDER/test_NAME.py tests is dlprof/FOLDER/NAME.py, and each module has such a file."""
    modules = {p.relative_to(PACKAGE) for p in tracked("dlprof/*.py") if not p.name.startswith("_")}
    tests = {p.relative_to(TESTS) for p in tracked("tests/*.py") if p.name.startswith("test_")}
    tests = {p for p in tests if p.name not in BEYOND and p.parts[0] not in BEYOND | {"benchmarks", "workloads"}}
    expected = {p.with_name(f"test_{p.name}"): p.as_posix() for p in modules}
    assert tests - set(expected) == set()
    assert {expected[p] for p in set(expected) - tests} == ONLY_LISTS


def test_no_test_imports_another() -> None:
    """What tests share stands in tests/fixtures."""
    borrowed = [
        f"{path.relative_to(TESTS)}: {node.module}"
        for path in tracked("tests/*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tests.")
        if ".test_" in node.module or any(alias.name.startswith("test_") for alias in node.names)
    ]
    assert borrowed == []
