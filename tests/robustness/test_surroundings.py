"""However a script is started, for however long, beside others or suspended: it runs as ever, and is recorded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from dlprof.analysis.machine.cores import core_waits
from dlprof.analysis.step.whole_job import whole_job
from dlprof.analysis.timeline.steps import step_series
from dlprof.read.logs import read_steps
from dlprof.read.run import open_run
from dlprof.run_folder import log_of
from tests.fixtures import runs
from tests.fixtures.jobs import (
    COMPILES_NOTHING,
    DLPROF,
    TORCHRUN,
    environment,
    facts,
    in_its_own_group,
    launch,
    record,
    rows,
    sampled,
    tiny,
    wrapped,
)
from tests.fixtures.runs import measured

pytest.importorskip("torch", reason="recording needs torch")

TRAINS = (
    COMPILES_NOTHING
    + """
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps):
    for n in range(steps):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
"""
)


@pytest.mark.long
def test_odd_names_limits_and_settings(tmp_path: Path) -> None:
    """One job in all of them at once: any one that did harm would show."""
    home = tmp_path / "a folder\nof two lines ü"
    home.mkdir()
    (home / "my script.py").write_text(
        TRAINS
        + dedent(
            r"""
            import os, resource, sys
            os.umask(0o077)
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (24, most))
            train(30)
            sys.stdout.buffer.write(b"\xff\xfe not text \x80\n" + sys.stdin.buffer.read())
            path = os.environ["PYTHONPATH"].split(":")[-1]
            print(len(sys.argv[1]), sys.argv[2:], __file__, sys.flags.safe_path, path)
            """
        )
    )
    long = "x" * 100_000
    env = environment(PYTHONPATH=str(tmp_path), PYTHONSAFEPATH="1")
    plain = [sys.executable, "-X", "importtime", str(home / "my script.py"), long, "", "-o", "--", "é"]
    said = []
    for command in (plain, wrapped(home / "run 1", plain, "--window", "5,1,2")):
        done = subprocess.run(command, cwd=tmp_path, env=env, input=b"typed \xc3\n", capture_output=True, check=True)
        said.append(done.stdout)
    assert said[0] == said[1]
    assert b"not text" in said[0]
    rank = home / "run 1/ranks/00000"
    assert len(rows(rank)) == 30
    assert facts(rank)["warnings"] == []
    assert facts(rank)["window"]["state"] == "exported"
    assert (rank / "trace.json.gz").stat().st_size > 1000


def package(folder: Path) -> list[str]:
    """A package that imports its own modules by their relative names."""
    (folder / "package/inner").mkdir(parents=True)
    (folder / "package/__init__.py").write_text("")
    (folder / "package/inner/__init__.py").write_text("")
    (folder / "package/model.py").write_text(TRAINS)
    main = "from ..model import train\ntrain(12)\nprint(__name__, __package__)\n"
    (folder / "package/inner/__main__.py").write_text(main)
    return ["-m", "package.inner"]


def zipped(folder: Path) -> list[str]:
    with zipfile.ZipFile(folder / "app.pyz", "w") as app:
        app.writestr("__main__.py", TRAINS + "train(12)\nprint(__name__)\n")
    return ["--", sys.executable, "app.pyz"]


def suite(folder: Path) -> list[str]:
    body = (
        TRAINS
        + "def test_a():\n    train(6)\n\n\ndef test_b(capfd):\n    train(6)\n    assert capfd.readouterr().err == ''\n"
    )
    (folder / "test_training.py").write_text(body)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    return ["--", sys.executable, "-m", "pytest", *options, "test_training.py"]


@pytest.mark.long
@pytest.mark.parametrize("made", [package, pytest.param(zipped, marks=pytest.mark.slow), suite])
def test_ways_to_start_a_script(made: Callable[[Path], list[str]], tmp_path: Path) -> None:
    words = made(tmp_path)
    done = launch([*DLPROF, "wrap", "-o", "run", "--no-report", "--no-trace", *words], tmp_path)
    assert done.returncode == 0, done.stderr
    if made is package:
        assert done.stdout == "__main__ package.inner\n"
    assert [path.name for path in (tmp_path / "run/ranks").iterdir()] == ["00000"]
    assert len(rows(tmp_path / "run/ranks/00000")) == 12
    assert facts(tmp_path / "run/ranks/00000")["warnings"] == []


NOTEBOOK = """
import sys, nbformat
from nbclient import NotebookClient
cells = [nbformat.v4.new_code_cell(source) for source in open(sys.argv[1]).read().split("# cell\\n")]
notebook = NotebookClient(nbformat.v4.new_notebook(cells=cells)).execute()
print(notebook.cells[-1].outputs[0].text, end="")
"""


@pytest.mark.long
def test_a_notebook(tmp_path: Path) -> None:
    for name in ("ipykernel", "nbclient"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    (tmp_path / "execute.py").write_text(NOTEBOOK)
    (tmp_path / "cells.txt").write_text(TRAINS + "# cell\ntrain(10)\n# cell\ntrain(10)\nprint('trained')\n")
    command = [sys.executable, "execute.py", "cells.txt"]
    done = launch(wrapped(tmp_path / "run", command, "--window", "3,1,2"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained\n"
    (rank,) = (tmp_path / "run/ranks").iterdir()
    assert len(rows(rank)) == 20
    assert facts(rank)["window"]["state"] == "exported"
    assert facts(rank)["warnings"] == []


HOGWILD = """
    def both(number, meeting):
        train(data[:8])
        meeting.wait()
        for _ in range(60):
            train(data[:8])
            time.sleep(0.02)
        meeting.wait()

    if __name__ == "__main__":
        import torch.multiprocessing as mp
        spawning = mp.get_context("spawn")
        meeting = spawning.Barrier(2)
        mp.spawn(both, (meeting,), nprocs=2)
    """


@pytest.mark.long
def test_two_processes_without_a_group_are_two_ranks(tmp_path: Path) -> None:
    script = tiny(tmp_path, HOGWILD)
    done = record(script, folder=tmp_path / "run", options=["--sample", "0.25"])
    assert "another process" not in done.stderr
    ranks = sorted((tmp_path / "run/ranks").iterdir())
    assert [rank.name for rank in ranks] == ["00000", "00001"]
    assert [(facts(rank)["rank"], facts(rank)["alone"], facts(rank)["world_size"]) for rank in ranks] == [
        (0, True, 1),
        (1, True, 1),
    ]
    assert all(len(rows(rank)) >= 60 for rank in ranks)
    told = open_run(tmp_path / "run")
    assert told.warnings == ()
    run = measured(tmp_path / "run", core_waits)
    assert (run.job.ranks, run.job.world_size, run.job.apart) == ((0, 1), 2, True)
    # Both have the readings of their own threads.
    frame = run.frame(core_waits)
    assert frame["threads"].to_list() == [1, 1]
    assert frame[["waited", "pool_waited"]].notna().all(axis=None)
    host = sampled(next((tmp_path / "run/hosts").iterdir()), "host")[-1]
    assert host["job_cpu_s"] > 0


@pytest.mark.slow
def test_one_after_the_other_are_no_ranks_of_one_job(tmp_path: Path) -> None:
    """As of a script that trains several times in processes of its own: the first is read, and the others named."""
    body = """
        def once(number):
            for _ in range(20): train(data[:8])

        if __name__ == "__main__":
            for _ in range(2):
                torch.multiprocessing.spawn(once, nprocs=1)
        """
    record(tiny(tmp_path, body), folder=tmp_path / "run", options=["--no-trace"])
    first, second = sorted((tmp_path / "run/ranks").iterdir())
    assert (first.name, second.name) == ("00000", f"00000.{facts(second)['pid']}")
    run = open_run(tmp_path / "run")
    assert [rank.index for rank in run.ranks] == [0]
    assert any(second.name in warning for warning in run.warnings)


# Steps as short as they can be; after the first ones nothing of ours may go on growing. Tells what grew, in bytes, by
# the file that allocated it, and the times of the steps that it saw itself.
MANY_STEPS = """
import gc, json, os, sys, time, tracemalloc
import torch
from torch.utils.data import DataLoader, TensorDataset

