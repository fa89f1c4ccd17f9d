"""DeepSpeed on CPU ranks, ZeRO 1 to 3, under its own launcher and under torchrun."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.jobs import environment, facts, launch, rows, wrapped

if importlib.util.find_spec("deepspeed") is None:  # its import decides on a device: not in this process
    pytest.skip("deepspeed is not installed", allow_module_level=True)

SCRIPT = """
import sys
import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": int(sys.argv[-1])},
}
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for x, y in DataLoader(data, batch_size=4):
    loss = nn.functional.mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
print("loss", loss.item(), flush=True)
"""

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
THEIRS = ["-m", "deepspeed.launcher.runner", "--launcher", "local", "--num_gpus", "2"]


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "stage"), [(TORCHRUN, 1), (TORCHRUN, 2), (TORCHRUN, 3)])
def test_each_micro_batch_is_a_step(launcher: list[str], stage: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, *launcher, "train.py", str(stage)]
    env = environment(DS_ACCELERATOR="cpu")
    done = launch(wrapped(tmp_path / "run", command, "--window", "4,1,2"), tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss ") == 2
    for number in (0, 1):
        rank = tmp_path / f"run/ranks/{number:05d}"
        assert [row["kind"] for row in rows(rank)] == ["train"] * 16 + ["other"]
        assert [row["optimizer_steps"] for row in rows(rank)] == [0, 1] * 8 + [0]
        told = facts(rank)
        assert (told["window"]["state"], told["warnings"]) == ("exported", [])
        assert told["models"][0]["class"] == "Sequential"
