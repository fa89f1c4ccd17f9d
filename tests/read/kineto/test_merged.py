"""Traces of several ranks in one file: by the names of processes, else in their order; what is unclear stays one."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.read.kineto import torch_trace
from dlprof.read.kineto.merged import is_rewritten, pids, ranks_of_processes
from dlprof.read.run import TRACE, open_run
from tests.fixtures import dialects, traces


@pytest.mark.parametrize("named", [True, False])
def test_a_merged_file_has_the_ranks_that_it_was_made_of(tmp_path: Path, named: bool) -> None:
    ranks = [traces.training(steps, rank=n) for n, steps in enumerate((3, 4))]
    path = traces.write(tmp_path / "all.json", dialects.merged(*ranks, named=named), layout="compact")
    run = open_run(path)
    assert [rank.index for rank in run.ranks] == [0, 1]
    for rank, made in zip(run.ranks, ranks, strict=True):
        alone = torch_trace.read(traces.write(tmp_path / f"rank{rank.index}.json", made))
        mine = torch_trace.read(path, pids(rank.pieces[TRACE]))
        assert mine.tables["spans"].drop(columns="group").equals(alone.tables["spans"].drop(columns="group"))
        assert mine.tables["traced_steps"].equals(alone.tables["traced_steps"])
        assert not any("processes" in w for w in mine.warnings)


def test_devices_that_no_rank_can_be_told_of_leave_one_rank(tmp_path: Path) -> None:
    made = dialects.merged(*(traces.training(rank=n) for n in range(2)), named=False)
    for event in made["traceEvents"]:
        event["pid"] = event["pid"] if event["pid"] >= traces.PROCESS else 0
    path = traces.write(tmp_path / "all.json", made, layout="compact")
    assert ranks_of_processes(path) == []
    assert [rank.index for rank in open_run(path).ranks] == [0]


def test_a_file_of_one_process_and_kinetos_own_are_one_rank(tmp_path: Path) -> None:
    path = traces.write(tmp_path / "rank3.json", traces.training(rank=3), layout="compact")
    assert ranks_of_processes(path) == []
    assert is_rewritten(path.read_bytes())
    assert not is_rewritten(traces.dump(traces.training()))


def test_odd_pieces_are_no_process() -> None:
    assert pids("") == pids("{}") == pids("[[1]]") == frozenset()
    assert pids('[1, "a"]') == {1, "a"}
