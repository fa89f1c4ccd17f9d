"""Steps of accelerate's loops: its loaders fetch one batch ahead, and one of them fetches on rank 0 for all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.fixtures.jobs import TORCHRUN, facts, launch, record, rows, wrapped

pytest.importorskip("accelerate", reason="accelerate is not installed")

SCRIPT = """
import sys, time
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

class Slow(IterableDataset):
    def __iter__(self):
        # What it asks a loader of its own for are no batches of the script's.
        for n in DataLoader(range(64), batch_size=None):
            time.sleep(0.002)
            yield torch.full((8,), n / 64), torch.tensor([n / 64])

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
data = Slow() if "iterable" in sys.argv else TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
training = DataLoader(data, batch_size=4, shuffle=None if "iterable" in sys.argv else True)
validation = DataLoader(data, batch_size=8)
model, optimizer, training, validation = accelerator.prepare(model, optimizer, training, validation)
for epoch in range(2):
    for x, y in training:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        for x, y in validation:
            model(x)
accelerator.end_training()
"""


def epochs(steps: list[dict[str, object]], trained: int, validated: int) -> None:
    """Check that two epochs of so many batches each were marked batch by batch."""
    assert [row["kind"] for row in steps] == (["train"] * trained + ["validation"] * validated) * 2
    assert [row["optimizer_steps"] for row in steps] == ([0, 1] * (trained // 2) + [0] * validated) * 2
    # The batch after the first is fetched before the first is used, and none beside the last.
    fetches = [2] + [1] * (trained - 1) + [2] + [1] * (validated - 1)
    assert [row["fetches"] for row in steps] == fetches * 2
    edges = [row["step"] for row in steps if row["first"]]
    epoch = trained + validated
    assert edges == [n + at for n in (0, epoch) for at in (0, trained - 1, trained, epoch - 1)]


def test_each_batch_of_a_loader_that_looks_ahead_is_a_step(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    record(tmp_path / "train.py", folder=tmp_path / "run", options=["--window", "4,1,2"])
    rank = tmp_path / "run/ranks/00000"
    epochs(rows(rank), 16, 8)
    told = facts(rank)
    loaders = [(loader["role"], loader["batch_size"], loader["shuffle"]) for loader in told["loaders"]]
    assert loaders == [("train", 4, True), ("validation", 8, False)]
    assert (told["window"]["state"], told["warnings"]) == ("exported", [])


@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_ranks_have_the_same_steps_whoever_fetches(kind: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    launcher = [sys.executable, *TORCHRUN]
    done = launch(wrapped(tmp_path / "run", [*launcher, "train.py", kind], "--no-trace"), tmp_path)
    assert done.returncode == 0, done.stderr
    for number in (0, 1):
        rank = tmp_path / f"run/ranks/{number:05d}"
        epochs(rows(rank), 8, 4)
        assert facts(rank)["warnings"] == []
        if kind == "iterable":
            # Rank 1 asks no loader: it waits for what rank 0 sends, and that is its wait for data.
            waited = [row["fetch_ns"] for row in rows(rank) if row["kind"] == "train" and not row["first"]]
            assert min(waited) > 8_000_000
            # Each of the batches that rank 0 asks for is told of, 16 to train on and 8 more an epoch.
            batches = [row for row in rows(rank, "loading") if row["kind"] in ("first", "batch")]
            assert len(batches) == (0 if number else 48)
            assert all(row["dur_ns"] > 8_000_000 for row in batches)


def test_accelerate_launch_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_machines", "1"]
    settings = ["--num_processes", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    done = launch(wrapped(tmp_path / "run", [*launcher, *settings, "train.py"], "--no-trace"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "run/ranks").iterdir()] == ["00000"]
    epochs(rows(tmp_path / "run/ranks/00000"), 16, 8)
