"""The Lightning workload: it learns alone and under torchrun, and says what it lacks where Lightning is not there."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from tests.workloads.scripts import load

TINY = ["--device=cpu", "--width=4", "--size=16", "--batch-size=16", "--workers=0", "--read-ms=0", "--log-every=10"]


there = importlib.util.find_spec("lightning") is not None


@pytest.fixture
def workload(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The workload; where Lightning is not installed, on classes that do nothing."""
    if not there:
        lightning, pytorch, callbacks = (ModuleType(f"lightning{n}") for n in ("", ".pytorch", ".pytorch.callbacks"))
        lightning.LightningModule = torch.nn.Module  # type: ignore[attr-defined]
        callbacks.Callback = object  # type: ignore[attr-defined]
        for module in (lightning, pytorch, callbacks):
            monkeypatch.setitem(sys.modules, module.__name__, module)
    yield load("lightning_cnn")
    sys.modules.pop("lightning_cnn")


def test_its_step_gives_the_loss_of_its_network_and_counts_only_where_that_is_planted(workload: ModuleType) -> None:
    args = workload.parse([*TINY, "--fault=python_callback"])
    (pictures, labels) = next(iter(workload.build_loader(args, shuffle=False)))
    loss = workload.Classifier(args).training_step((pictures, labels), 0)
    assert 1 < loss.item() < 5
    (counting,) = args.callbacks
    counting.on_train_batch_end(None, None, None, (pictures, labels), 0)
    assert sum(counting.seen.values()) == pictures.numel()
