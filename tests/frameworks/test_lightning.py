"""Steps of Lightning's loops: validation before training, closures inside the optimizer, several loaders at once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.fixtures.jobs import facts, launch, record, rows

pytest.importorskip("lightning", reason="lightning is not installed")

SCRIPT = """
import sys
import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    def training_step(self, batch, number):
        x, y = batch["a"] if isinstance(batch, dict) else batch
        return nn.functional.mse_loss(self.net(x), y)
    def validation_step(self, batch, number):
        self.log("validation", nn.functional.mse_loss(self.net(batch[0]), batch[1]))
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Stream(IterableDataset):
    def __iter__(self):
        return iter(data)

data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
training = DataLoader(Stream() if "stream" in sys.argv else data, batch_size=4)
if "several" in sys.argv:
    training = {"a": training, "b": DataLoader(data, batch_size=4)}
trainer = lightning.Trainer(
    accelerator="cpu", devices=1, max_epochs=2, accumulate_grad_batches=2 if "accumulate" in sys.argv else 1,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
model = Net()
graphs = []
def backend(graph, inputs):
    graphs.append(len(graph.graph.nodes))
    return graph.forward
if "compile" in sys.argv:
    model = torch.compile(model, backend=backend)
trainer.fit(model, training, DataLoader(data, batch_size=16))
print("graphs", graphs, flush=True)
"""


@pytest.mark.parametrize(
    ("kind", "batches", "fetches"), [("plain", 1, 1), ("accumulate", 2, 2), ("several", 1, 2), ("stream", 1, 1)]
)
def test_an_optimizers_step_is_one_and_validation_before_training_is_none(
    kind: str, batches: int, fetches: int, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    record(tmp_path / "train.py", kind, folder=tmp_path / "run", options=["--window", "3,1,2"])
    rank = tmp_path / "run/ranks/00000"
    steps = rows(rank)
    epoch = 16 // batches
    assert [row["kind"] for row in steps] == ["validation"] * 2 + (["train"] * epoch + ["validation"] * 4) * 2
    trained = [row for row in steps if row["kind"] == "train"]
    assert {(row["backwards"], row["optimizer_steps"]) for row in trained} == {(batches, 1)}
    # A stream's end is known only by asking: one batch ahead.
    inner = [row["fetches"] for row in trained[1 : epoch - 1] + trained[epoch + 1 : -1]]
    assert inner == [fetches] * 2 * (epoch - 2)
    assert [row["step"] for row in steps if row["profiled"]] == [4, 5, 6, 7, 8, 9]
    told = facts(rank)
    assert (told["window"]["state"], told["warnings"]) == ("exported", [])
    assert {loader["role"] for loader in told["loaders"]} == {"train", "validation"}


def test_compiled_steps_have_the_same_graphs_and_are_marked_by_what_is_not_compiled(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    plain = launch([sys.executable, "train.py", "compile"], tmp_path)
    done = record(tmp_path / "train.py", "compile", folder=tmp_path / "run", options=["--window", "3,1,2"])
    assert plain.stdout == done.stdout
    assert "graphs [" in plain.stdout
    # No module is called where a step is one compiled function: a validation batch is then not told from a fetch.
    trained = [row for row in rows(tmp_path / "run/ranks/00000") if row["kind"] == "train"]
    assert [(row["backwards"], row["optimizer_steps"]) for row in trained] == [(1, 1)] * 32
    assert [row["step"] for row in trained if row["first"]] == [0, 16]
