"""`ps`, `attach` and `hang` of a job that dlprof has not started, and what they refuse."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dlprof.cli import cli
from dlprof.live.attach import interval
from tests.fixtures.jobs import (
    COMPILES_NOTHING,
    DLPROF,
    TORCHRUN,
    children,
    environment,
    launch,
    running,
    spawned,
    until,
    words,
)

# A loader that takes most of the time, and as much again at the end of the training loop that no rank gets to.
JOB = (
    COMPILES_NOTHING
    + """
import sys, time, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __len__(self):
        return 10**9
    def __getitem__(self, i):
        time.sleep(0.01)
        return torch.ones(8)
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in DataLoader(Slow(), batch_size=8, num_workers=1):
    optimizer.zero_grad()
    model(batch).sum().backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
    open("trains", "a").close()
"""
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """Start a job of two ranks; return its launcher's process and the script."""
    pytest.importorskip("torch", reason="recording needs torch")
    folder = tmp_path_factory.mktemp("job")
    script = folder / "train.py"
    script.write_text(JOB)
    nowhere = subprocess.DEVNULL
    command = [sys.executable, *TORCHRUN, str(script), "--token", "hunter2"]
    with spawned(command, env=environment(), cwd=folder, stdout=nowhere, stderr=nowhere) as launcher:
        assert until((folder / "trains").exists)
        yield launcher.pid, script
        for pid in running(script):
            os.kill(pid, signal.SIGKILL)


def asked(*options: str) -> Any:
    """Run a command that prints JSON."""
    done = launch([*DLPROF, *options, "--format", "json"], Path.cwd())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.long
def test_ps_lists_the_job_with_one_word(job: tuple[int, Path]) -> None:
    (row,) = [row for row in asked("ps") if row["pid"] == job[0]]
    assert (row["ranks"], row["workers"], row["run"], row["step_ns"]) == (2, 2, "", None)
    assert row["gpu_share"] is None  # it trains on the CPU
    # Whatever most of the ranks are in the middle of.
    assert row["now"] in ("waits for data", "trains", "trains (in a collective)", "runs Python")
    assert str(job[1]) in row["command"]
    assert "hunter2" not in row["command"]
    text = launch([*DLPROF, "ps"], job[1].parent).stdout
    assert any(line.split()[:3] == [str(job[0]), "2", "2"] for line in text.splitlines())


@pytest.mark.long
def test_attach_says_what_takes_the_time_and_changes_nothing(job: tuple[int, Path]) -> None:
    line = next(n for n, text in enumerate(JOB.splitlines(), 1) if text.startswith("for batch"))
    slow = next(n for n, text in enumerate(JOB.splitlines(), 1) if "time.sleep" in text)
    found = asked("attach", "--seconds", "4", str(job[0]))
    assert [one["rank"] for one in found] == [0, 1]
    for one in found:
        assert one["problem"] == ""
        assert one["samples"] > 40
        shares = {part["what"]: part["share"] for part in one["parts"]}
        # The rank whose loader is a little ahead waits for the other one instead.
        assert shares.get("loader", 0.0) + shares.get("collective", 0.0) > 0.5
        assert sum(shares.values()) == pytest.approx(1)
        assert (one["workers"], one["worker_lines"][0][0]) == (1, f"train.py:{slow}")
        assert one["working"] > 0.5
    of_loaders = [part for one in found for part in one["parts"] if part["what"] == "loader"]
    assert all(part["low"] <= part["share"] <= part["high"] for part in of_loaders)
    assert max(of_loaders, key=lambda part: part["share"])["lines"][0][0] == f"train.py:{line}"
    ranks = [child for child in children(job[0]) if str(job[1]) in words(child)]
    text = launch([*DLPROF, "attach", "--seconds", "1", str(job[0])], job[1].parent).stdout
    assert f"train.py:{line}  for batch in DataLoader(Slow(), batch_size=8, num_workers=1):" in text
    assert text.count("of its training thread") == 2
    assert all(str(job[1]) in words(rank) for rank in ranks)


@pytest.mark.long
def test_hang_asks_a_job_that_was_not_prepared(job: tuple[int, Path]) -> None:
    rank = next(child for child in children(job[0]) if str(job[1]) in words(child))
    worker = next(iter(children(rank)))
    for pid in (job[0], rank, worker):  # each is one of the job's
        found = asked("hang", str(pid))
        assert found["still_s"] is None
        assert [one["rank"] for one in found["ranks"]] == [0, 1]
        assert "no process is on this host" not in found["why"]
        assert "its loader (train.py:" in found["why"] or "all_reduce (train.py:" in found["why"]


@pytest.mark.parametrize(
    ("options", "code", "line"),
    [
        (["hang", "no/such"], 1, "no/such: neither a run folder nor a process"),
        (["hang", "999999999"], 1, "999999999: no process of yours on this host"),
        (["hang", "."], 1, ".: no rank of a job that has loaded PyTorch is among its processes here"),
        (["attach", "999999999"], 1, "999999999: no process of yours on this host"),
        (["attach", "--job", "12"], 1, "no process of yours on this host is of SLURM job 12"),
        (["attach"], 2, "either PID or --job SLURM_ID"),
        (["attach", "1x"], 2, "'1x' is not a valid integer"),
    ],
)
def test_what_cannot_be_asked_is_one_line(options: list[str], code: int, line: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        done = CliRunner().invoke(cli, options)
    assert done.exit_code == code
    assert line in done.output


def test_a_process_without_torch_is_no_job(tmp_path: Path) -> None:
    with spawned(["sleep", "60"]) as process:
        done = CliRunner().invoke(cli, ["attach", str(process.pid)])
        assert (done.exit_code, "no rank of a job that has loaded PyTorch" in done.output) == (1, True)
        process.kill()


@pytest.mark.parametrize(
    ("found", "total", "low", "high"), [(0, 100, 0, 0.037), (50, 100, 0.404, 0.596), (100, 100, 0.963, 1), (0, 0, 0, 1)]
)
def test_intervals_are_wilsons(found: int, total: int, low: float, high: float) -> None:
    assert interval(found, total) == pytest.approx((low, high), abs=0.0005)
