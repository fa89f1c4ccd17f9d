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

from tests.workloads import FOLDER


def load(name: str) -> ModuleType:
    """Import a workload without running it."""
    return importlib.import_module(name)


def train(
    name: str, *options: str, ranks: int = 2, limit_s: int = 180, script: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a workload, or another script in its place, under torchrun where there are to be several ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return subprocess.run(
        [sys.executable, *launcher, str(script or FOLDER / f"{name}.py"), *options],
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
