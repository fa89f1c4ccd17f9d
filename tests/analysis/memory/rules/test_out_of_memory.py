"""Memory that ran out, full of tensors: found with who held it; in pieces, or not at all, left alone."""

from __future__ import annotations

from pathlib import Path

from dlprof.analysis.memory.rules.out_of_memory import RULE
from tests.fixtures import dumps, runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.dumps import MB, write


def test_a_request_that_nothing_was_left_for_is_a_failure(tmp_path: Path) -> None:
    found = ask(RULE, write(tmp_path / "rank3.pickle", dumps.ran_out(pieces=False).snapshot()))
    assert (found.state, found.scope, found.ranks, found.saving_ns) == ("found", "failure", (3,), 0.0)
    assert found.evidence is not None
    assert [row[:1] + row[2:] for row in found.evidence.rows] == [
        ("forward (model.py:10)", 18 * MB, 0.5, 1),
        ("step (optimizer.py:7)", 18 * MB, 0.5, 1),
    ]
    assert [c.numerics for c in found.changes] == [True, False, False]


def test_memory_in_pieces_is_another_rules(tmp_path: Path) -> None:
    answer = ask(RULE, write(tmp_path / "s", dumps.ran_out(pieces=True).snapshot()))
    assert (answer.state, "fragmentation" in answer.summary) == ("clear", True)


def test_a_healthy_snapshot_is_left_alone(tmp_path: Path) -> None:
    assert ask(RULE, write(tmp_path / "s", dumps.training().snapshot())).state == "clear"


def test_without_a_snapshot_it_abstains(tmp_path: Path) -> None:
    gpu = runs.foreign(tmp_path, traces.training())
    assert "_dump_snapshot" in ask(RULE, gpu).why
    (tmp_path / "cpu").mkdir()
    assert ask(RULE, runs.cpu_run(tmp_path / "cpu", 5_000_000, 5_000_000)).state == "does_not_apply"
