"""The torture of jobs: what holds is told from what does not."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from benchmarks.torture import jobs

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (jobs.PAIRS["exit code"], ""),
        ("import os, sys\nsys.exit('DLPROF_RUN' in os.environ)\n", "exit status: 0 and 1"),
        ("import os\nprint('DLPROF_RUN' in os.environ)\n", "stdout: 'False\\n' and 'True\\n'"),
        ("import os\nopen('in' if 'DLPROF_RUN' in os.environ else 'of', 'w').close()\n", "files: "),
    ],
    ids=["holds", "exit status", "stdout", "files"],
)
def test_a_script_that_knows_that_it_is_recorded_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, wrong: str
) -> None:
    monkeypatch.setattr(jobs, "PAIRS", {"one": text})
    (held,) = jobs.pairs(tmp_path)
    assert held.wrong.startswith(wrong)
    assert bool(held.wrong) == bool(wrong)


@pytest.mark.parametrize(("what", "to"), [(signal.SIGTERM, "both"), (signal.SIGKILL, "dlprof")])
def test_a_job_that_is_killed_ends_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: signal.Signals, to: str
) -> None:
    monkeypatch.setattr(jobs, "_SENT", ((what, to),))
    assert [held.wrong for held in jobs.deaths(tmp_path, 1, random.Random(1))] == [""]


def test_a_job_whose_disk_fills_is_itself(tmp_path: Path) -> None:
    held = list(jobs.disks(tmp_path, 1, random.Random(1)))
    if not held:
        pytest.skip("no file system can be mounted here")
    assert [one.wrong for one in held] == [""]
