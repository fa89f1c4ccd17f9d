"""The benchmarks of memory, of workers and of mutants: what they add up, and what they make."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from benchmarks import mutation
from benchmarks.allocated import left, sums
from benchmarks.memory import counted
from benchmarks.mutation import ROOT, mutants
from benchmarks.workers.job import KINDS
from tests.fixtures.holding import row

ROWS = [
    row("parameter", "a", 100),
    row("parameter", "b", 20),
    row("gradient", "a", 100),
    row("activation", "a", 50),
    row("cast", "a", 30),
    row("communication", "a", 7),
    row("buffer", "a", 1_000),
]


def test_what_the_forward_pass_leaves_is_activations_copies_and_what_was_gathered() -> None:
    assert counted({"rows": ROWS}) == {
        "parameter": 120,
        "gradient": 100,
        "optimizer": 0,
        "activation": 80,
    }
    assert counted({"rows": ROWS}, "communication")["activation"] == 87


MARK = 77_777_001


def trace(*moves: tuple[int, int]) -> list[dict[str, Any]]:
    """Return the events of moves, bytes and addresses, the last first, as a trace may have them."""
    total, events = 0, []
    for n, (size, address) in enumerate(moves):
        total += size
        events.append({"name": "[memory]", "ts": n, "args": {"Bytes": size, "Total Allocated": total, "Addr": address}})
    return [{"name": "aten::mm", "ts": 3}, *reversed(events)]


def test_marks_are_found_by_their_sizes_among_all_allocations() -> None:
    events = trace((40, 1), (MARK, 2), (-MARK, 2), (-10, 1), (MARK + 1, 2), (-MARK - 1, 2))
    assert sums(events, ["before", "gradient"]) == {"before": 40, "gradient": 30}


def test_what_a_forward_pass_leaves_is_neither_what_was_there_nor_what_is_gone() -> None:
    begin, end = ((MARK, 9), (-MARK, 9)), ((MARK + 1, 9), (-MARK - 1, 9))
    events = trace((40, 1), *begin, (100, 2), (7, 3), (-40, 1), (5, 1), (-7, 3), *end, (1_000, 4))
    assert left(events, ["forward 0", "backward 0"]) == 105


@pytest.mark.parametrize("name", KINDS)
def test_a_job_of_each_kind_trains(name: str) -> None:
    kind = KINDS[name]
    batch = next(iter(DataLoader(kind.data(2), kind.batch)))
    model = kind.model()
    loss = model(batch)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is not None for p in model.parameters())


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
    assert "tests/analysis/timeline/test_replay.py" in far
    assert not set(near) & set(far)
