"""What facts.json tells, and what it must never tell."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent

import pytest

from dlprof.collectors.facts import environment
from tests.jobs import environment as job_environment
from tests.jobs import facts, launch, wrapped

pytest.importorskip("torch", reason="recording needs torch")


def test_the_environment_holds_what_shapes_training_and_no_secret() -> None:
    shaping = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2", "SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": ""}
    others = {"HOME": "/root", "TORCH_HUB_TOKEN": "x", "CUDA_API_KEY": "x", "PYTORCH_PASSWORD": "x", "SLURM_JWT": "x"}
    assert environment(shaping | others) == shaping


@pytest.mark.long
def test_settings_of_models_optimizers_precision_and_the_launchers_rank(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        dedent(
            """
            import torch
            from torch import nn
            from torch.utils.data import DataLoader, IterableDataset
            torch.set_float32_matmul_precision("high")
            class Stream(IterableDataset):
                def __iter__(self):
                    return iter(torch.randn(8, 3, 4, 4))
            model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 1))
            model.to(memory_format=torch.channels_last)
            model[0].bias.requires_grad_(False)
            groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.5}]
            optimizer = torch.optim.AdamW(groups, lr=0.25, foreach=False)
            scaler = torch.amp.GradScaler("cpu")
            for x in DataLoader(Stream(), batch_size=4):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = nn.functional.relu(model(x)).sum()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            """
        )
    )
    env = job_environment(SLURM_PROCID="3", SLURM_LOCALID="1", TORCHELASTIC_RESTART_COUNT="2")
    done = launch(wrapped(tmp_path / "run", [sys.executable, script], "--no-trace"), tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    told = facts(tmp_path / "run/ranks/00003.r2")
    assert (told["rank"], told["local_rank"], told["restart"]) == (3, 1, 2)
    assert told["models"] == [
        {
            "class": "Sequential",
            "parameters": 4 * 27 + 4 + 16 + 1,
            "parameter_bytes": 4 * (4 * 27 + 4 + 16 + 1),
            "trainable_parameters": 4 * 27 + 16 + 1,
            "dtypes": {"float32": 4},
            "modules": 4,
            "compiled": False,
            "channels_last": True,
            "ddp": None,
            "data_parallel": False,
            "fsdp": False,
        }
    ]
    assert told["optimizers"] == [
        {"class": "AdamW", "fused": None, "foreach": False, "parameter_groups": 2, "parameters": 4, "lr": 0.25}
    ]
    (loader,) = told["loaders"]
    assert (loader["dataset"], loader["iterable"], loader["dataset_length"]) == ("Stream", True, None)
    assert told["autocast"] == {"enabled": True, "dtype": "bfloat16"}
    assert told["grad_scaler"] is True
    assert told["matmul"]["float32_precision"] == "high"
    assert told["device"]["type"] in ("cpu", "cuda")
    assert told["warnings"] == []


def test_a_model_that_cannot_be_described_costs_its_own_facts_and_says_why(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        dedent(
            """
            import torch
            class Shy(torch.nn.Linear):
                def modules(self):
                    raise ValueError("not today")
            model = Shy(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
            for _ in range(8):
                model(torch.randn(2, 4)).sum().backward()
                optimizer.step()
            """
        )
    )
    done = launch(wrapped(tmp_path / "run", [sys.executable, script], "--no-trace"), tmp_path)
    assert done.returncode == 0, done.stderr
    told = facts(tmp_path / "run/ranks/00000")
    assert (told["models"], [o["class"] for o in told["optimizers"]]) == ([], ["SGD"])
    assert told["warnings"] == ["facts: no answer for model (ValueError: not today)"]
