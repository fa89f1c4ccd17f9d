"""Every workload under a real nsys: its exit status stays, and the run reads its own steps back from the export."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from dlprof.commands.report import analyse
from dlprof.read.nsys import export
from dlprof.read.run import open_run
from tests.fixtures.jobs import DLPROF, environment, launch, rows

torch = pytest.importorskip("torch", reason="recording needs torch")
if not hasattr(torch._C, "_nvtx"):
    pytest.importorskip("nvtx", reason="this PyTorch has no NVTX of its own")

# The package nvtx may be there and nowhere else.
PATHS = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}

SCRIPTS = sorted((Path(__file__).parents[2] / "workloads").glob("*.py"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nsys") is None, reason="NVIDIA's nsys is not installed")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_workload_reads_its_steps_back(script: Path, tmp_path: Path) -> None:
    words = ["run", str(script), "-o", "run", "--nsys", "--no-report", "--no-sample", "--", "--steps", "16"]
    done = launch([*DLPROF, *words], tmp_path, env=environment(**PATHS), timeout=500)
    if "is not installed" in done.stderr or "No module named" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    run = open_run(tmp_path / "run")
    assert run.ranks
    for rank in run.ranks:
        reading = export.read(rank.files["nsys"], rank.pieces["nsys"])
        logged = {row["step"] for row in rows(tmp_path / f"run/ranks/{rank.index:05d}") if "step" in row}
        marked = reading.tables["traced_steps"]["step"].tolist()
        assert len(marked) >= 3
        assert set(marked) <= logged | {max(logged) + 1}
        assert {"dlprof::forward", "dlprof::backward"} <= set(reading.tables["spans"]["name"].unique())


# What record_nsys_workloads.py recorded with a real nsys, of each workload that needs nothing more than PyTorch.
EXPORTS = sorted((Path(__file__).parents[1] / "golden" / "nsys").glob("*.sqlite.gz"))


@pytest.mark.long
@pytest.mark.parametrize("path", EXPORTS, ids=lambda path: path.name.partition(".")[0])
def test_a_workload_is_read_back_from_its_export(path: Path) -> None:
    run = open_run(path)
    assert run.ranks
    for rank in run.ranks:
        reading = export.read(path, rank.pieces["nsys"])
        steps, names = reading.tables["traced_steps"], set(reading.tables["spans"]["name"])
        assert len(steps) >= 3
        assert (steps["dur_ns"] > 0).all()
        assert {"dlprof::forward", "dlprof::backward"} <= names
    result = analyse(path, 1)
    assert not result.found  # nobody saw what the CPU computed
