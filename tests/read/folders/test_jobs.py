"""Ranks of two jobs in one folder are told apart by what launchers call a job, by its size, and by when it ran."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlprof.read.folders import of_one_job
from dlprof.read.run import open_run

HOUR = 3_600_000_000_000
GLOO: dict[str, Any] = {"backend": "gloo", "world_size": 4}


def at(began: int, ended: int | None = None) -> dict[str, Any]:
    return GLOO | {"clock": {"unix_ns": began}, "ended_ns": ended}


def of(name: str, value: str | None) -> dict[str, Any]:
    return GLOO | {"launch": {name: value}}


@pytest.mark.parametrize(
    ("second", "third", "why"),
    [
        (of("batch", "SLURM job 7"), of("batch", "SLURM job 8"), "batch"),
        (of("MASTER_PORT", "29500"), of("MASTER_PORT", "29501"), "MASTER_PORT"),
        (GLOO, GLOO | {"world_size": 8}, "the number of their ranks"),
        (at(0, HOUR), at(2 * HOUR), "when they ran"),
        (at(0, HOUR), at(2 * HOUR, 3 * HOUR), "when they ran"),
    ],
)
def test_ranks_of_two_jobs_are_not_read_together(second: dict[str, Any], third: dict[str, Any], why: str) -> None:
    kept, (warning,) = of_one_job({0: second, 1: second, 5: third})
    assert kept == {0, 1}
    assert warning == (f"the folder holds ranks of 2 jobs, which differ in {why}: read are ranks 0, 1, left out are 5")
    # Of two as large, the later one.
    assert of_one_job({2: third, 1: second})[0] == {2}


@pytest.mark.parametrize(
    ("second", "third"),
    [
        ({}, of("batch", "SLURM job 8")),
        (of("batch", None), of("batch", "SLURM job 8")),
        (at(0, HOUR), at(HOUR + 30_000_000_000)),  # hosts' clocks may be so far apart
        (at(0, None), at(2 * HOUR)),
        # Without a process group they come and go as they like.
        (at(0, HOUR) | {"backend": None}, at(2 * HOUR) | {"backend": None, "world_size": 1}),
    ],
)
def test_what_is_not_known_tells_nothing(second: dict[str, Any], third: dict[str, Any]) -> None:
    assert of_one_job({0: second, 1: third}) == ({0, 1}, [])


def test_a_folder_of_two_jobs_opens_with_one_warning(tmp_path: Path) -> None:
    for rank in range(5):
        folder = tmp_path / "ranks" / f"{rank:05d}"
        folder.mkdir(parents=True)
        facts = of("PMIX_NAMESPACE", "1" if rank < 3 else "2") | {"rank": rank, "warnings": [f"of {rank}"]}
        (folder / "facts.json").write_text(json.dumps(facts))
    (tmp_path / "run.json").write_text(json.dumps({"format": 1, "end_ns": 2, "exit": {"code": 0, "signal": None}}))
    run = open_run(tmp_path)
    assert [rank.index for rank in run.ranks] == [0, 1, 2]
    (told,) = (text for text in run.warnings if "2 jobs" in text)
    assert "read are ranks 0 to 2, left out are 3, 4" in told
    assert not any("of 3" in text for text in run.warnings)
