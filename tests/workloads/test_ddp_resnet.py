"""The DDP ResNet workload: the model is the paper's, the data are real files, and a fault costs time, not accuracy."""

from __future__ import annotations

import math
import re
import subprocess
from pathlib import Path

import pytest
import torch
from parts.networks import build_model

from tests.workloads import FOLDER
from tests.workloads.scripts import load, losses
from tests.workloads.scripts import train as train_workload

TINY: tuple[str, ...] = (
    "--device=cpu",
    "--images=320",
    "--batch-size=16",
    "--epochs=2",
    "--log-every=1",
    "--read-ms=0",
)
TINY += ("--optimizer=adamw", "--lr=0.003")

workload = load("ddp_resnet")


def train(data: Path, *options: str, ranks: int = 1, script: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the workload, or another script in its place, on CPU ranks."""
    return train_workload("ddp_resnet", *TINY, "--data", str(data), *options, ranks=ranks, script=script)


@pytest.fixture(scope="module")
def healthy(data: Path) -> list[float]:
    """The losses of two ranks that also draw the pictures: one does, the other waits."""
    return losses(train(data, ranks=2))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["blocking_allreduce", "slow_rank", "slow_loader_one_rank"])
def test_two_ranks_learn_and_a_fault_costs_time_and_not_accuracy(data: Path, healthy: list[float], fault: str) -> None:
    assert len(healthy) == 20
    assert sum(healthy[-3:]) < 0.6 * sum(healthy[:3])
    done = train(data, "--fault", fault, "--steps", "6", ranks=2)
    assert f"fault: {fault}" in done.stdout
    assert losses(done) == pytest.approx(healthy[:6], rel=0.02)


@pytest.mark.slow
def test_gradients_are_exchanged_once_for_the_batches_that_are_added_up(data: Path, tmp_path: Path) -> None:
    options = ["--accumulate=2", "--hook=fp16", "--find-unused", "--optimizer=lars", "--lr=2", "--steps=6"]
    job = tmp_path / "counts.py"
    job.write_text(
        f"""
import os, runpy, sys
sys.path.insert(0, {str(FOLDER)!r})
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
compress, calls = default_hooks.fp16_compress_hook, []
def counted(state, bucket):
    calls.append(bucket.is_last())
    return compress(state, bucket)
counted.__annotations__ = compress.__annotations__
default_hooks.fp16_compress_hook = counted
sys.argv = {[str(FOLDER / "ddp_resnet.py"), *TINY, "--data", str(data), *options]!r}
runpy.run_path(sys.argv[0], run_name="__main__")
with open(f"{tmp_path}/" + os.environ["RANK"], "w") as file:
    file.write(str(sum(calls)))
"""
    )
    done = train(data, *options, ranks=2, script=job)
    assert len(losses(done)) == 6
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["3", "3"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [("--hook=powersgd", "--steps=16"), ("--model=alexnet", "--steps=3"), ("--model=vgg19", "--steps=3")]
)
def test_other_hooks_and_models_train_on_two_ranks(data: Path, options: tuple[str, ...]) -> None:
    found = losses(train(data, *options, ranks=2))
    assert all(math.isfinite(loss) for loss in found)


@pytest.mark.long
def test_one_process_trains_with_its_faults_validates_and_checkpoints(data: Path, tmp_path: Path) -> None:
    faults = ("checkpoint_every_few", "garbage", "keeps_batches", "no_workers", "python_metrics", "slow_decode")
    job = tmp_path / "in_turn.py"  # one process, which imports torch once
    job.write_text(
        f"""
import runpy, sys
sys.path.insert(0, {str(FOLDER)!r})
for fault in {faults!r}:
    sys.argv = {[str(FOLDER / "ddp_resnet.py"), *TINY, "--data", str(data), "--steps=4"]!r} + ["--fault", fault]
    runpy.run_path(sys.argv[0], run_name="__main__")
sys.argv[-2:] = ["--validate-every=2", "--checkpoint-every=4"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    )
    done = train(data, script=job)
    assert len(losses(done)) == 4 * (len(faults) + 1)
    said = re.findall(r"(\d) workers, fault: (\w+)", done.stdout)
    assert said == [("0" if fault == "no_workers" else "1", fault) for fault in (*faults, "none")]
    assert len(re.findall(r"validation accuracy [01]\.\d+", done.stdout)) == 2
    saved = torch.load(data / "checkpoint.pt", weights_only=True)
    assert saved["step"] == 4
    build_model("resnet20", classes=10, small=True).load_state_dict(saved["model"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [[], ["--precision", "fp16"], ["--fault", "pageable"]])
def test_gpu_trains(data: Path, options: list[str]) -> None:
    done = train(data, "--device", "cuda", *options)
    assert len(losses(done)) == 40
