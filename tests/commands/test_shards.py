"""`dlprof report --shard` reads a share of the ranks, once, and the report is the same as without it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dlprof.cli import cli
from dlprof.commands import report
from tests.fixtures import traces
from tests.fixtures.jobs import spawned
from tests.fixtures.places import ROOT, TRACES

LAUNCHERS = [name for pair in report._LAUNCHERS for name in pair]


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, list(map(str, words)))


def told(*words: str | Path) -> list[str]:
    """Run dlprof and return the lines that it prints."""
    done = call(*words)
    assert done.exit_code == 0, done.output
    return done.output.splitlines()


def shard(path: Path, which: str, *words: str | Path) -> list[str]:
    """Read a share of the ranks and return the lines that dlprof prints."""
    return told("report", path, "--shard", which, *words)


def result_of(path: Path, *words: str | Path) -> dict[str, Any]:
    done = call("report", path, "--format", "json", "--quiet", "-o", path.parent / "out", "--jobs", "1", *words)
    assert done.exit_code == 0, done.output
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def files_of(path: Path) -> dict[str, int]:
    """Return the files that were kept of ranks, each with what changes where it is written again."""
    return {p.stem: p.stat().st_ino for p in path.rglob("*.npz")}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what a launcher of the tests themselves says."""
    for name in (*LAUNCHERS, "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of five ranks' traces, which stays as it is; the user's cache folder is beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for r in range(5):
        traces.write(tmp_path / "job" / f"rank{r}.json.gz", traces.training(3 + r, rank=r, world_size=5))
    return tmp_path / "job"


@pytest.mark.long
def test_the_report_of_what_shards_read_is_the_same(job: Path) -> None:
    before = result_of(job)
    assert not (job.parent / "cache").exists()
    for k in range(3):
        assert shard(job, f"{k}/3", "--quiet")[-1].startswith(f"shard {k}/3: ")
    assert sorted(files_of(job.parent)) == [f"{r:05d}" for r in range(5)]
    kept = files_of(job.parent)
    assert result_of(job) == before
    assert files_of(job.parent) == kept  # nothing was read again


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dlrm_v100_8ranks", "nsys"])
def test_the_report_of_real_traces_is_the_same(name: str, tmp_path: Path) -> None:
    if not (TRACES / name).is_dir():
        pytest.skip(f"needs {name} beside the repository")
    before = result_of(TRACES / name, "-o", tmp_path / "a")
    shard(TRACES / name, "auto", "--cache", tmp_path / "cache", "--quiet", "--jobs", "1")
    assert result_of(TRACES / name, "-o", tmp_path / "b", "--cache", tmp_path / "cache") == before


@pytest.mark.long
def test_a_missing_shard_is_read_by_the_report(job: Path) -> None:
    before = result_of(job)
    for k in (0, 2):
        shard(job, f"{k}/3", "--quiet")
    kept = files_of(job.parent)
    done = call("report", job, "-o", job.parent / "out", "--format", "json", "--jobs", "1")
    missing = 5 - len(kept)
    assert done.stderr.splitlines()[0] == (
        f"{missing} of 5 ranks were read by no shard (shard 1/3 is missing): reading them now"
    )
    assert json.loads(done.stdout) == before
    assert {rank: number for rank, number in files_of(job.parent).items() if rank in kept} == kept
    assert len(files_of(job.parent)) == 5


def test_a_missing_shard_may_be_left_out(job: Path) -> None:
    shard(job, "0/3", "--quiet")
    kept = files_of(job.parent)
    result = result_of(job, "--kept-only")
    assert result["run"]["ranks"] == sorted(map(int, kept))
    assert any("were read by no shard and are left out: " in line for line in result["run"]["warnings"])
    assert files_of(job.parent) == kept


@pytest.mark.long
@pytest.mark.parametrize(("number", "many"), report._LAUNCHERS)
def test_a_launcher_says_which_share(number: str, many: str, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(number, "1")
    monkeypatch.setenv(many, "4")
    assert shard(job, "auto", "--quiet")[-1].startswith("shard 1/4: ")


def test_a_share_that_is_named_comes_before_a_launchers(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert shard(job, "0/2", "--quiet")[-1].startswith("shard 0/2: ")


@pytest.mark.parametrize("which", ["3/3", "1", "a/b", "-1/2", "0/0", "1/100000000", ""])
def test_a_share_that_is_none_is_refused(which: str, job: Path) -> None:
    done = call("report", job, "--shard", which)
    assert done.exit_code == 2
    assert "K/N, with K from 0 to N - 1" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["-o", "out"],
        ["--format", "json"],
        ["--redact"],
        ["--patch", "fix.diff"],
        ["--dask", "local"],
        ["--kept-only"],
        ["--files"],
        ["--open"],
    ],
    ids=" ".join,
)
def test_what_is_of_a_report_is_refused_beside_a_share(words: list[str], job: Path) -> None:
    done = call("report", job, "--shard", "0/2", *words)
    assert done.exit_code == 2
    named = words[:1] if words[0] != "--format" else words
    assert done.stderr.splitlines()[-1] == f"Error: --shard writes no report: it takes no {' '.join(named)}"
    assert not (job.parent / "cache").exists()


@pytest.mark.parametrize(
    ("cores", "shards", "jobs"), [("", 1, None), ("", 4, 1), ("8", 4, 8), ("8", 1, 8), ("0", 4, 1)]
)
def test_a_task_uses_the_cores_that_it_has(
    cores: str, shards: int, jobs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", cores)
    assert report._jobs_of_shard(shards) == jobs


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        ["-o", "out"],
        *(pytest.param(w, marks=pytest.mark.slow) for w in (["--shard", "0/1"], ["-o", "out", "--dask", "local:1"])),
    ],
)
def test_a_killed_analysis_goes_on_where_it_was(words: list[str], tmp_path: Path) -> None:
    """Only the remaining ranks are read: a rank that is read again has its file written again."""
    if "--dask" in words:
        pytest.importorskip("distributed", reason="needs the extra dask")
    job, cache, ranks = tmp_path / "job", tmp_path / "cache", 8
    for r in range(ranks):
        traces.write(job / f"rank{r}.json", traces.training(30, rank=r, world_size=ranks))
    command = [sys.executable, "-P", "-m", "dlprof", "report", str(job), *words, "--cache", str(cache)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with spawned(
        command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        while process.poll() is None and len(files_of(cache)) < 3:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    kept = files_of(cache)
    assert 3 <= len(kept) < ranks
    done = subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, text=True)
    assert "--shard" in words or f"{len(kept)} of {ranks} ranks are known from before" in done.stderr
    now = files_of(cache)
    assert len(now) == ranks
    assert {rank: number for rank, number in now.items() if rank in kept} == kept
    assert result_of(job, "--cache", cache) == result_of(job)
