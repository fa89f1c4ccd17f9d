"""Shares of a run are the same everywhere and even, and what some processes left undone is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dlprof.analysis import engine
from dlprof.analysis.engine import open_store
from dlprof.analysis.engine.ranks import RankAnswer
from dlprof.analysis.engine.run import serial
from dlprof.analysis.engine.shards import left_out, not_there, shares
from dlprof.analysis.engine.store import Kept
from dlprof.errors import DlprofError
from dlprof.read.run import Rank, Run
from tests.fixtures.measures import RANKS, job_of_four, rows

ANSWER = RankAnswer({}, {}, {}, ())


def sized(folder: Path, *sizes: int) -> Run:
    """Return a run of ranks whose files have so many bytes."""
    ranks = []
    for index, size in enumerate(sizes):
        path = folder / f"{index}.json"
        with path.open("wb") as file:
            file.truncate(size)
        ranks.append(Rank(index, {"torch_trace": path}))
    return Run(folder, tuple(ranks))


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 40, 64])
def test_each_rank_is_in_one_share(shards: int, tmp_path: Path) -> None:
    run = sized(tmp_path, *((n * 7919) % 1000 for n in range(40)))
    found = shares(run, shards)
    assert len(found) == shards
    assert sorted(rank.index for share in found for rank in share) == list(range(40))
    bytes_of = [sum(rank.unpacked_bytes for rank in share) for share in found]
    assert max(bytes_of) <= sum(bytes_of) / shards + 1000  # no fuller than even by more than the largest rank


def test_shares_do_not_depend_on_the_order_of_ranks(tmp_path: Path) -> None:
    run = sized(tmp_path, *[100] * 20, *[50] * 20)
    other = replace(run, ranks=tuple(reversed(run.ranks)))
    assert [[r.index for r in share] for share in shares(run, 6)] == [
        [r.index for r in share] for share in shares(other, 6)
    ]


def test_empty_files_are_shared_too(tmp_path: Path) -> None:
    assert [len(share) for share in shares(sized(tmp_path, *[0] * 12), 4)] == [3, 3, 3, 3]


def without(run: Run, *shards: int, of: int) -> Kept:
    """Return what is kept where some shards were not reduced."""
    found = shares(run, of)
    known = {rank.index: ANSWER for k, share in enumerate(found) for rank in share if k not in shards}
    return Kept(known, {f"{k}/{of}" for k in range(of) if k not in shards})


def test_a_missing_shard_is_told(tmp_path: Path) -> None:
    run = sized(tmp_path, *[100] * 1024)
    kept = without(run, 5, of=16)
    assert not_there(run, kept, only_kept=False) == [
        "64 of 1,024 ranks were not reduced (shard 5/16 is missing): reading them now"
    ]
    assert not_there(run, kept, only_kept=True) == [
        "64 of 1,024 ranks were not reduced (shard 5/16 is missing): left out"
    ]
    kept = without(run, 3, 5, of=16)
    for rank in shares(run, 16)[7][:3]:
        del kept.answers[rank.index]
    assert not_there(run, kept, only_kept=False) == [
        "131 of 1,024 ranks were not reduced "
        "(shards 3/16, 5/16 are missing; shard 7/16 is incomplete): reading them now"
    ]


def test_of_many_missing_shards_the_first_are_named(tmp_path: Path) -> None:
    run = sized(tmp_path, *[100] * 100)
    (line,) = not_there(run, without(run, *range(20), of=100), only_kept=False)
    assert "shards 0/100, 1/100, 2/100, 3/100, 4/100, 5/100, 6/100, 7/100 … are missing" in line


def test_of_shards_of_several_divisions_only_the_ranks_are_told(tmp_path: Path) -> None:
    run = sized(tmp_path, *[100] * 4)
    kept = Kept(dict.fromkeys(range(3), ANSWER), {"0/2", "1/3"})
    assert not_there(run, kept, only_kept=False) == ["1 of 4 ranks was not reduced: reading it now"]


def test_what_was_read_before_is_told(tmp_path: Path) -> None:
    run = sized(tmp_path, *[100] * 4)
    assert not_there(run, Kept({1: ANSWER}), only_kept=False) == ["1 of 4 ranks is known from before"]
    assert not_there(run, Kept({1: ANSWER, 2: ANSWER}), only_kept=False) == ["2 of 4 ranks are known from before"]
    assert not_there(run, Kept(), only_kept=False) == []
    assert not_there(run, Kept(dict.fromkeys(range(4), ANSWER)), only_kept=False) == []


def test_what_is_left_out_is_a_warning_of_the_run(tmp_path: Path) -> None:
    run = sized(tmp_path, *[100] * 4)
    assert left_out(run, [0, 3]).warnings == ("2 of 4 ranks were not reduced and are left out: 1, 2",)
    assert left_out(run, range(4)) == run
    with pytest.raises(DlprofError, match="no rank of it was reduced"):
        left_out(run, [])


def test_shards_are_known_by_what_they_kept(tmp_path: Path) -> None:
    run = job_of_four(tmp_path)
    for k in (0, 2):
        store = open_store(run, shard=f"{k}/3")
        store.make()
        share = replace(run, ranks=tuple(shares(run, 3)[k]))
        engine.answers_of(share, [rows], store=store, backend=serial)
    lines: list[str] = []
    measured = engine.measure(run, [rows], store=open_store(run), backend=serial, tell=lines.append)
    assert measured.ranks == tuple(range(RANKS))
    assert lines == ["1 of 4 ranks was not reduced (shard 1/3 is missing): reading it now"]
    lines.clear()
    engine.measure(run, [rows], store=open_store(run), backend=serial, tell=lines.append)
    assert lines == []
