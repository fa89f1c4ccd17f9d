"""Batch scripts of `dlprof slurm` on a real SLURM of two nodes: one folder for all ranks, however the job ends."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dlprof.read.run import open_run
from dlprof.record.slurm import PACKAGE
from tests.fixtures.jobs import COMPILES_NOTHING, DLPROF, facts, launch, rows, running, until, wrapped
from tests.fixtures.slurm import NODES

# As any script does that torchrun starts.
TRAINS = """
import os, sys, time
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
if "solo" not in sys.argv:
    dist.init_process_group("gloo")
    assert (os.environ["LOCAL_WORLD_SIZE"], os.environ["OMP_NUM_THREADS"]) == ("2", "1")
model = torch.nn.Linear(8, 1)
if dist.is_initialized():
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for n in range(100000 if "long" in sys.argv else 30):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if n == 20:
        print("ready", *sys.argv[1:], flush=True)
        if "falls" in sys.argv and dist.get_rank() == 1:
            sys.exit(5)
    time.sleep(0.002)
if dist.is_initialized():
    del model  # before its group: PyTorch and gloo may wait for each other else
    dist.destroy_process_group()
sys.exit(7 if "seven" in sys.argv else 0)
"""
SIZE = 2 * len(NODES)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "trains.py"
    path.write_text(COMPILES_NOTHING + TRAINS)
    return path


def submitted(script: Path, env: dict[str, str], *args: str, options: tuple[str, ...] = ("--no-trace",)) -> str:
    """Submit a job of two ranks on each of two nodes; return its number."""
    asked = ["--nodes", "2", "--procs-per-node", "2", "--cpus-per-rank", "1", "--submit", *options]
    done = launch([*DLPROF, "slurm", script.name, *asked, "--", *args], script.parent, env=env)
    assert done.returncode == 0, done.stderr
    first, *more = done.stdout.splitlines()
    number = first.split()[2]
    assert first == f"dlprof: job {number} is submitted; it records into {script.parent}/runs/trains-{number}"
    assert any(line.endswith(f"scancel {number}") for line in more)
    return number


def said_of(job: str, env: dict[str, str], place: Path) -> dict[str, str]:
    """Return what SLURM says of a job."""
    done = launch(["scontrol", "--oneliner", "show", "job", job], place, env=env)
    return dict(one.split("=", 1) for one in done.stdout.split() if "=" in one)


def has_ended(job: str, env: dict[str, str], place: Path) -> bool:
    return not launch(["squeue", "--noheader", f"--jobs={job}"], place, env=env).stdout.strip()


def ended(job: str, env: dict[str, str], place: Path) -> tuple[Path, str]:
    """Wait for the end of a job; return its run folder, and what it printed."""
    assert until(partial(has_ended, job, env, place))
    return place / f"runs/trains-{job}", (place / f"trains-{job}.out").read_text()


def all_ranks(run: Path) -> list[dict[str, Any]]:
    """Return what the ranks of a run said, once it is sure that they are its only ones."""
    assert sorted(path.name for path in (run / "ranks").iterdir()) == [f"{rank:05d}" for rank in range(SIZE)]
    told = [facts(run / f"ranks/{rank:05d}") for rank in range(SIZE)]
    assert [(one["rank"], one["world_size"]) for one in told] == [(rank, SIZE) for rank in range(SIZE)]
    assert [one["warnings"] for one in told] == [[]] * SIZE
    return told


@pytest.mark.long
def test_a_task_a_rank_on_two_nodes_records_into_one_folder_and_ends_as_the_script(
    slurm: dict[str, str], script: Path, tmp_path: Path
) -> None:
    odd = ("a 'quoted' word", "$HOME", "--nodes")
    job = submitted(script, slurm, "seven", *odd, options=("--window", "5,1,3"))
    run, said = ended(job, slurm, tmp_path)
    # The highest of all tasks': SLURM ends one that is slower to exit, once another has.
    assert said_of(job, slurm, tmp_path)["ExitCode"] in ("7:0", "143:0")
    assert said.count("ready seven a 'quoted' word $HOME --nodes\n") == SIZE
    assert said.count("dlprof: recording into") == 1
    told = all_ranks(run)
    assert [one["env"]["SLURMD_NODENAME"] for one in told] == [NODES[0], NODES[0], NODES[1], NODES[1]]
    assert [one["local_rank"] for one in told] == [0, 1, 0, 1]
    assert [one["window"]["state"] for one in told] == ["exported"] * SIZE
    # Each on a core of its own of those of its node.
    cores = [one["cpu"]["allowed"] for one in told]
    assert all(core.isdigit() for core in cores)
    assert cores[0] != cores[1]
    assert cores[2] != cores[3]
    # The last to end has made the report, though SLURM ends all tasks when one has failed.
    assert (run / "report.html").exists()
    assert f"report: runs/trains-{job}/report.html" in said
    tasks = json.loads((run / "run.json").read_text())["tasks"]
    codes = [one["exit"]["code"] for one in tasks]
    assert 7 in codes
    assert set(codes) <= {7, 143, None}
    assert {one["number"] for one in tasks} == {str(rank) for rank in range(SIZE)}


@pytest.mark.slow
def test_one_torchrun_a_node_and_two_jobs_keep_apart(slurm: dict[str, str], script: Path, tmp_path: Path) -> None:
    launcher = ("--launcher", "torchrun", "--no-trace")
    jobs = [submitted(script, slurm, "one", options=launcher), submitted(script, slurm, "two", options=launcher)]
    for job in jobs:
        run, said = ended(job, slurm, tmp_path)
        assert said_of(job, slurm, tmp_path)["ExitCode"] == "0:0", said
        told = all_ranks(run)
        assert {one["env"]["SLURM_JOB_ID"] for one in told} == {job}
        assert {one["env"]["SLURMD_NODENAME"] for one in told} == {*NODES}
        assert (run / "report.html").exists()
        assert len(json.loads((run / "run.json").read_text())["tasks"]) == len(NODES)


@pytest.mark.slow
def test_ps_looks_on_all_nodes_of_a_job(slurm: dict[str, str], script: Path, tmp_path: Path) -> None:
    jobs = [submitted(script, slurm, "long", word) for word in ("one", "two")]
    outs = [tmp_path / f"trains-{job}.out" for job in jobs]
    assert until(lambda: all(out.exists() and out.read_text().count("ready") == SIZE for out in outs))
    rows = json.loads(launch([*DLPROF, "ps", "--job", jobs[0], "--format", "json"], tmp_path, env=slurm).stdout)
    assert sum(row["ranks"] for row in rows) == SIZE
    assert {row["slurm"].partition(".")[0] for row in rows} == {jobs[0]}
    assert {row["run"] for row in rows} == {str(tmp_path / f"runs/trains-{jobs[0]}")}
    for job in jobs:
        launch(["scancel", job], tmp_path, env=slurm)
    refused = launch([*DLPROF, "ps", "--job", "999999"], tmp_path, env=slurm)
    assert refused.returncode == 1
    assert "srun --jobid=999999: " in refused.stderr
    assert until(lambda: not running(script))


@pytest.mark.slow
def test_scancel_leaves_a_recording_and_a_report_of_it(slurm: dict[str, str], script: Path, tmp_path: Path) -> None:
    job = submitted(script, slurm, "long", options=("--window", "5,1,100000"))
    out = tmp_path / f"trains-{job}.out"
    assert until(lambda: out.exists() and out.read_text().count("ready") == SIZE)
    launch(["scancel", job], tmp_path, env=slurm)
    run, said = ended(job, slurm, tmp_path)
    # SLURM forgets the job before its processes have ended: they have KillWait seconds.
    assert until(lambda: (run / "report.html").exists()), said
    assert until(lambda: not running(script))
    assert said_of(job, slurm, tmp_path)["JobState"] == "CANCELLED"
    told = all_ranks(run)
    assert [one["ended"] for one in told] == [f"signal {int(signal.SIGTERM)}"] * SIZE
    assert [one["window"]["state"] for one in told] == ["partial"] * SIZE
    assert open_run(run).exit == {"code": None, "signal": int(signal.SIGTERM)}


RESUMES = """
import os, signal, sys, time
import torch
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first = int(open("saved").read()) if os.path.exists("saved") else 0
for n in range(first, 400):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.005)
    if n == first + 20:
        print("ready", first, flush=True)
    while not asked and first == 0 and n == 20:
        time.sleep(0.01)
    if asked:
        open("saved", "w").write(str(n + 1))
        break
