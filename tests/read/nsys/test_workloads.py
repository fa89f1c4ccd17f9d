"""Exports that a real nsys made of each workload: ranks, steps and phases are read back (tests/golden/nsys)."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.commands.report import analyse
from dlprof.read.nsys import export
from dlprof.read.run import open_run

EXPORTS = sorted((Path(__file__).parents[2] / "golden" / "nsys").glob("*.sqlite.gz"))


@pytest.mark.parametrize("path", EXPORTS, ids=lambda path: path.name.partition(".")[0])
def test_a_workload_is_read_back_from_its_export(path: Path) -> None:
    run = open_run(path)
    assert run.ranks
    for rank in run.ranks:
        reading = export.read(path, rank.pieces["nsys"])
        steps, names = reading.tables["traced_steps"], set(reading.tables["spans"]["name"])
        assert len(steps) >= 3
        assert (steps["dur_ns"] > 0).all()
        assert {"dlprof::forward", "dlprof::backward"} <= names
    result = analyse(path, 1)
    assert not result.found  # nobody saw what the CPU computed


def test_there_is_one_of_each_workload_that_needs_nothing_more() -> None:
    assert len(EXPORTS) == 9
