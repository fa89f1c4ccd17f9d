"""A recording has few files, however much is recorded: shared disks are slow to make one."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import pytest

from dlprof.files import boot
from dlprof.read.run import open_run
from dlprof.run_folder import in_hosts, in_ranks
from tests.fixtures.jobs import (
    COMPILES_NOTHING,
    as_ranks,
    environment,
    free_port,
    launch,
    noted,
    rows,
    sampled,
    spawned,
    wrapped,
)

pytest.importorskip("torch", reason="recording needs torch")

TRAINS = (
    COMPILES_NOTHING
    + """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for (x,) in DataLoader(TensorDataset(torch.ones(120, 8)), batch_size=4, num_workers=2):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
dist.destroy_process_group()
"""
)

RANK = {"facts.json", "fetches.jsonl", "records.jsonl", "trace.json.gz"}
HOST = {"notes", "samples.jsonl", "stacks.jsonl"}


@pytest.mark.long
def test_a_rank_and_a_host_leave_four_files_each_whatever_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    options = ("--losses", "7", "--set", "loader.prefetch_factor=3")
    done = launch(wrapped(tmp_path / "run", as_ranks(tmp_path / "train.py"), *options), tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    for rank in in_ranks(tmp_path / "run"):
        assert {path.name for path in rank.iterdir()} == RANK
        found = {json.loads(line)["log"] for line in (rank / "records.jsonl").read_text().splitlines()}
        assert {"held", "loading", "losses", "modules", "overrides", "stalls", "steps"} <= found
        assert sum(row.get("steps", 1) for row in rows(rank)) >= 60
    (host,) = in_hosts(tmp_path / "run")
    # Where py-spy may not look, there are no stacks.
    assert {path.name.partition("-")[0] for path in host.iterdir()} <= HOST
    assert sorted(word["folder"] for word in noted(host, "rank")) == ["00000", "00001"]
    assert all(sampled(host, "processes", rank) for rank in ("00000", "00001"))
    run = open_run(tmp_path / "run")
    assert [rank.index for rank in run.ranks] == [0, 1]


@pytest.mark.slow
def test_with_a_wrap_for_each_rank_they_are_as_many(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    command = wrapped(tmp_path / "run", [sys.executable, tmp_path / "train.py"])
    step = {"OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "1", "WORLD_SIZE": "2"}
    step |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [{"OMPI_COMM_WORLD_RANK": str(n), "RANK": str(n), "LOCAL_RANK": str(n)} for n in range(2)]
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(spawned(command, env=environment(**step, **of), cwd=tmp_path)) for of in ranks]
        assert [job.wait(240) for job in jobs] == [0, 0]
    assert [{path.name for path in rank.iterdir()} for rank in in_ranks(tmp_path / "run")] == [RANK, RANK]
    (host,) = in_hosts(tmp_path / "run")
    kinds = [path.name.partition("-")[0] for path in host.iterdir()]
    assert len(kinds) == len(set(kinds))
    assert {*kinds} <= HOST
    # One more for the tasks of this host, and a mark of their end.
    tasks = sorted(path.name for path in (tmp_path / "run/tasks").iterdir())
    assert tasks == ["2-ended", f"{host.name}~{boot()[:8]}.jsonl"]
