"""The repository is laid out as its design says: whoever looks for a thing finds it, and its test beside it."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
from pathlib import Path

import pytest

from dlprof.panels import PICTURES
from dlprof.rules import RULES

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dlprof"
TESTS = ROOT / "tests"
# Names that say nothing of what is in the file, so that anything ends there.
VAGUE = {"utils", "util", "helpers", "helper", "common", "misc", "base"}

RULE_FILES = sorted(p.stem for p in (PACKAGE / "rules").glob("[!_]*.py"))
PANEL_FILES = sorted(p.stem for p in (PACKAGE / "panels").glob("[!_]*.py"))
# What is tested through the modules that use it, and why it has no test of its own.
WITHOUT_TEST = {
    "readers/events.py",  # one event's fields: the tests of torch_trace
    "readers/rows.py",  # what a file holds: the tests of torch_trace, which makes its tables
}


def tracked(*patterns: str) -> list[Path]:
    """List the project's files that git knows; all there are where this is no checkout."""
    done = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return [ROOT / line for line in done.stdout.splitlines() if (ROOT / line).exists()]
    return [p for pattern in patterns for p in ROOT.rglob(pattern) if ".venv" not in p.parts]


def modules(folder: str) -> list[Path]:
    return sorted((PACKAGE / folder).glob("[!_]*.py"))


def test_a_rules_id_is_its_file_name_and_all_are_listed_in_order() -> None:
    assert [r.id for r in RULES] == RULE_FILES
    listed = inspect.getsource(importlib.import_module("dlprof.rules")).partition("RULES")[2]
    assert [line.strip() for line in listed.splitlines() if ".RULE" in line] == [f"{name}.RULE," for name in RULE_FILES]


@pytest.mark.parametrize("name", RULE_FILES)
def test_a_rule_is_a_file_with_a_manual_a_title_and_a_test(name: str) -> None:
    (rule,) = (r for r in RULES if r.id == name)
    assert importlib.import_module(f"dlprof.rules.{name}").RULE is rule
    # What it looks at, what removing it would save, and what to do.
    assert "Saving" in rule.manual
    assert "What to change" in rule.manual
    assert rule.title
    assert not rule.title.endswith(".")
    assert (TESTS / "rules" / f"test_{name}.py").is_file()


def test_every_panel_is_listed_once() -> None:
    pictures = [importlib.import_module(f"dlprof.panels.{name}").PICTURE for name in PANEL_FILES]
    assert sorted(map(id, pictures)) == sorted(map(id, PICTURES))


def keywords(name: str, call: str) -> list[set[str | None]]:
    """List the names of the arguments of each such call in a rule's file."""
    return [
        {keyword.arg for keyword in node.keywords}
        for node in ast.walk(ast.parse((PACKAGE / "rules" / f"{name}.py").read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == call
    ]


@pytest.mark.parametrize("name", RULE_FILES)
def test_a_finding_says_what_it_saw_what_to_do_and_how_sure_it_is(name: str) -> None:
    explained = keywords(name, "Explanation")
    assert explained
    for said in explained:
        assert {"title", "summary", "evidence", "changes", "sure"} <= said
    # A risk saves nothing.
    assert any("by_rank_ns" in figures and figures & {"saving_ns", "scope"} for figures in keywords(name, "Estimate"))


# Figures are passed as figures. What a sentence means is for people: nothing takes it apart again.
WRITES_OR_JUDGES = ("estimate", "diagnosis", "comparison", "promises", "choices", "differences", "overview")


@pytest.mark.parametrize(
    "path",
    [
        *(PACKAGE / f"{name}.py" for name in WRITES_OR_JUDGES),
        *(p for folder in ("rules", "panels", "renderers") for p in modules(folder)),
    ],
    ids=lambda path: path.stem,
)
def test_no_regular_expression_reads_our_own_sentences(path: Path) -> None:
    imports = {
        alias.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    # words shortens the C++ names of kernels by one.
    assert "re" not in imports or (path.stem == "words" and path.read_text().count("re.compile") == 1)


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


def test_folders_are_at_most_two_levels_deep() -> None:
    deep = {str(p.relative_to(ROOT).parent) for p in tracked("dlprof") if len(p.relative_to(PACKAGE).parts) > 3}
    assert deep == set()
    packages = {p.relative_to(PACKAGE).parent for p in tracked("dlprof/*.py")}
    assert max(len(p.parts) for p in packages) == 1


@pytest.mark.parametrize(
    "folder",
    [
        "",
        "collectors",
        "commands",
        "exports",
        "measures",
        "panels",
        "readers",
        "renderers",
        "rules",
        "samplers",
        "timeline",
    ],
)
def test_tests_stand_where_the_package_has_the_module(folder: str) -> None:
    """Whatever is tested in tests/FOLDER/test_NAME.py is dlprof/FOLDER/NAME.py."""
    beyond = {"test_consistency.py", "test_layout.py", "test_reference.py"}
    there = {f"test_{p.name}" for p in modules(folder)}
    here = {p.name for p in (TESTS / folder).glob("test_*.py")}
    assert here - there - beyond == set()


@pytest.mark.parametrize(
    "folder", ["commands", "exports", "measures", "readers", "renderers", "rules", "samplers", "timeline"]
)
def test_every_module_has_a_test(folder: str) -> None:
    missing = {f"{folder}/{p.name}" for p in modules(folder) if not (TESTS / folder / f"test_{p.name}").is_file()}
    assert missing <= WITHOUT_TEST
