"""A job that a scheduler suspends goes on when it is resumed, and no figure holds the time in which it stood."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from dlprof.analysis.step.whole_job import whole_job
from dlprof.analysis.timeline.steps import step_series
from tests.fixtures import runs
from tests.fixtures.jobs import COMPILES_NOTHING, TORCHRUN, in_its_own_group, wrapped

pytest.importorskip("torch", reason="recording needs torch")

RANKS = """
import os, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for n in range(1500):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if n == 400 and dist.get_rank() == 0:
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


@pytest.mark.long
def test_the_steps_in_which_a_job_is_suspended_are_in_no_figure(tmp_path: Path) -> None:
    """Some 15 s: a suspension is one from 3.5 s on, and there are two, one after the other in one job."""
    ways = [stopped] if next(freezers(), None) is None else [stopped, frozen]
    (tmp_path / "ranks.py").write_text(COMPILES_NOTHING + RANKS)
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
