"""Mutants change one place of a function's arithmetic each, and one that a test notices does not survive."""

from __future__ import annotations

import ast
from pathlib import Path

from benchmarks import mutation
from benchmarks.mutation import ROOT, mutants

TEXT = '''"""A module: 1 + 1."""

LIMIT = 3


def share(part: int, whole: int) -> float:
    """Return 1 + 1."""
    text = "a" + f"{part}"
    return 2 * part / whole if part < whole and text else min(part, 1.5)
'''


def test_each_operator_and_number_of_a_function_is_changed_once(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(TEXT)
    made = {(m.was, m.becomes) for m in mutants(path)}
    assert made == {
        ("2 * part / whole", "2 * part * whole"),
        ("2 * part", "2 / part"),
        ("2", "3"),
        ("part < whole and text", "part < whole or text"),
        ("part < whole", "part >= whole"),
        ("min(part, 1.5)", "max(part, 1.5)"),
        ("1.5", "2.5"),
    }
    for mutant in mutants(path):
        ast.parse(mutant.text)
        assert len([a for a, b in zip(TEXT.splitlines(), mutant.text.splitlines(), strict=True) if a != b]) == 1
    assert list(mutants(path, {3})) == []


def test_the_tests_of_a_module_are_those_that_import_it_and_then_those_of_its_subject() -> None:
    near, far = mutation.test_files(ROOT / "dlprof/analysis/timeline/stalls.py")
    assert "tests/analysis/timeline/test_steps.py" in near
    assert "tests/analysis/timeline/test_paths.py" in far
    assert not set(near) & set(far)