def ours(snapshot):
    kept = snapshot.filter_traces([tracemalloc.Filter(True, "*/dlprof/*")])
    return sum(statistic.size for statistic in kept.statistics("filename"))

model = torch.nn.Linear(2, 1)
data = TensorDataset(torch.ones(500, 2), torch.ones(500, 1))
steps, settled = int(sys.argv[1]), int(sys.argv[2])
n = 0
# What was recorded since the last write waits for the next, of a second at most: the least of some looks is without it.
before, after = [], []
while n < steps:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)  # a new one and a new loader every epoch
    for x, y in DataLoader(data, batch_size=1):
        model(x).sum().backward()
        optimizer.step()
        n += 1
        if n == settled:
            tracemalloc.start()
        for looks, begin in ((before, settled + 600), (after, steps - 1400)):
            if begin < n <= begin + 1400 and n % 100 == 0:
                gc.collect()
                looks.append(ours(tracemalloc.take_snapshot()))
print(json.dumps([n, min(after) - min(before)]))
"""


@pytest.mark.slow
def test_memory_stays_flat_and_files_small_and_no_step_is_lost(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MANY_STEPS)
    done = record(tmp_path / "train.py", "20000", "16000", folder=tmp_path / "run", options=["--no-trace"])
    steps, grown = json.loads(done.stdout)
    assert steps == 20000
    # The lists that what waits is in, and the first of what waits.
    assert grown < 100_000
    rank = tmp_path / "run/ranks/00000"
    assert facts(rank)["warnings"] == []
    lines = rows(rank)
    table = read_steps(*log_of(rank, "steps")).tables["steps"]
    assert len(lines) < 11_500
    assert table["step"].to_list() == list(range(len(table)))
    assert table["optimizer_steps"].sum() == 20000
    assert table["fetches"].sum() == 20000 + 40  # and each epoch's end
    assert table["first"].sum() >= 40
    # One after the other without a gap, but for what rounding to shares leaves: nothing.
    ends = (table["start_ns"] + table["dur_ns"]).to_numpy()
    assert (ends[:-1] == table["start_ns"].to_numpy()[1:]).all()


@pytest.mark.long
def test_what_is_made_anew_in_every_step_is_told_of_within_bounds(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        f"{COMPILES_NOTHING}kept = []\n"
        "for n in range(400):\n"
        "    model = torch.nn.Linear(2, 1)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "    kept.append((model, optimizer))\n"
        "    model(torch.ones(4, 2)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    record(tmp_path / "train.py", folder=tmp_path / "run", options=["--no-trace"])
    told = facts(tmp_path / "run/ranks/00000")
    assert len(rows(tmp_path / "run/ranks/00000")) == 400
    assert len(told["optimizers"]) == len(told["models"]) == 100


SUSPENDED = """
import os, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for n in range(700):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if n == 100 and dist.get_rank() == 0:
        os.write(1, b"ready\\n")
    time.sleep(0.002)
