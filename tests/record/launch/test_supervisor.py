"""The environment and the arguments that a command is started with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import dlprof
from dlprof.record.launch.supervisor import recorded

INJECT = str(Path(dlprof.__file__).parent / "record" / "inject")


@pytest.mark.parametrize(("before", "after"), [(None, []), ("/a:/b", ["/a", "/b"]), ("", [])])
def test_the_hook_stands_before_what_was_on_the_path(before: str | None, after: list[str], tmp_path: Path) -> None:
    env = {"HOME": "/home/me"} | ({} if before is None else {"PYTHONPATH": before})
    changed = recorded(env, tmp_path / "run")
    assert [part for part in changed["PYTHONPATH"].split(os.pathsep) if part] == [INJECT, *after]
    assert changed["DLPROF_RUN"] == str(tmp_path / "run")
    assert changed["HOME"] == "/home/me"
    assert "DLPROF_RUN" not in env
