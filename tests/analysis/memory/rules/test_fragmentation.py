"""A request that failed with enough free, in pieces: found; full memory, or none that failed, left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.memory.rules.fragmentation import RULE
from dlprof.result import Setting
from tests.fixtures import dumps, runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.dumps import MB, write


def test_enough_in_pieces_is_a_failure_that_expandable_segments_remove(tmp_path: Path) -> None:
    found = ask(RULE, write(tmp_path / "s", dumps.ran_out(pieces=True).snapshot()))
    assert (found.state, found.scope, found.ranks, found.saving_ns) == ("found", "failure", (0,), 0.0)
    assert found.changes[0].settings == (Setting("PYTORCH_CUDA_ALLOC_CONF", None, "expandable_segments:True"),)
    assert not found.changes[0].numerics
    assert found.evidence is not None
    oom = next(row for row in found.evidence.rows if row[2] == "failed request")
    assert oom[3:] == (20 * MB, 40 * MB, 20 * MB, 20 * MB, 10 * MB, 15 * MB)


def test_a_setting_that_is_there_is_not_advised(tmp_path: Path) -> None:
    held = dumps.ran_out(pieces=True).snapshot()
    held["allocator_settings"] |= {"expandable_segments": True}
    found = ask(RULE, write(tmp_path / "s", held))
    assert not any(change.settings for change in found.changes)


@pytest.mark.parametrize("made", [dumps.ran_out(pieces=False), dumps.training()], ids=["full", "healthy"])
def test_memory_that_is_full_or_enough_is_left_alone(tmp_path: Path, made: dumps.Allocator) -> None:
    answer = ask(RULE, write(tmp_path / "s", made.snapshot()))
    assert (answer.state, "largest free block" in answer.summary) == ("clear", True)


def test_without_a_snapshot_it_abstains(tmp_path: Path) -> None:
    assert "_dump_snapshot" in ask(RULE, runs.foreign(tmp_path, traces.training())).why
    (tmp_path / "cpu").mkdir()
    assert ask(RULE, runs.cpu_run(tmp_path / "cpu", 5_000_000, 5_000_000)).state == "does_not_apply"
