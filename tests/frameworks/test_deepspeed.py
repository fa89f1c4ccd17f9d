"""DeepSpeed on CPU ranks, ZeRO 1 to 3, under its own launcher and under torchrun."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fixtures.jobs import TORCHRUN, environment, facts, free_port, launch, rows, wrapped

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
for epoch in range(10**9 if "long" in sys.argv else 1):
    for n, (x, y) in enumerate(DataLoader(data, batch_size=4)):
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        if "fails" in sys.argv and n == 9 and torch.distributed.get_rank() == 1:
            sys.exit(9)
    if epoch == 0:
        print(f"loss {loss.item()}\\n", end="", flush=True)
"""

THEIRS = ["-m", "deepspeed.launcher.runner", "--num_accelerators", "2"]
BOUND = [*THEIRS, "--bind_cores_to_rank"]


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Have DeepSpeed build its operator, in a place of its own: a lock that a killed build left would hang it.

    It takes a compiler minutes where the machine has other work, and the tests of one launch wait for no compiler.
    """
    folder = tmp_path_factory.mktemp("builds")
    env = environment(DS_ACCELERATOR="cpu", TORCH_EXTENSIONS_DIR=str(folder / "extensions"))
    (folder / "train.py").write_text(SCRIPT)
    done = launch([sys.executable, *TORCHRUN, "train.py", "1"], folder, env=env, timeout=500)
    assert done.returncode == 0, done.stderr
    return env


def records(command: list[str], env: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, *command]
    if "deepspeed.launcher.runner" in command:
        command.insert(3, f"--master_port={free_port()}")
    return launch(wrapped(folder / "run", command, "--window", "4,1,2"), folder, env=env, timeout=500)


@pytest.mark.slow
@pytest.mark.timeout(600)  # where a compiler makes DeepSpeed's operator
@pytest.mark.parametrize(("launcher", "stage"), [(TORCHRUN, 1), (TORCHRUN, 2), (TORCHRUN, 3), (THEIRS, 1), (BOUND, 2)])
def test_an_optimizers_step_is_one_with_all_its_micro_batches(
    launcher: Sequence[str], stage: int, env: dict[str, str], tmp_path: Path
) -> None:
    if launcher is BOUND and shutil.which("numactl") is None:
        pytest.skip("numactl, which DeepSpeed binds with, is not installed")
    done = records([*launcher, "train.py", str(stage)], env, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss ") == 2
    assert sorted(path.name for path in (tmp_path / "run/ranks").iterdir()) == ["00000", "00001"]
    for number in (0, 1):
        rank = tmp_path / f"run/ranks/{number:05d}"
        assert [row["kind"] for row in rows(rank)] == ["train"] * 8 + ["other"]
        assert [(row["backwards"], row["optimizer_steps"]) for row in rows(rank)] == [(2, 1)] * 8 + [(0, 0)]
        told = facts(rank)
        assert (told["window"]["state"], told["warnings"]) == ("exported", [])
        assert told["models"][0]["class"] == "Sequential"
        assert (told["rank"], told["local_rank"], told["world_size"]) == (number, number, 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_their_launchers_status_is_that_of_the_rank_that_failed(env: dict[str, str], tmp_path: Path) -> None:
    done = records([*THEIRS, "train.py", "fails", "1"], env, tmp_path)
    assert done.returncode == 9, done.stderr
    for number in (0, 1):
        assert len([row for row in rows(tmp_path / f"run/ranks/{number:05d}") if row["kind"] == "train"]) >= 4
    assert json.loads((tmp_path / "run/run.json").read_text())["exit"] == {"code": 9, "signal": None}
