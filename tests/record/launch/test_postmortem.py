"""What a command leaves is told: that nothing was recorded, and why, or which of its ranks still run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlprof.record.launch import supervisor
from dlprof.record.launch.folder import RunFolder
from dlprof.record.launch.process import started
from dlprof.record.launch.supervisor import left, missing
from tests.fixtures.jobs import launch, wrapped


def test_a_run_that_recorded_nothing_says_why(tmp_path: Path) -> None:
    isolated = launch(wrapped(tmp_path / "a", [sys.executable, "-I", "-c", "pass"]), tmp_path)
    assert "the hook was never reached" in isolated.stderr
    shell = launch(wrapped(tmp_path / "b", ["true"]), tmp_path)
    assert "the hook was never reached" in shell.stderr
    plain = launch(wrapped(tmp_path / "c", [sys.executable, "-c", "pass"]), tmp_path)
    assert "never imported torch" in plain.stderr
    assert "never imported torch" in json.loads((tmp_path / "c/run.json").read_text())["warnings"][0]
    (tmp_path / "c/ranks/00000").mkdir()
    (tmp_path / "c/ranks/00000/facts.json").write_text("{}")
    (tmp_path / "c/run.json").unlink()
    assert missing(RunFolder(tmp_path / "c", ["true"], {}, {})) == []


def test_the_ranks_that_still_run_are_told_by_what_they_said_of_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_LEAVING_S", 0.0)
    host = tmp_path / "hosts" / os.uname().nodename
    host.mkdir(parents=True)
    ours = os.getpid()
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(5)]
    began = [started(child.pid) for child in children]
    said = (
        f"00003.r1 {ours} {began[0]}",
        f"00001 {ours} {began[1]}",
        f"00002 {os.getppid()} {began[2]}",  # another supervisor's, as of the tasks of one job
        f"00004 {ours} {(began[3] or 0) - 1}",  # it has ended, and its number is another process's
        "00005",
    )
    for child, words in zip(children, said, strict=True):
        (host / f"rank-{child.pid}").write_text(words)
    (host / f"rank-{children[0].pid}.tmp").write_text(said[0])
    try:
        (told,) = left(tmp_path)
        assert f": rank 1 (process {children[1].pid}), rank 3 (process {children[0].pid});" in told
    finally:
        for child in children:
            child.kill()
    for child in children:
        child.wait()
    assert left(tmp_path) == []
