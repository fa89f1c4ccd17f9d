"""Runs the reference workloads as a user would: in their smallest form, on CPU ranks."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "workloads"


def load(name: str) -> ModuleType:
    """Import a workload's file without running it."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(name: str, *options: str, ranks: int = 2, limit_s: int = 180) -> subprocess.CompletedProcess[str]:
    """Run a workload, under torchrun where there are to be several ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return subprocess.run(
        [sys.executable, *launcher, str(FOLDER / f"{name}.py"), *options],
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


def planted(name: str) -> set[str]:
    """Return the faults that a workload's code looks for."""
    return set(re.findall(r'args\.fault [!=]= "(\w+)"', (FOLDER / f"{name}.py").read_text()))


def listed() -> str:
    """Return the text that lists all workloads and their faults."""
    return (FOLDER / "README.md").read_text()
