"""Jobs that MPI's and SLURM's own launchers start: one folder with all ranks, and they end as without dlprof.

The launchers are real; where one is not installed, its tests skip. SLURM's run on a cluster of this one machine, which
is made for them and knows nothing of another one that may be here (tests/fixtures/slurm.py).
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.notices import all_warnings, warnings
from dlprof.analysis.timeline.steps import step_series
from dlprof.read.run import open_run
from tests.fixtures.jobs import (
    COMPILES_NOTHING,
    DLPROF,
    children,
    environment,
    facts,
    launch,
    rows,
    running,
    until,
    words,
    wrapped,
)
from tests.fixtures.runs import measured

TRAINS = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
def number(*names):
    return int(next(os.environ[name] for name in names if name in os.environ))
rank = number("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
size = number("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
meeting = "file://" + os.path.abspath(os.environ.get("MEETING", "meeting"))
dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for n in range(100000 if "long" in sys.argv else 30):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if n == 20:
        print("ready", flush=True)
        if "hangs" in sys.argv:
            dist.recv(torch.ones(1), 1 - rank)  # which neither sends
        if "falls" in sys.argv and rank == 1:
            sys.exit(5)
        if "dies" in sys.argv:
            time.sleep(1)  # until the other has all that this one sent it
            sys.exit(7)
    time.sleep(0.002)
del model  # before its group: PyTorch and gloo may wait for each other else
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "trains.py"
    path.write_text(COMPILES_NOTHING + TRAINS)
    return path


def both_ranks(run: Path) -> list[Any]:
    """Return what the two ranks of a run said, once it is sure that they are its only ones."""
    assert sorted(path.name for path in (run / "ranks").iterdir()) == ["00000", "00001"]
    told = [facts(run / f"ranks/{rank:05d}") for rank in (0, 1)]
    assert [(one["rank"], one["local_rank"], one["world_size"]) for one in told] == [(0, 0, 2), (1, 1, 2)]
    assert [one["warnings"] for one in told] == [[], []]
    return told


def mpirun(kind: str, tasks: int = 2) -> list[str]:
    """Return the words that start tasks of this machine; the test is skipped where that kind of MPI is not here."""
    for name in (f"mpirun.{kind}", "mpirun"):
        command = shutil.which(name)
        if command is None:
            continue
        version = subprocess.run([command, "--version"], capture_output=True, text=True, check=False).stdout
        if ("Open MPI" in version) == (kind == "openmpi"):
            more = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"] if kind == "openmpi" else []
            return [command, *more, "-n", str(tasks)]
    pytest.skip(f"{kind} is not installed")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["openmpi", pytest.param("mpich", marks=pytest.mark.slow)])
def test_ranks_of_mpirun_and_its_status(kind: str, script: Path, tmp_path: Path) -> None:
    command = [*mpirun(kind), sys.executable, str(script), "dies"]
    done = launch(wrapped(tmp_path / "run", command, "--window", "5,1,3"), tmp_path)
    assert done.returncode == 7, done.stderr
    told = both_ranks(tmp_path / "run")
    assert [one["window"]["state"] for one in told] == ["exported", "exported"]
    assert all(len(rows(tmp_path / f"run/ranks/{rank:05d}")) >= 20 for rank in (0, 1))
    assert json.loads((tmp_path / "run/run.json").read_text())["exit"] == {"code": 7, "signal": None}


@pytest.mark.slow
def test_tasks_of_mpirun_that_each_wrap_themselves_share_a_folder(script: Path, tmp_path: Path) -> None:
    task = [*DLPROF, "wrap", "--no-report", "--no-trace", str(script)]
    for _ in range(2):
        (tmp_path / "meeting").unlink(missing_ok=True)
        done = launch([*mpirun("openmpi"), *task], tmp_path)
        assert done.returncode == 0, done.stderr
    runs = list((tmp_path / "runs").iterdir())
    assert len(runs) == 2
    for run in runs:
        both_ranks(run)


@pytest.mark.slow
def test_of_four_tasks_of_a_host_one_samples_and_two_record_a_trace(script: Path, tmp_path: Path) -> None:
    options = ["--no-report", "--quiet", "--sample", "0.2", "--stacks", "off", "--window", "5,1,3", "--ranks", "0,last"]
    command = [*mpirun("openmpi", 4), *DLPROF, "wrap", "-o", "run", *options, str(script), "long"]
    run = tmp_path / "run"
    host = run / "hosts" / os.uname().nodename / "host.jsonl"
    tasks = subprocess.Popen(command, env=environment(), cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        # All four train, their windows are over, and a sampler sees them all.
        folders = [run / f"ranks/{rank:05d}" for rank in range(4)]
        assert until(lambda: all((one / "processes.jsonl").exists() for one in folders))
        assert until(lambda: all(len(rows(one)) > 50 for one in folders))
        supervisors = [pid for pid in running(script) if "dlprof wrap" in words(pid) and "mpirun" not in words(pid)]
        sampling = [pid for one in supervisors for pid in children(one) if "samplers/__main__.py" in words(pid)]
        assert (len(supervisors), len(sampling)) == (4, 4)
        opened = [pid for pid in sampling if any(host == path.resolve() for path in files_of(pid))]
        assert len(opened) == 1
        # It dies: another one goes on where it was.
        os.kill(opened[0], signal.SIGKILL)
        before = host.stat().st_size
        assert until(lambda: host.stat().st_size > before)
        now = [pid for pid in sampling if any(host == path.resolve() for path in files_of(pid))]
        assert len(now) == 1
        assert now != opened
    finally:
        tasks.send_signal(signal.SIGTERM)
        tasks.communicate(timeout=60)
    assert until(lambda: not running(script))
    readings = [json.loads(line)["at_ns"] for line in host.read_text().splitlines()]
    assert readings == sorted(readings)
    windows = [facts(one)["window"]["state"] for one in folders]
    assert windows == ["exported", "not_asked", "not_asked", "exported"]
    # mpirun may have killed those that would have packed them.
    assert [len(list(one.glob("trace.json*"))) for one in folders] == [1, 0, 0, 1]
    (told,) = (text for text in all_warnings(measured(run, warnings)) if "--ranks" in text)
    assert told.startswith("traces of 2 of 4 ranks were asked for (--ranks 0,last)")


def files_of(pid: int) -> list[Path]:
    """List the files that a process has open."""
    try:
        return [path for path in Path(f"/proc/{pid}/fd").iterdir() if path.exists()]
    except OSError:
        return []


@pytest.mark.slow
def test_tasks_of_srun_share_a_folder_and_an_allocation_of_two_is_no_job_of_two(
    slurm: dict[str, str], script: Path, tmp_path: Path
) -> None:
    options = ["--no-report", "--no-trace"]
    done = launch(["srun", "-n", "2", *DLPROF, "wrap", *options, str(script)], tmp_path, env=slurm)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    both_ranks(run)
    # Two recordings of each task, one after the other, are two runs; and each task's status is kept.
    command = shlex.join([*DLPROF, "wrap", *options, str(script)])
    twice = f"MEETING=first {command}; MEETING=second {command} falls"
    done = launch(["srun", "-n", "2", "sh", "-c", twice], tmp_path, env=slurm)
    runs = sorted((tmp_path / "runs").iterdir())
    assert len(runs) == 3, done.stderr
    for run in runs[1:]:
        both_ranks(run)
    assert runs[2].name == runs[1].name + "-1"
    statuses = [json.loads((run / "run.json").read_text())["tasks"] for run in runs]
    ends = [[(one["number"], one["exit"]["code"]) for one in tasks] for tasks in statuses]
    assert ends[:2] == [[("0", 0), ("1", 0)]] * 2
    assert ends[2][1] == ("1", 5)
    assert [text for text in open_run(runs[2]).warnings if f"1 on {os.uname().nodename} ended with exit code 5" in text]
    alone = tmp_path / "alone.py"
    alone.write_text(
        "import torch\nmodel = torch.nn.Linear(8, 1)\noptimizer = torch.optim.SGD(model.parameters())\n"
        "for n in range(20):\n    model(torch.ones(4, 8)).sum().backward()\n    optimizer.step()\n"
    )
    done = launch(["salloc", "-n", "2", *DLPROF, "wrap", *options, "-o", "alone", str(alone)], tmp_path, env=slurm)
    assert done.returncode == 0, done.stderr
    assert facts(tmp_path / "alone/ranks/00000")["world_size"] == 1


def submitted(script: Path, env: dict[str, str], *options: str, inside: bool, kind: str = "long") -> str:
    """Return the job of two tasks that train for long, recorded into `run` beside the script, once both have begun.

    dlprof wraps each task `inside` of srun, or else srun.
    """
    place = script.parent
    dlprof = [*DLPROF, "wrap", "-o", "run", "--no-report", *options, "--"]
    task = ["srun", "-n", "2"]
    command = [*(task + dlprof if inside else dlprof + task), sys.executable, str(script), kind]
    said = place / "said"
    batch = ["sbatch", "--parsable", "-n", "2", "-o", str(said), f"--wrap=exec {shlex.join(command)}"]
    job = launch(batch, place, env=env).stdout.strip()
    assert until(lambda: said.exists() and said.read_text().count("ready") == 2), said.read_text()
    return job


@pytest.mark.slow
@pytest.mark.parametrize("inside", [True, False])
def test_scancel_ends_ranks_that_wait_for_each_other(
    inside: bool, slurm: dict[str, str], script: Path, tmp_path: Path
) -> None:
    # SLURM kills what SIGTERM has not ended within KillWait, 30 s here: such a rank would not say how it ended.
    job = submitted(script, slurm, "--no-trace", inside=inside, kind="hangs")
    launch(["scancel", job], tmp_path, env=slurm)
    assert until(lambda: not running(script))
    told = both_ranks(tmp_path / "run")
    assert [one["ended"] for one in told] == [f"signal {int(signal.SIGTERM)}"] * 2
    assert [len(rows(tmp_path / f"run/ranks/{rank:05d}")) for rank in (0, 1)] == [21, 21]


def said_to_be(state: list[str], became: str, place: Path, env: dict[str, str]) -> bool:
    return launch(state, place, env=env).stdout.strip() == became


@pytest.mark.slow
@pytest.mark.parametrize("inside", [True, False])
def test_a_job_that_slurm_suspends_has_that_time_in_no_figure(
    inside: bool, slurm: dict[str, str], script: Path, tmp_path: Path
) -> None:
    job = submitted(script, slurm, "--no-trace", inside=inside)
    state = ["squeue", "--noheader", "--format", "%T", f"--jobs={job}"]
    for order, became in (("suspend", "SUSPENDED"), ("resume", "RUNNING")):
        # What has just started, and what has just been resumed, shall have some steps.
        time.sleep(2)
        done = launch(["scontrol", order, job], tmp_path, env=slurm)
        assert done.returncode == 0, done.stderr
        assert until(partial(said_to_be, state, became, tmp_path, slurm))
        time.sleep(3)
    launch(["scancel", job], tmp_path, env=slurm)
    assert until(lambda: not running(script))
    assert until(lambda: json.loads((tmp_path / "run/run.json").read_text())["end_ns"])
    assert any("was stopped and went on again" in text for text in open_run(tmp_path / "run").warnings)
    steps = measured(tmp_path / "run", step_series).frame(step_series)
    assert set(steps["rank"]) == {0, 1}
    for _, mine in steps.groupby("rank"):
        long = mine[mine["dur_ns"] > 3e9]
        assert list(long["kind"]) == ["suspended"], long
        assert mine["steady"].sum() > 100
