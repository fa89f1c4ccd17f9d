"""Where ranks, tasks and hosts lie: small jobs flat, large ones with no folder of thousands, older runs as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from dlprof import run_folder
from dlprof.record.launch.supervisor import recorded
from tests.fixtures.jobs import environment


@pytest.mark.parametrize(
    ("rank", "life", "name"),
    [
        (0, "", "00000"),
        (255, ".r2", "00255.r2"),
        (256, "", "00256-00511/00256"),
        (12_345, ".r1", "12288-12543/12345.r1"),
        (123_456, "", "123392-123647/123456"),
    ],
)
def test_the_place_of_a_rank_is_told_by_its_number_alone(rank: int, life: str, name: str) -> None:
    assert run_folder.rank_name(rank, life) == name


def test_no_folder_of_16384_ranks_holds_more_than_some_hundred(tmp_path: Path) -> None:
    ranks = Counter(str(Path("ranks", run_folder.rank_name(rank)).parent) for rank in range(16_384))
    tasks = Counter(str(Path("t", run_folder.task_name(f"h-{n}", str(n), spread=True)).parent) for n in range(16_384))
    (tmp_path / run_folder.SPREAD_HOSTS).mkdir()
    hosts = Counter(run_folder.host_folder(tmp_path, f"node{n:04d}").parent for n in range(2048))
    by_hand = Counter(Path("t", run_folder.task_name(f"node{n}", None, spread=True)).parent for n in range(2048))
    assert max(*ranks.values(), len(ranks), *tasks.values(), len(tasks)) <= 256
    assert max(*hosts.values(), len(hosts), *by_hand.values(), len(by_hand)) <= 64


def test_flat_folders_and_folders_of_folders_are_listed_together(tmp_path: Path) -> None:
    names = ["00000", "00007.r1", "00255.4711", "00900", "00256-00511/00300", "12288-12543/12345"]
    for name in names:
        (tmp_path / "ranks" / name).mkdir(parents=True)
    assert {path.relative_to(tmp_path / "ranks").as_posix() for path in run_folder.in_ranks(tmp_path)} == {*names}
    assert not run_folder.recorded(tmp_path)
    (tmp_path / "ranks/12288-12543/12345/facts.json").write_text("{}")
    assert run_folder.recorded(tmp_path)
    assert run_folder.in_hosts(tmp_path) == []
    for host in ("hosts/b", "hosts/3f", "many-hosts/3f/a", "many-hosts/00/c"):
        (tmp_path / host).mkdir(parents=True)
    assert [path.name for path in run_folder.in_hosts(tmp_path)] == ["3f", "a", "b", "c"]


@pytest.mark.parametrize("many", [False, True])
def test_every_interpreter_of_a_job_agrees_on_the_folder_of_its_host(many: bool, tmp_path: Path) -> None:
    if many:
        (tmp_path / run_folder.SPREAD_HOSTS).mkdir()
    env = recorded(environment(), tmp_path)
    subprocess.run([sys.executable, "-c", "pass"], env=env, check=True)
    assert (run_folder.host_folder(tmp_path, os.uname().nodename) / "hello.jsonl").exists()
    assert (tmp_path / run_folder.HOSTS).exists() != many
