"""The environment and the arguments that a command is started with."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import dlprof
from dlprof.read.run import open_run
from dlprof.record.device import cpu
from dlprof.record.launch.folder import RunFolder
from dlprof.record.launch.supervisor import recorded, supervise
from tests.fixtures.jobs import environment

INJECT = str(Path(dlprof.__file__).parent / "record" / "inject")


@pytest.mark.parametrize(("before", "after"), [(None, []), ("/a:/b", ["/a", "/b"]), ("", [])])
def test_the_hook_stands_before_what_was_on_the_path(before: str | None, after: list[str], tmp_path: Path) -> None:
    env = {"HOME": "/home/me"} | ({} if before is None else {"PYTHONPATH": before})
    changed = recorded(env, tmp_path / "run")
    assert [part for part in changed["PYTHONPATH"].split(os.pathsep) if part] == [INJECT, *after]
    assert changed["DLPROF_RUN"] == str(tmp_path / "run")
    assert changed["HOME"] == "/home/me"
    assert "DLPROF_RUN" not in env


def test_processes_that_the_kernel_killed_meanwhile_are_in_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter((5, 6))
    monkeypatch.setattr(cpu, "oom_kills", lambda: next(counts))
    supervise(["true"], RunFolder(tmp_path / "run", ["true"], {}, environment()), environment())
    assert json.loads((tmp_path / "run/run.json").read_text())["oom_kills"] == 1
    assert open_run(tmp_path / "run").oom_kills == 1
