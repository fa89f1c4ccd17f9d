"""Recordings on a disk of the node: all of it is in the run folder afterwards, however the job ends."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
from pathlib import Path

import pytest

from dlprof.record.launch.folder import RunFolder
from tests.fixtures.jobs import COMPILES_NOTHING, environment, rows, spawned, until, wrapped

TRAINS = """
import sys, time
import torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for n in range(100_000 if "long" in sys.argv else 30):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    if n == 20:
        open("ready", "w").close()
    time.sleep(0.002)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "trains.py"
    path.write_text(COMPILES_NOTHING + TRAINS)
    return path


@pytest.mark.parametrize("number", [0, signal.SIGTERM])
def test_what_is_recorded_on_a_disk_of_the_node_is_put_into_the_run_folder(
    number: int, script: Path, tmp_path: Path
) -> None:
    disk, run = tmp_path / "disk", tmp_path / "run"
    words = [sys.executable, str(script), *(["long"] if number else [])]
    command = wrapped(run, words, "--local", "$DISK/jobs", "--window", "5,1,3", "--sample", "0.1")
    with spawned(command, env=environment(DISK=str(disk)), cwd=tmp_path) as job:
        assert until(lambda: (tmp_path / "ready").exists())
        (local,) = (disk / "jobs").iterdir()
        there = local / "ranks/00000/steps.jsonl"
        if number:
            assert until(lambda: len(there.read_text().splitlines()) > 30)
            assert not (run / "ranks/00000").exists()
            assert stat.S_IMODE(local.stat().st_mode) == 0o700
            job.send_signal(number)
        assert job.wait(60) == -number
    assert not [*(disk / "jobs").iterdir()]
    about = json.loads((run / "run.json").read_text())
    assert (about["exit"]["signal"], about["warnings"]) == (number or None, [])
    assert len(rows(run / "ranks/00000")) >= 30
    (host,) = (run / "hosts").iterdir()
    assert {"boot", "host.jsonl", "hello.jsonl"} <= {path.name for path in host.iterdir()}
    assert (run / "ranks/00000/trace.json.gz").exists()


@pytest.mark.parametrize(
    ("place", "why"),
    [("$NOWHERE_AT_ALL/x", "$NOWHERE_AT_ALL/x is not set"), ("/dev/null/x", "Not a directory"), ("FOREIGN", "own")],
)
def test_where_a_node_has_no_such_disk_its_ranks_record_into_the_run_folder(
    place: str, why: str, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run", ["true"], {}, {})
    if place == "FOREIGN":  # somebody else may write there
        assert run.record_at(str(tmp_path)) == ""
        run.records.chmod(0o777)
        run.local, place = None, str(tmp_path)
    said = run.record_at(place)
    assert said.startswith(f"--local {place}: ")
    assert why in said
    assert (run.local, run.records) == (None, run.path)


def test_what_cannot_be_copied_stays_and_is_named(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", ["true"], {}, {})
    assert run.record_at(str(tmp_path / "disk")) == ""
    rank = run.records / "ranks/00000"
    rank.mkdir()
    (rank / "steps.jsonl").write_text("{}")
    (run.path / "ranks/00000").write_text("in the way")
    assert run.local is not None
    (said,) = run.local.end([rank])
    assert said.startswith(f"what {os.uname().nodename} recorded could not be copied (")
    assert f"in {run.records};" in said
    assert (rank / "steps.jsonl").read_text() == "{}"
    (run.path / "ranks/00000").unlink()
    # Another one still records there.
    other = run.records / "supervisors/1"
    other.touch()
    assert run.local.end([rank]) == []
    assert (run.path / "ranks/00000/steps.jsonl").read_text() == "{}"
    assert run.records.exists()
    other.unlink()
    assert run.local.end([]) == []
    assert not run.records.exists()


def test_hosts_of_one_name_keep_apart(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", ["true"], {}, {})
    assert run.record_at(str(tmp_path / "disk")) == ""
    assert run.local is not None
    here, there = (folder / "hosts" / os.uname().nodename for folder in (run.records, run.path))
    for folder, boot in ((here, "ours"), (there, "theirs")):
        folder.mkdir(parents=True)
        (folder / "boot").write_text(boot)
    assert run.local.end([]) == []
    assert sorted((folder / "boot").read_text() for folder in (run.path / "hosts").iterdir()) == ["ours", "theirs"]