del model  # before its group: PyTorch and gloo may wait for each other else
dist.destroy_process_group()
"""
STOPPED_S = 4.0


def freezers() -> Iterator[tuple[Path, str, str]]:
    """Return where control groups can be frozen here: the folder, the file in a group, and what stops it in there."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, options, *_ = line.split()
        if not os.access(place, os.W_OK):
            continue
        if kind == "cgroup2":
            yield Path(place), "cgroup.freeze", "1"
        elif kind == "cgroup" and "freezer" in options.split(","):
            yield Path(place), "freezer.state", "FROZEN"


@contextmanager
def stopped(processes: Sequence[psutil.Process]) -> Iterator[None]:
    for one in processes:
        one.send_signal(signal.SIGSTOP)
    yield
    for one in processes:
        one.send_signal(signal.SIGCONT)


@contextmanager
def frozen(processes: Sequence[psutil.Process]) -> Iterator[None]:
    place, file, word = next(freezers())
    group = place / f"dlprof-test-{os.getpid()}"
    group.mkdir()
    try:
        for one in processes:
            (group / "cgroup.procs").write_text(str(one.pid))
        (group / file).write_text(word)
        yield
    finally:
        (group / file).write_text("0" if word == "1" else "THAWED")
        for one in processes:
            (place / "cgroup.procs").write_text(str(one.pid))
        group.rmdir()


# That a suspended job goes on, and is told of: tests/record/launch/test_signals.py.
@pytest.mark.slow
def test_the_steps_in_which_a_job_is_suspended_are_in_no_figure(tmp_path: Path) -> None:
    """Some 15 s: a suspension is one from 3.5 s on, and there are two, one after the other in one job."""
    ways = [stopped] if next(freezers(), None) is None else [stopped, frozen]
    (tmp_path / "ranks.py").write_text(COMPILES_NOTHING + SUSPENDED)
    command = [sys.executable, *TORCHRUN, str(tmp_path / "ranks.py")]
    process = in_its_own_group(wrapped(tmp_path / "run", command, "--no-trace"))
    for suspended in ways:
        job = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        with suspended(job):
            time.sleep(STOPPED_S)
        time.sleep(0.5)  # some steps
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors
    often = f" {len(ways)} times" if len(ways) > 1 else ""
    assert f"the job was stopped and went on again{often}: the steps in which it was stopped are left out" in errors
    run = runs.measured(tmp_path / "run", step_series, whole_job)
    steps = run.frame(step_series)
    assert set(steps["rank"]) == {0, 1}
    for _, mine in steps.groupby("rank"):
        stood = mine[mine["dur_ns"] > STOPPED_S * 0.9e9]
        assert [(kind, bool(steady)) for kind, steady in zip(stood["kind"], stood["steady"], strict=True)] == [
            ("suspended", False) for _ in ways
        ]
        assert mine["steady"].sum() > 500
    parts = run.frame(whole_job).set_index("part")["ns"]
    assert (parts["suspended"] > len(ways) * STOPPED_S * 0.9e9).all()
    assert (parts["suspended"] < len(ways) * (STOPPED_S + 2) * 1e9).all()
    if frozen not in ways:
        pytest.skip("no control group can be frozen here: it takes root and a writable /sys/fs/cgroup")
