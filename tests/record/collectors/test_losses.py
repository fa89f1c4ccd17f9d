"""Losses are recorded bit for bit, the same with a seed; skipped steps and the scale are as a scaler has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.engine import RankData
from dlprof.read.run import open_run
from dlprof.record import hooks
from dlprof.record.collectors import losses as module
from dlprof.record.collectors.losses import LossScale
from dlprof.record.observed import Observed
from tests.fixtures.in_process import run_recorded
from tests.fixtures.jobs import rows

torch = pytest.importorskip("torch", reason="recording needs torch")

# It seeds nothing itself but on request, and draws from all that is seeded.
DRAWS = """
import random
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
if seeds:
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
data = TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
kept = []
for epoch in range(2):
    for x, y in DataLoader(data, batch_size=4, shuffle=True):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x + random.random() + np.random.rand()), y)
        kept.append(loss.item())
        if scaled:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            torch.autograd.backward([loss], retain_graph=True) if epoch else loss.backward()
            torch.autograd.grad(loss, model.parameters()) if epoch else None
            optimizer.step()
"""


@pytest.fixture
def losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return what records the script with a seed, and returns its losses, which are those that it has computed."""

    def record(seed: str, *, rank: int = 0, seeds: bool = False, scaled: bool = False) -> list[str]:
        monkeypatch.setenv("DLPROF_LOSSES", seed)
        monkeypatch.setenv("SLURM_PROCID", str(rank))
        run, text = str(len(list(tmp_path.iterdir()))), f"seeds, scaled = {seeds}, {scaled}" + DRAWS
        # Rank 0 says that reading them waits for the device.
        script = run_recorded(tmp_path, text, run=run, flops="off", warnings=int(rank == 0))
        table = RankData(open_run(tmp_path / run).ranks[0]).table("losses")
        assert table["step"].tolist() == list(range(16))
        assert table["loss"].tolist() == script["kept"]
        return [loss.hex() for loss in script["kept"]]

    return record


@pytest.mark.long
def test_losses_are_the_same_with_a_ranks_own_seed(
    losses: Callable[..., list[str]],
) -> None:
    first = losses("7")
    assert [losses(seed, rank=rank) == first for seed, rank in (("8", 0), ("6", 1))] == [False, True]


@pytest.mark.long
def test_a_scaler_is_taken_out_and_the_scripts_own_seed_wins(losses: Callable[..., list[str]]) -> None:
    assert losses("7", seeds=True, scaled=True) == losses("8", seeds=True, scaled=True)


def test_what_cannot_be_read_costs_the_losses_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLPROF_LOSSES", "1")
    body = DRAWS.replace("loss.backward()", "loss.as_subclass(Odd).backward()").replace("[loss]", "loss")
    odd = "\nclass Odd(torch.Tensor):\n    def item(self): raise OSError('no')\n"
    text = "seeds = scaled = False" + body.replace("kept = []", f"kept = []{odd}")
    run_recorded(tmp_path, text, warnings=2)
    known = json.loads((tmp_path / "run/ranks/00000/facts.json").read_text())
    assert known["warnings"][1].startswith("losses is off: no;")
    assert sum(row["kind"] == "train" for row in rows(tmp_path / "run/ranks/00000")) == 16


JOB = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = OPTIMIZER
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)
skipped, scales = [], []
for epoch in range(4):
    for n, batch in enumerate(DataLoader(data, batch_size=4), 16 * epoch):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        scaler.scale(loss).backward()
        if n in (0, 1, 20, 21, 50):
            model[0].weight.grad[0, 0] = float("inf")
        before = model[0].weight.detach().clone()
        scaler.step(optimizer)
        if torch.equal(before, model[0].weight):
            skipped.append(n)
        if n == 30:
            scaler.update(4096.0)
        else:
            scaler.update()
        if n == 40:
            scaler.load_state_dict(scaler.state_dict() | {"scale": 64.0, "_growth_tracker": 3})
        scales.append(scaler.get_scale())
"""

# FSDP's, which scales and updates in its own way; it exchanges what overflowed, here with itself.
SHARDED = """import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
if not dist.is_initialized():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
scaler = ShardedGradScaler("cpu", init_scale=1024.0, growth_interval=7)"""
PLAIN = 'scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)'


@pytest.mark.long
@pytest.mark.parametrize(
    ("optimizer", "scaler"),
    [
        ("torch.optim.SGD(model.parameters(), lr=0.1)", PLAIN),
        ("torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)", PLAIN),
        ("torch.optim.SGD(model.parameters(), lr=0.1)", SHARDED),
    ],
)
def test_what_is_skipped_and_the_scale_are_those_of_the_scaler(optimizer: str, scaler: str, tmp_path: Path) -> None:
    script = run_recorded(tmp_path, JOB.replace("OPTIMIZER", optimizer).replace(PLAIN, scaler))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    facts = json.loads((tmp_path / "run/ranks/00000/facts.json").read_text())
    assert facts["grad_scaler"] is True
    assert script["skipped"] == [0, 1, 20, 21, 50]
    rank = tmp_path / "run/ranks/00000"
    told = rows(rank, "loss_scale")
    assert [row["step"] for row in told if row["kind"] == "skipped"] == script["skipped"]
    last = {row["step"]: row["scale"] for row in told}
    scale, followed = 1024.0, []
    for n in range(64):
        scale = last.get(n, scale)
        followed.append(scale)
    assert followed == script["scales"]
    # A skipped step is a step all the same, and no micro-batch of the next one.
    assert [step["optimizer_steps"] for step in rows(rank) if step["backwards"]] == [1] * 64


class Followed(LossScale):
    """What follows a scaler, without wrappers on torch."""

    def _wrap(self) -> None:
        pass


class Clock:
    """A step clock that nothing steps."""

    row: Any = type("Row", (), {"number": 7, "optimizer_steps": 0})()
    owner = 0

    def begin_optimizer(self, _optimizer: Any) -> None: ...
    def end_optimizer(self) -> None: ...


def test_a_fused_optimizer_on_a_device_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the scale does not lie in the host's memory, nothing is read, and from there on nothing is claimed."""
    monkeypatch.setattr(module, "_on_host", lambda _scaler: False)
    recorder: Any = type("Recorder", (), {"clock": Clock(), "observed": Observed()})()
    followed = Followed()
    followed._recorder = recorder
    model = torch.nn.Linear(2, 1)
    fused = torch.optim.AdamW(model.parameters(), fused=True)
    plain = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.ones(1, 2)).sum())
    followed._begin(scaler)
    monkeypatch.setattr(torch.Tensor, "item", None)
    followed._stepped(scaler, plain, False, (1, 7))
    followed._look(scaler)
    followed._updated(scaler)
    followed._stepped(scaler, fused, True, (2, 8))
    followed._look(scaler)
    followed._updated(scaler)
    assert [(kind, scale) for _, kind, scale, *_ in followed._found] == [
        ("began", 8.0),
        ("skipped", 4.0),
        ("unknown", 4.0),
    ]


def test_the_wrappers_are_undone() -> None:
    kind = torch.amp.GradScaler
    before = {name: vars(kind)[name] for name in ("step", "update", "load_state_dict")}
    LossScale()
    try:
        assert all(vars(kind)[name] is not method for name, method in before.items())
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = kind("cpu", init_scale=8.0)
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        assert scaler.step(optimizer) is None
        scaler.update()
        assert scaler.get_scale() == 8.0
    finally:
        hooks.uninstall()
    assert {name: vars(kind)[name] for name in before} == before
