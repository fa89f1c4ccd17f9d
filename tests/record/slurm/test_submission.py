"""Submitting where it cannot be: one clear line. Where it can: tests/robustness/test_slurm.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dlprof.errors import DlprofError
from dlprof.record.slurm import cores_of_nodes, submit


def test_without_sbatch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DlprofError, match="sbatch is not on the PATH"):
        submit("#!/bin/bash\n")
    assert cores_of_nodes(None) is None


def test_what_sbatch_says_where_it_has_no_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if shutil.which("sbatch") is None:
        pytest.skip("SLURM is not installed")
    # It waits a minute for a file that is not there.
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=none\n")
    monkeypatch.setenv("SLURM_CONF", str(conf))
    with pytest.raises(DlprofError, match=r"sbatch did not take the job: .*SlurmctldHost"):
        submit("#!/bin/bash\n")
    assert cores_of_nodes("all") is None
