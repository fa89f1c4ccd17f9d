"""The loader workload: every storage and start method gives the same records, and each fault is where FAULTS says."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dlprof.analysis.rules import RULES

SCRIPT = Path(__file__).parents[2] / "workloads" / "loader_variants.py"
TINY = ["--device=cpu", "--records=256", "--batch-size=16", "--steps=20", "--read-ms=0", "--layers=1"]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("loader_variants", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


workload = load()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def train(data: Path, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *TINY, "--data", str(data), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("storage", ["files", "mapped", "tar"])
def test_every_storage_holds_the_same_records(data: Path, storage: str) -> None:
    args = workload.parse([*TINY, "--workers=0", "--storage", storage, "--data", str(data)])
    folder = workload.make_records(data, args.records)
    sums: dict[int, float] = {}
    for records, labels in workload.build_loader(args, folder):
        for record, label in zip(records, labels, strict=True):
            sums[int(label)] = sums.get(int(label), 0.0) + float(record.sum())
    args = workload.parse([*TINY, "--workers=0", "--data", str(data)])
    plain: dict[int, float] = {}
    for records, labels in workload.build_loader(args, folder):
        for record, label in zip(records, labels, strict=True):
            plain[int(label)] = plain.get(int(label), 0.0) + float(record.sum())
    assert sums == pytest.approx(plain, rel=1e-3)


@pytest.mark.parametrize(
    "options",
    [["--storage", "tar"], ["--storage", "mapped", "--start-method", "spawn"], ["--fault", "workers_restart"]],
    ids=["tar", "spawned", "restart"],
)
def test_it_trains(data: Path, options: list[str]) -> None:
    assert re.search(r"^20 steps  loss \d", train(data, *options), re.MULTILINE)


def test_every_fault_is_planted_and_its_rule_exists(capsys: pytest.CaptureFixture[str]) -> None:
    planted = re.findall(r'args\.fault == "(\w+)"', SCRIPT.read_text())
    assert set(planted) == set(workload.FAULTS)
    assert set(workload.FAULTS.values()) <= {rule.id for rule in RULES}
    for fault in workload.NEEDS_GPU:
        with pytest.raises(SystemExit):
            workload.parse(["--device", "cpu", "--fault", fault])
        assert "needs a GPU" in capsys.readouterr().err
