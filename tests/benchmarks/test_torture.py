"""The torture of inputs and of jobs: sound ones are read, and what holds is told from what does not."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from benchmarks.torture import inputs, jobs

pytestmark = pytest.mark.long

UNREAD = {"execution_trace"}  # a format that is known, and not read


@pytest.mark.slow
def test_sound_sources_are_read(tmp_path: Path) -> None:
    (tmp_path / "sources").mkdir()
    made = {n: path for n, path in inputs.sources(tmp_path / "sources").items() if "/" not in n}
    refused = set()
    for name, path in made.items():
        work = tmp_path / "work" / name
        (work / "input").mkdir(parents=True)
        tried = inputs.reported(inputs.copied(path, work / "input"), work)
        assert tried.outcome in ("full", "refused"), tried
        if tried.outcome == "refused":
            refused.add(name)
    assert refused == UNREAD


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        pytest.param(jobs.PAIRS["exit code"], "", marks=pytest.mark.slow),
        ("import os\nprint('DLPROF_RUN' in os.environ)\n", "stdout: 'False\\n' and 'True\\n'"),
    ],
    ids=["holds", "stdout"],
)
def test_a_script_that_knows_that_it_is_recorded_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, wrong: str
) -> None:
    monkeypatch.setattr(jobs, "PAIRS", {"one": text})
    (held,) = jobs.pairs(tmp_path)
    assert held.wrong.startswith(wrong)
    assert bool(held.wrong) == bool(wrong)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "to"), [(signal.SIGTERM, "both"), (signal.SIGKILL, "dlprof")])
def test_a_job_that_is_killed_ends_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: signal.Signals, to: str
) -> None:
    monkeypatch.setattr(jobs, "_SENT", ((what, to),))
    assert [held.wrong for held in jobs.deaths(tmp_path, 1, random.Random(1))] == [""]


@pytest.mark.slow
def test_a_job_whose_disk_fills_is_itself(tmp_path: Path) -> None:
    held = list(jobs.disks(tmp_path, 1, random.Random(1)))
    if not held:
        pytest.skip("no file system can be mounted here")
    assert [one.wrong for one in held] == [""]
