"""The Lightning workload: it learns alone and under torchrun, and says what it lacks where Lightning is not there."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from tests.workloads.scripts import load, losses, train

TINY = ["--device=cpu", "--width=4", "--size=16", "--batch-size=16", "--workers=0", "--read-ms=0", "--log-every=10"]

FAULTS = ("no_workers", "python_callback", "reads_every_step", "validates_often")

there = importlib.util.find_spec("lightning") is not None


@pytest.mark.slow
@pytest.mark.skipif(not there, reason="lightning is not installed")
@pytest.mark.parametrize("ranks", [1, 2])
def test_it_learns(ranks: int) -> None:
    found = losses(train("lightning_cnn", *TINY, "--steps=40", ranks=ranks))
    assert len(found) == 4
    assert found[-1] < 0.8 * found[0]


@pytest.mark.skipif(there, reason="lightning is installed")
def test_without_lightning_it_says_what_it_needs() -> None:
    done = train("lightning_cnn", ranks=1)
    assert (done.returncode, done.stderr.strip().splitlines()) == (
        1,
        ["lightning_cnn.py needs Lightning: pip install 'lightning>=2.4'"],
    )


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


def test_every_fault_is_planted_by_other_settings(workload: ModuleType) -> None:
    def settings(*options: str) -> list[object]:
        args = workload.parse(["--device=cuda", *options])
        return [args.workers, [type(c) for c in args.callbacks], args.check_loss.__name__, args.validation]

    healthy = settings()
    assert healthy == settings() == [8, [], "<lambda>", {"limit_val_batches": 0}]
    changed = {fault: [a != b for a, b in zip(settings("--fault", fault), healthy, strict=True)] for fault in FAULTS}
    assert changed == {fault: [n == place for place in range(4)] for n, fault in enumerate(FAULTS)}


def test_its_step_gives_the_loss_of_its_network_and_counts_only_where_that_is_planted(workload: ModuleType) -> None:
    args = workload.parse([*TINY, "--fault=python_callback"])
    (pictures, labels) = next(iter(workload.build_loader(args, shuffle=False)))
    loss = workload.Classifier(args).training_step((pictures, labels), 0)
    assert 1 < loss.item() < 5
    (counting,) = args.callbacks
    counting.on_train_batch_end(None, None, None, (pictures, labels), 0)
    assert sum(counting.seen.values()) == pictures.numel()
