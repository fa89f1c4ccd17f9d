"""Submitting where it cannot be: one clear line. Where it can: tests/robustness/test_slurm.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dlprof.errors import DlprofError
from dlprof.record.slurm.submission import submit


def test_without_sbatch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DlprofError, match="sbatch is not on the PATH"):
        submit("#!/bin/bash\n")


def test_what_sbatch_says_where_it_has_no_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if shutil.which("sbatch") is None:
        pytest.skip("SLURM is not installed")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none"))
    with pytest.raises(DlprofError, match=r"sbatch did not take the job: .*none"):
        submit("#!/bin/bash\n")
