"""Runs the reference workloads as a user would: in their smallest form, on CPU ranks."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.fixtures.jobs import as_ranks
from tests.workloads import FOLDER

_GPT = "--device=cpu --width=32 --length=16 --batch-size=8 --layers=2 --log-every=10"
# The smallest form of each.
TINY = {
    name: options.split()
    for name, options in {
        "amp_transformer": f"{_GPT} --lr=0.003",
        "bert_pretrain": f"{_GPT} --length=20 --batch-size=16 --layers=1 --vocabulary=301 --warmup=2 --lr=0.01",
        "data_parallel": "--device=cpu --width=4 --size=16 --batch-size=16 --workers=0 --log-every=10",
        "deepspeed_gpt": f"{_GPT} --lr=0.01",
        "dlrm_like": "--device=cpu --rows=500 --width=8 --hidden=32 --batch-size=64 --log-every=10 --bag=4",
        "fsdp_gpt": f"{_GPT} --lr=0.01",
        "lightning_cnn": "--device=cpu --width=4 --size=16 --batch-size=16 --workers=0 --read-ms=0 --log-every=10",
        "model_parallel": "--device=cpu",
        "moe_transformer": f"{_GPT} --heads=4 --lr=0.01",
        "pipeline_transformer": f"{_GPT} --batch-size=16 --layers=4 --lr=0.01",
        "tensor_parallel_gpt": f"{_GPT} --heads=8 --lr=0.01",
    }.items()
}


def load(name: str) -> ModuleType:
    """Import a workload without running it."""
    return importlib.import_module(name)


def train(
    name: str, *options: str, ranks: int = 2, limit_s: int = 180, script: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a workload, or another script in its place, as so many ranks."""
    path = script or FOLDER / f"{name}.py"
    return subprocess.run(
        as_ranks(path, *options, many=ranks) if ranks > 1 else [sys.executable, str(path), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    """Return the losses that a run printed; fail where it did not end well."""
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(x) for x in re.findall(r"loss (\S+)", done.stdout)]


def refusal(workload: ModuleType, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the words with which a workload refuses a command line; fail where it takes it."""
    with pytest.raises(SystemExit) as stopped:
        workload.parse(list(options))
    assert stopped.value.code == 2
    return capsys.readouterr().err
