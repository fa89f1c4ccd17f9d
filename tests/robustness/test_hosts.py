"""Jobs of several hosts: one folder, a sampler for each host, ranks in order, and times that can be compared.

The hosts are of this one machine, but what dlprof can tell them by is another for each: their name, and the clock that
counts from the machine's start. Making such hosts needs root and a kernel that lets it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dlprof.commands.report import write_report
from dlprof.read.kineto import torch_trace
from dlprof.read.logs import read_steps
from dlprof.read.run import open_run
from dlprof.run_folder import log_of
from tests.fixtures.jobs import COMPILES_NOTHING, DLPROF, environment, facts, free_port, noted, sampled

pytest.importorskip("torch", reason="recording needs torch")

HOSTS = {"alpha": 0, "beta": 5_000_000}  # seconds that the clock of each is ahead of this machine's
NAMES = 'echo "$1" > /proc/sys/kernel/hostname && shift && exec "$@"'


def on_host(name: str, command: list[str]) -> list[str]:
    """Return the words that run a command on a host of that name."""
    ahead = str(HOSTS[name])
    spaces = ["unshare", "--uts", "--time", "--monotonic", ahead, "--boottime", ahead, "--fork", "--kill-child"]
    return [*spaces, "sh", "-c", NAMES, "sh", name, *command]


def can_be_made() -> bool:
    """Return whether this user and kernel can make hosts."""
    if shutil.which("unshare") is None:
        return False
    return not subprocess.run(on_host("beta", ["true"]), capture_output=True, check=False).returncode


# Trains until the samplers of both hosts have written, and for some steps at least.
TRAINS = (
    COMPILES_NOTHING
    + """
import os, time
from pathlib import Path
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = Path(os.environ["DLPROF_RUN"])
until = time.monotonic() + 60
goes_on = torch.ones(1)
n = 0
while goes_on:
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
    n += 1
    if n % 30 == 0:
        waits = len(list(run.glob("hosts/*/samples.jsonl"))) < 2 and time.monotonic() < until
        goes_on = torch.ones(1) * waits
        dist.broadcast(goes_on, 0)
del model  # before its group: PyTorch and gloo may wait for each other else
dist.destroy_process_group()
"""
)


def overlap(one: pd.DataFrame, other: pd.DataFrame) -> int:
    """Return how many rows two tables have in common, all of which are at the same time, in part at least."""
    n = min(len(one), len(other))
    starts = np.stack([table["start_ns"].to_numpy()[:n] for table in (one, other)])
    ends = starts + np.stack([table["dur_ns"].to_numpy()[:n] for table in (one, other)])
    assert (starts.max(axis=0) < ends.min(axis=0)).all()
    return n


def record(folder: Path, hosts: Sequence[Callable[[list[str]], list[str]]]) -> Path:
    """Train on some hosts, each told by how it runs a command, and give the folder that they record into."""
    (folder / "trains.py").write_text(TRAINS)
    run, port = folder / "run", free_port()
    options = ["-o", str(run), "--job", "two", "--no-report", "--sample", "0.2", "--stacks", "off", "--window", "5,1,5"]
    nodes: list[Any] = []
    for number, on in enumerate(hosts):
        torchrun = ["-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1"]
        meeting = ["--master-addr", "127.0.0.1", "--master-port", port]
        command = [*DLPROF, "wrap", *options, "--", sys.executable, *torchrun, *meeting, "trains.py"]
        nodes.append(
            subprocess.Popen(
                on(command),
                cwd=folder,
                env=environment(GLOO_SOCKET_IFNAME="lo"),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    said = [node.communicate(timeout=120)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    return run


@pytest.mark.slow
@pytest.mark.skipif(not can_be_made(), reason="hosts cannot be made here: it takes root, unshare and time namespaces")
def test_a_job_of_two_hosts_is_one_run(tmp_path: Path) -> None:
    run = record(tmp_path, [partial(on_host, name) for name in HOSTS])
    told = [facts(run / f"ranks/{rank:05d}") for rank in range(2)]
    assert [(one["rank"], one["local_rank"], one["host"]) for one in told] == [(0, 0, "alpha"), (1, 0, "beta")]
    assert [one["world_size"] for one in told] == [2, 2]
    # The hosts' clocks are apart; what is written down is not.
    clocks = [one["clock"]["perf_ns"] - one["clock"]["unix_ns"] for one in told]
    assert clocks[1] - clocks[0] == pytest.approx((HOSTS["beta"] - HOSTS["alpha"]) * 10**9, abs=10**9)
    ranks = [run / f"ranks/{rank:05d}" for rank in range(2)]
    # Each step ends after an exchange that neither rank can have left before the other came to it.
    lines = [read_steps(*log_of(rank, "steps")).tables["steps"] for rank in ranks]
    assert overlap(*lines) >= 30
    exchanges = [torch_trace.read(rank / "trace.json.gz").tables["spans"] for rank in ranks]
    assert overlap(*(table[table["name"] == "gloo:all_reduce"] for table in exchanges)) == 5
    # One sampler a host, and what it read is the host's own.
    assert sorted(path.name for path in (run / "hosts").iterdir()) == sorted(HOSTS)
    for name, rank in zip(HOSTS, told, strict=True):
        readings = sampled(run / "hosts" / name, "host")
        assert readings
        apart = rank["clock"]["perf_ns"] - rank["clock"]["unix_ns"]
        assert all(abs(reading["perf_ns"] - reading["at_ns"] - apart) < 10**9 for reading in readings)
        assert not noted(run / "hosts" / name, "warning")
    opened = open_run(run)
    assert opened.hosts == tuple(HOSTS)
    assert opened.warnings == ()
    write_report(run)
    result = json.loads((run / "result.json").read_text())
    assert result["run"]["hosts"] == list(HOSTS)
    assert (result["run"]["ranks"], result["run"]["world_size"]) == ([0, 1], 2)
    assert result["run"]["exit"] == {"code": 0, "signal": None}
    assert {one["rank"] for one in result["time"]} == {0, 1}
