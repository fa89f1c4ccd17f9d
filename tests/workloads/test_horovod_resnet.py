"""The Horovod workload: it is recorded under its own launcher, and without Horovod it says in a line what it needs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom

from tests.fixtures.jobs import DLPROF, launch
from tests.workloads.scripts import FOLDER, listed, load, losses, planted, train

workload = load("horovod_resnet")
there = importlib.util.find_spec("horovod") is not None


@pytest.mark.skipif(there, reason="horovod is installed")
def test_without_horovod_it_says_what_it_needs() -> None:
    done = train("horovod_resnet", ranks=1)
    (said,) = done.stderr.strip().splitlines()
    assert done.returncode == 1
    assert said.startswith("horovod_resnet.py needs Horovod")
    assert "horovodrun" in said


@pytest.mark.slow
@pytest.mark.skipif(not there, reason="horovod is not installed")
def test_its_ranks_exchange_gradients_within_their_optimizer(tmp_path: Path) -> None:
    command = [*DLPROF, "run", str(FOLDER / "horovod_resnet.py"), "--procs", "2", "-o", "run", "--", "--steps", "40"]
    done = launch(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(losses(done)) == 2
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["run"]["world_size"], result["run"]["ranks"]) == (2, [0, 1])
    assert {t["rank"] for t in result["time"] if t["category"] == "communication" and t["ns"] > 0} == {0, 1}
    assert [e["collective"] for e in result["exchanges"]] == ["all_reduce"]


def test_its_model_learns_its_pictures() -> None:
    torch.manual_seed(0)
    model = workload.build_resnet(width=8, blocks=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    pictures = workload.Patterns(320, 16, 0.0, seed=0)
    losses = []
    for step in range(20):
        some = [pictures[i] for i in range(step * 16, step * 16 + 16)]
        x, y = torch.stack([picture for picture, _ in some]), torch.tensor([label for _, label in some])
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])


def test_every_fault_is_planted_and_listed() -> None:
    assert planted("horovod_resnet") == set(workload.FAULTS)
    assert all(f"`{fault}`" in listed() for fault in workload.FAULTS)
