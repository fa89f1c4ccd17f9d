"""Real gradient scalers under dlprof: what they skipped, and their scale, as they tell it themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlprof.record import hooks
from dlprof.record.model import loss_scale
from dlprof.record.model.loss_scale import LossScale
from dlprof.record.observed import Observed
from tests.fixtures.in_process import run_recorded
from tests.fixtures.jobs import rows

torch = pytest.importorskip("torch", reason="recording needs torch")

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
    told = [json.loads(line) for line in (rank / "loss_scale.jsonl").read_text().splitlines()]
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
    monkeypatch.setattr(loss_scale, "_on_host", lambda _scaler: False)
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
