"""Jobs that MPI's and SLURM's own launchers start: one folder with all ranks, and they end as without dlprof.

The launchers are real; where one is not installed, its tests skip. SLURM's run on a cluster of this one machine, which
is made for them and knows nothing of another one that may be here (tests/fixtures/slurm.py).
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dlprof.read.run import open_run
from tests.fixtures.jobs import (
    COMPILES_NOTHING,
    DLPROF,
    facts,
    launch,
    rows,
    wrapped,
)

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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
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
