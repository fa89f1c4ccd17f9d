"""Which rank a process is, and how a loader's worker finds the folder of its rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlprof.record import ranks
from dlprof.record.launch.process import started
from tests.fixtures.sampling import leave_word

VARIABLES = ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


@pytest.mark.parametrize(
    ("set_by", "grouped", "rank", "alone"),
    [
        ({}, False, 0, True),
        ({"RANK": "3"}, False, 3, False),
        ({"SLURM_PROCID": "0", "OMPI_COMM_WORLD_RANK": "2"}, False, 2, False),  # mpirun in a batch script
        ({"SLURM_PROCID": "0"}, False, 0, True),  # a batch script
        ({"SLURM_PROCID": "5"}, False, 5, False),
        ({"RANK": "three", "PMI_RANK": "1"}, False, 1, False),
        ({"RANK": ""}, False, 0, True),
        ({"RANK": "0", "WORLD_SIZE": "1"}, False, 0, True),
        ({"RANK": "0", "WORLD_SIZE": "2"}, False, 0, False),
        ({"RANK": "3"}, True, 9, False),  # a process group knows better
    ],
)
def test_the_rank_is_what_the_process_group_or_the_innermost_launcher_says(
    set_by: dict[str, str], grouped: bool, rank: int, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*VARIABLES, *ranks.SIZES):
        monkeypatch.delenv(name, raising=False)
    for name, value in set_by.items():
        monkeypatch.setenv(name, value)
    group = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: grouped, get_rank=lambda: 9)
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    assert (ranks.find_rank(), ranks.is_alone()) == (rank, alone)


def test_a_worker_finds_the_folder_that_its_rank_has_left_word_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiprocessing.process.parent_process", lambda: SimpleNamespace(pid=17))
    assert ranks.folder_of_rank(tmp_path) is None
    assert ranks.age_of_rank(tmp_path) == 0
    leave_word(tmp_path, "00003.r1", 17, since=12345, ago_s=3600)
    assert ranks.folder_of_rank(tmp_path) == tmp_path / "ranks/00003.r1"
    assert 3_600_000_000_000 <= ranks.age_of_rank(tmp_path) < 3_700_000_000_000
    leave_word(tmp_path, "00003.r2", 17, since=12345, ago_s=-3600)  # the clock was set back
    assert ranks.age_of_rank(tmp_path) == 0
    assert ranks.folder_of_rank(tmp_path) == tmp_path / "ranks/00003.r2"  # the last word of a process counts
    monkeypatch.setattr("multiprocessing.process.parent_process", lambda: None)
    assert ranks.folder_of_rank(tmp_path) is None  # nobody started it as a worker


@pytest.mark.parametrize(
    ("asked", "among"),
    [
        ("all", {0, 1, 2, 3}),
        ("0,last", {0, 3}),
        ("1-2", {1, 2}),
        ("7", set()),
        ("per-host", {0, 2}),
        ("per-host,3", {0, 2, 3}),
        ("per-stage", {0, 2}),
    ],
)
def test_the_ranks_that_record_a_trace_are_known_to_each_by_itself(
    asked: str, among: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four ranks on two hosts, with two pipelines of two stages."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    found = set()
    for rank in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(rank % 2))
        if ranks.is_among(asked, tmp_path, rank, [0, 2] if rank % 2 == 0 else [1, 3]):
            found.add(rank)
    assert found == among


def test_without_a_launcher_the_first_rank_on_a_host_is_told_by_what_ranks_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ranks._LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    here, parent = os.uname().nodename, os.getppid()
    word(tmp_path, here, 2**22 + 1, "00002", 5)  # it has ended
    word(tmp_path, here, parent, "00003", started(parent))
    word(tmp_path, here, os.getpid(), "00300", started(os.getpid()))
    word(tmp_path, "elsewhere", parent, "00001", started(parent))
    assert [ranks.is_among("per-host", tmp_path, rank, None) for rank in (3, 300)] == [True, False]
    assert [ranks.is_among("per-stage", tmp_path, rank, None) for rank in (0, 3)] == [True, False]


def word(run: Path, host: str, pid: int, name: str, since: int | None) -> None:
    """Leave the word of a process that has a folder."""
    (run / "ranks" / name).mkdir(parents=True)
    leave_word(run, name, pid, host=host, since=since)


def test_processes_that_train_at_the_same_time_are_numbered(tmp_path: Path) -> None:
    parent = os.getppid()
    word(tmp_path, os.uname().nodename, parent, "00000", started(parent))
    folder, number, taken = ranks.make_folder(tmp_path, 0, 0, alone=True)
    assert (folder, number, taken) == (tmp_path / "ranks/00001", 1, None)
    assert [said.folder for said in ranks.words_here(tmp_path) if said.pid == os.getpid()] == ["00001"]
    # The same process again, as after os.exec: it is no other that trains beside it.
    assert ranks.make_folder(tmp_path, 0, 0, alone=True)[1:] == (1, tmp_path / "ranks/00001")


@pytest.mark.parametrize(("host", "since"), [("elsewhere", 1), (os.uname().nodename, None)])
def test_what_may_still_train_is_told_from_what_has_ended(tmp_path: Path, host: str, since: int | None) -> None:
    """One of another host is taken to run; of this one, the kernel knows."""
    word(tmp_path, host, 2**22 + 1, "00000", since or 5)
    folder, number, taken = ranks.make_folder(tmp_path, 0, 0, alone=True)
    if host == "elsewhere":
        assert (folder.name, number, taken) == ("00001", 1, None)
    else:
        assert (folder.name, number) == (f"00000.{os.getpid()}", 0)
        assert taken == tmp_path / "ranks/00000"


def test_a_rank_beyond_the_first_few_hundred_lies_in_a_folder_of_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, number, taken = ranks.make_folder(tmp_path, 12_345, 1, alone=False)
    assert (folder, number, taken) == (tmp_path / "ranks/12288-12543/12345.r1", 12_345, None)
    (said,) = ranks.words_here(tmp_path)
    assert (said.folder, said.rank, said.runs) == ("12288-12543/12345.r1", 12_345, True)
    monkeypatch.setattr("multiprocessing.process.parent_process", lambda: SimpleNamespace(pid=os.getpid()))
    assert ranks.folder_of_rank(tmp_path) == folder
    again, _, taken = ranks.make_folder(tmp_path, 12_345, 1, alone=False)
    assert (again, taken) == (folder.with_name(f"{folder.name}.{os.getpid()}"), folder)


def test_a_rank_of_a_launcher_takes_no_other_ranks_number(tmp_path: Path) -> None:
    parent = os.getppid()
    word(tmp_path, os.uname().nodename, parent, "00003.r2", started(parent))
    folder, number, taken = ranks.make_folder(tmp_path, 3, 2, alone=False)
    assert (folder.name, number, taken) == (f"00003.r2.{os.getpid()}", 3, tmp_path / "ranks/00003.r2")
