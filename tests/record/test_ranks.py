"""Which rank a process is, and how a loader's worker finds the folder of its rank."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlprof.record import ranks

VARIABLES = ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


@pytest.mark.parametrize(
    ("set_by", "rank"),
    [
        ({}, 0),
        ({"RANK": "3"}, 3),
        ({"SLURM_PROCID": "0", "OMPI_COMM_WORLD_RANK": "2"}, 2),  # mpirun in a batch script
        ({"SLURM_PROCID": "5"}, 5),
        ({"RANK": "three", "PMI_RANK": "1"}, 1),
        ({"RANK": ""}, 0),
    ],
)
def test_the_rank_is_what_the_innermost_launcher_says(
    set_by: dict[str, str], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in set_by.items():
        monkeypatch.setenv(name, value)
    assert ranks.find_rank() == rank


@pytest.mark.parametrize(("initialized", "rank"), [(True, 9), (False, 3)])
def test_a_process_group_knows_better_than_the_environment(
    initialized: bool, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: initialized, get_rank=lambda: 9)
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    monkeypatch.setenv("RANK", "3")
    assert ranks.find_rank() == rank


def test_a_worker_finds_the_folder_that_its_rank_has_left_word_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiprocessing.process.parent_process", lambda: SimpleNamespace(pid=17))
    assert ranks.folder_of_rank(tmp_path) is None
    with pytest.raises(OSError, match="rank-17"):
        ranks.age_of_rank(tmp_path)
    word = tmp_path / "hosts" / os.uname().nodename / "rank-17"
    word.parent.mkdir(parents=True)
    word.write_text("00003.r1 4711 12345")
    assert ranks.folder_of_rank(tmp_path) == tmp_path / "ranks/00003.r1"
    hour = time.time() - 3600
    os.utime(word, (hour, hour))
    assert 3_600_000_000_000 <= ranks.age_of_rank(tmp_path) < 3_700_000_000_000
    os.utime(word, (hour + 7200, hour + 7200))  # the clock was set back
    assert ranks.age_of_rank(tmp_path) == 0


def test_a_process_that_nobody_started_as_a_worker_has_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiprocessing.process.parent_process", lambda: None)
    assert ranks.folder_of_rank(tmp_path) is None