"""


@pytest.mark.slow
def test_a_job_is_queued_again_before_its_limit_and_its_report_knows_both_starts(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "trains.py").write_text(COMPILES_NOTHING + RESUMES)
    given = ["--procs-per-node", "1", "--cpus-per-rank", "1", "--no-trace", "--requeue-before-limit", "USR1"]
    job = launch([*DLPROF, "slurm", "trains.py", *given, "--submit"], tmp_path, env=slurm).stdout.split()[2]
    out = tmp_path / f"trains-{job}.out"
    assert until(lambda: out.exists() and "ready 0" in out.read_text())
    launch(["scancel", "--batch", "--signal=USR2", job], tmp_path, env=slurm)  # what SLURM does before the limit
    assert until(lambda: said_of(job, slurm, tmp_path)["Restarts"] == "1"), out.read_text()

    # SLURM waits for two minutes before it starts a job again.
    def again() -> bool:
        return "ready 21" in out.read_text() and has_ended(job, slurm, tmp_path)

    assert until(again) or until(again)
    assert said_of(job, slurm, tmp_path)["JobState"] == "COMPLETED"
    first, second = (open_run(tmp_path / "runs" / name) for name in (f"trains-{job}", f"trains-{job}-1"))
    assert (first.exit["code"], second.exit["code"]) == (0, 0)
    assert [len(rows(run.path / "ranks/00000")) for run in (first, second)] == [21, 379]
    assert first.warnings == ()  # the samplers got the signal too
    (told,) = [text for text in second.warnings if "(restart 1)" in text]
    assert f"before this start of it, trains-{job} ran " in told
    assert "and ended with exit code 0; it was started again" in told


@pytest.mark.slow
def test_the_elements_of_an_array_have_a_folder_each_that_a_group_reads(
    slurm: dict[str, str], script: Path, tmp_path: Path
) -> None:
    given = ["--procs-per-node", "1", "--cpus-per-rank", "1", "--no-trace", "--group", "users", "--submit"]
    done = launch([*DLPROF, "slurm", "trains.py", *given, "--sbatch=--array=0-1", "--", "solo"], tmp_path, env=slurm)
    job = done.stdout.split()[2]
    assert f"it records into {tmp_path}/runs/trains-{job}_INDEX\n" in done.stdout
    # The same in a script of the user's own, without srun.
    (tmp_path / "own.sh").write_text(
        f"#!/bin/bash\n{' '.join(wrapped(Path('%x-%A_%2a-%h'), [sys.executable]))} trains.py solo\n"
    )
    name = launch(["sbatch", "--parsable", "--array=3", "--job-name=a b", "own.sh"], tmp_path, env=slurm).stdout.strip()
    assert until(partial(has_ended, job, slurm, tmp_path))
    assert until(partial(has_ended, name, slurm, tmp_path))
    for element in "01":
        run = tmp_path / f"runs/trains-{job}_{element}"
        assert (tmp_path / f"trains-{job}_{element}.out").read_text().count("ready solo") == 1
        assert json.loads((run / "run.json").read_text())["batch"] == f"SLURM job {job}_{element}"
        below = [run, *run.rglob("*")]
        assert {path.group() for path in below} == {"users"}
        assert [path for path in below if not path.stat().st_mode & stat.S_IRGRP or path.stat().st_mode & 0o007] == []
    (own,) = tmp_path.glob(f"a_b-{name}_03-*")
    assert json.loads((own / "run.json").read_text())["batch"] == f"SLURM job {name}_3"


@pytest.mark.slow
def test_nodes_that_record_on_disks_of_their_own_leave_one_run(
    slurm: dict[str, str], script: Path, tmp_path: Path
) -> None:
    job = submitted(script, slurm, "long", options=("--window", "5,1,3", "--local", f"{tmp_path}/$SLURMD_NODENAME"))
    out, run = tmp_path / f"trains-{job}.out", tmp_path / f"runs/trains-{job}"
    assert until(lambda: out.exists() and out.read_text().count("ready") == SIZE)
    assert not any((run / "ranks").iterdir())
    places = [local for node in NODES for local in (tmp_path / node).iterdir()]
    assert [sorted(path.name for path in (one / "ranks").iterdir()) for one in places] == [
        ["00000", "00001"],
        ["00002", "00003"],
    ]
    launch(["scancel", job], tmp_path, env=slurm)
    ended(job, slurm, tmp_path)
    assert until(lambda: (run / "report.html").exists()), out.read_text()
    assert len(all_ranks(run)) == SIZE
    assert not any(one.exists() for one in places)


# What a container runtime does, with the kernel's own means: other mounts, and of the host only what is bound.
_ENTERS = """
root=$1; shift
while [ "$1" != -- ]; do mkdir -p "$root$1"; mount --rbind "$1" "$root$1"; shift; done; shift
exec chroot "$root" /bin/sh -c 'cd "$1"; shift; exec "$@"' sh "$@"
"""
# What dlprof needs outside, and the recorder inside does not.
_OUTSIDE = ("click", "dlprof", "isal", "msgspec", "numpy", "pandas", "plotly", "psutil", "pynvml")


@pytest.mark.slow
def test_the_recorder_needs_nothing_of_a_container_but_its_package_and_torch(script: Path, tmp_path: Path) -> None:
    may = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0
    if os.geteuid() != 0 or not may:
        pytest.skip("only root may mount here")
    image, root, place = (tmp_path / name for name in ("image", "root", "place"))
    place.mkdir()
    root.mkdir()
    script = script.rename(place / script.name)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(image)], check=True)
    (inside,) = image.glob("lib/python*/site-packages")
    torch = find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    installed = Path(torch.origin).parents[1]
    for path in installed.iterdir():
        if not path.name.startswith((*_OUTSIDE, "_")) and path.suffix not in (".pth", ".dist-info"):
            (inside / path.name).symlink_to(path)
    enters = tmp_path / "enters"
    enters.write_text(_ENTERS)
    there = ("/usr", "/lib", "/lib64", "/bin", "/etc", "/dev", "/proc", "/sys", sys.base_prefix, installed)
    binds = [str(path) for path in (*there, image, place, PACKAGE) if Path(path).exists()]
    command = ["unshare", "--mount", "sh", str(enters), str(root), *binds, "--", str(place)]
    command += [str(image / "bin/python"), script.name, "solo"]
    done = launch(wrapped(place / "run", command, "--window", "5,1,3", "--stacks", "off"), place)
    assert done.returncode == 0, done.stderr
    told = facts(place / "run/ranks/00000")
    assert (told["window"]["state"], told["ended"], told["warnings"]) == ("exported", "exit", [])
    assert len(rows(place / "run/ranks/00000")) >= 20
