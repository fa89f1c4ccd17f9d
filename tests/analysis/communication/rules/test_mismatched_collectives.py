"""Collectives of one number that differ between ranks: found, with the line of each; the same ones left alone."""

from __future__ import annotations

from pathlib import Path

from dlprof.analysis.communication.rules.mismatched_collectives import RULE
from tests.fixtures import dumps, runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.dumps import call, dumped

DONE = [call(n) for n in range(1, 4)]


def test_the_ranks_that_are_fewest_are_named(tmp_path: Path) -> None:
    odd = [*DONE[:2], call(3, "broadcast")]
    found = ask(RULE, dumped(tmp_path / "d", DONE, DONE, odd))
    assert (found.state, found.scope, found.ranks) == ("found", "failure", (2,))
    assert "all_reduce on ranks 0, 1 and broadcast on rank 2" in found.verdict
    assert found.evidence is not None
    assert [row[:4] for row in found.evidence.rows] == [
        ("the default group", 3, "operation", "0, 1"),
        ("the default group", 3, "operation", "2"),
    ]


def test_sizes_that_differ(tmp_path: Path) -> None:
    odd = [*DONE[:2], call(3, input_sizes=[[7]], output_sizes=[[7]])]
    found = ask(RULE, dumped(tmp_path / "d", DONE, odd))
    assert (found.state, found.ranks) == ("found", (0, 1))  # of two, nobody knows which is right
    assert "all_reduce of 7 elements on rank 1" in found.verdict


def test_the_same_calls_are_left_alone_and_one_dump_is_not_compared(tmp_path: Path) -> None:
    answer = ask(RULE, dumps.hung(tmp_path / "d"))
    assert answer.state == "clear"
    assert answer.summary.startswith("4 collectives")
    assert "one rank alone" in ask(RULE, dumped(tmp_path / "one", DONE, None)).why


def test_without_dumps_it_abstains(tmp_path: Path) -> None:
    two = runs.foreign(tmp_path, traces.training(rank=0), traces.training(rank=1))
    assert "TORCH_FR_BUFFER_SIZE" in ask(RULE, two).why
    (tmp_path / "one").mkdir()
    assert ask(RULE, runs.cpu_run(tmp_path / "one", 5_000_000)).state == "does_not_apply"
