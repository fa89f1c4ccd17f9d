"""`attach --inject`: the recorder in a job that runs already, and out again."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

import pytest
from click.testing import CliRunner

from dlprof.cli import cli
from dlprof.live import inject
from dlprof.live.look import mine
from dlprof.record import joined
from tests.fixtures.jobs import (
    COMPILES_NOTHING,
    DLPROF,
    as_ranks,
    children,
    environment,
    launch,
    running,
    spawned,
    until,
    words,
)

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("gdb") is None, reason="needs gdb"),
]

# Every 20 steps each rank writes its weights; at its end, what is left of us.
JOB = (
    COMPILES_NOTHING
    + """
import hashlib, os, sys, time, torch.distributed as dist
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
log = open(f"{sys.argv[1]}-{rank}", "a", buffering=1)
before, calls = dict(os.environ), torch.nn.Module.__call__
step = 0
stop = torch.zeros(1)
while not stop:
    batch = torch.rand(32, 64)
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    if sys.argv[1] != "plain":
        time.sleep(0.02)
    step += 1
    if step % 20 == 0:
        weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        print(step, hashlib.sha256(weights).hexdigest(), file=log)
        stop[0] = os.path.exists("stop")
        dist.all_reduce(stop)
dist.destroy_process_group()  # or else the first to exit may end the other's last collective
print("clean", torch.nn.Module.__call__ is calls and dict(os.environ) == before and "batch" in vars(), file=log)
os._exit(0)  # gloo's threads end a process now and then while it exits on a busy machine, without dlprof too
"""
)


@contextmanager
def job(folder: Path, name: str) -> Iterator[tuple[int, list[int]]]:
    """Run the job until the block ends; yield its launcher's process and its ranks'."""
    script = folder / "train.py"
    script.write_text(JOB)
    folder.joinpath("stop").unlink(missing_ok=True)
    said = folder.joinpath(f"{name}.txt").open("w")
    command = as_ranks(script, name)
    with said, spawned(command, env=environment(), cwd=folder, stdout=said, stderr=said) as launcher:
        try:
            assert until(lambda: all(folder.joinpath(f"{name}-{n}").exists() for n in (0, 1)))
            assert until(lambda: all(folder.joinpath(f"{name}-{n}").stat().st_size for n in (0, 1)))
            yield launcher.pid, [one for one in children(launcher.pid) if str(script) in words(one)]
            folder.joinpath("stop").touch()
            assert launcher.wait(60) == 0, folder.joinpath(f"{name}.txt").read_text()[-3000:]
        finally:
            for pid in running(script):
                os.kill(pid, signal.SIGKILL)


def log(folder: Path, name: str, rank: int) -> list[str]:
    """Return the lines that a rank has written."""
    return folder.joinpath(f"{name}-{rank}").read_text().splitlines()


def unchanged(folder: Path, name: str) -> None:
    """Check that the job has computed what one has that nobody looked into, and that nothing of us is left in it."""
    enough = min(len(log(folder, name, rank)) for rank in (0, 1)) - 1
    assert enough >= 4
    with job(folder, "plain"):
        while len(log(folder, "plain", 0)) < enough:
            time.sleep(0.1)
    for rank in (0, 1):
        *steps, end = log(folder, name, rank)
        assert end == "clean True"
        assert steps[:enough] == log(folder, "plain", rank)[:enough]


def test_a_job_is_recorded_from_its_middle_and_goes_on_as_it_was(tmp_path: Path) -> None:
    with job(tmp_path, "recorded") as (launcher, ranks):
        done = launch([*DLPROF, "attach", "--inject", "--seconds", "5", "-o", "run", str(launcher)], tmp_path)
        assert done.returncode == 0, done.stderr
        assert "recording into run: the recorder is in 2 ranks and leaves after 5 s" in done.stderr
        assert "report: run/report.html" in done.stdout
        time.sleep(1)
        assert all(Path(f"/proc/{rank}").exists() for rank in ranks)
    run = tmp_path / "run"
    result = json.loads((run / "result.json").read_text())
    assert result["run"]["ranks"] == [0, 1]
    assert all(0.02e9 < rank["step_ns"] < 0.2e9 for rank in result["steps"])
    # The ranks were entered one after the other, and yet record the same steps.
    traced = [json.loads((rank / "facts.json").read_text())["window"] for rank in (run / "ranks").iterdir()]
    assert traced[0]["first_step"] == traced[1]["first_step"]
    assert traced[0]["last_step"] == traced[1]["last_step"]
    (exchange,) = result["exchanges"]
    assert 4 <= exchange["count"] <= 4.25  # of five steps, one may be a 20th, which has one more
    assert exchange["wait_ns"] is not None
    unchanged(tmp_path, "recorded")


def test_it_is_refused_where_it_is_not_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with job(tmp_path, "refused") as (_, ranks):
        first = ranks[0]

        def asked(*more: str) -> str:
            done = CliRunner().invoke(cli, ["attach", "--inject", "-o", str(tmp_path / "run"), *more])
            assert done.exit_code != 0
            assert not (tmp_path / "run").exists()
            return done.output

        assert "no process of yours on this host" in asked("999999999")
        with spawned(["sleep", "100"]) as other:
            assert "no rank of a job that has loaded PyTorch" in asked(str(other.pid))
            other.kill()
        os.kill(first, signal.SIGSTOP)
        try:
            assert until(lambda: mine()[first].state == "T")
            assert f"process {first}: it is stopped" in asked(str(first))
        finally:
            os.kill(first, signal.SIGCONT)
        command = ["gdb", "-nx", "-p", str(first), "-iex", "set auto-solib-add off"]
        with spawned(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as gdb:
            assert until(lambda: mine()[first].state == "t")
            assert f"process {gdb.pid} traces it" in asked(str(first))
            gdb.kill()
            gdb.wait()
        # A gdb that is killed while it stops the threads leaves the process stopped: then ours lets it go on.
        inject._let_go(first)
        assert until(lambda: mine()[first].state in "RS")
        monkeypatch.setenv("PATH", str(tmp_path))
        assert "this needs gdb" in asked(str(first))


# What a process is busy with, and why it is then left alone.
BUSY = {
    "it traces or compiles a model": """
        from torch._subclasses import FakeTensorMode
        with FakeTensorMode():
            open("trains", "w").close()
            while True:
                time.sleep(0.01)
        """,
    "its main thread has run no Python meanwhile": """
        import ctypes
        open("trains", "w").close()
        ctypes.CDLL(None).sleep(600)
        """,
    "it is recorded already, into": """
        import dlprof
        with dlprof.record("other", trace=False, sample="off"):
            open("trains", "w").close()
            while True:
                time.sleep(0.01)
        """,
}


@pytest.mark.parametrize("line", BUSY)
def test_it_is_refused_by_what_runs_there(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inject, "_ENTERS_S", 2.0)
    script = tmp_path / "train.py"
    script.write_text("import time, torch\n" + dedent(BUSY[line]))
    with spawned([sys.executable, str(script)], env=environment(), cwd=tmp_path) as process:
        assert until((tmp_path / "trains").exists)
        done = CliRunner().invoke(cli, ["attach", "--inject", "-o", str(tmp_path / "run"), str(process.pid)])
        assert done.exit_code == 1
        assert line in done.output
        assert not (tmp_path / "run").exists()
        assert process.poll() is None
        process.kill()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_job_survives_our_death_at_a_hundred_moments(tmp_path: Path) -> None:
    rng = random.Random(0)
    with job(tmp_path, "killed") as (launcher, ranks):
        for n in range(100):
            command = [*DLPROF, "attach", "--inject", "--seconds", "1", "-o", f"run{n}", str(launcher)]
            with spawned(command, cwd=tmp_path, env=environment(), start_new_session=True) as one:
                time.sleep(rng.uniform(0, 5))
                if one.poll() is None:
                    os.killpg(one.pid, signal.SIGKILL)
            assert all(Path(f"/proc/{rank}").exists() for rank in ranks)
        assert list(tmp_path.glob("run*/injected/*.json"))  # some were killed late enough for ranks to be entered
        # The ranks that were entered last may still wait for each other.
        time.sleep(joined.TOGETHER_S + 4)
    unchanged(tmp_path, "killed")
