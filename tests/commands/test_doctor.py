"""The doctor tries what it speaks of: real processes, on this machine as it is."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dlprof.commands import doctor
from tests import jobs


def checks(cwd: Path, **env: str) -> dict[str, Any]:
    done = jobs.launch([*jobs.DLPROF, "doctor", "--format", "json"], cwd, env=jobs.environment(**env))
    assert (done.returncode, done.stderr) == (0, "")
    return {check["source"]: check for check in json.loads(done.stdout)["checks"]}


def test_every_source_is_tried_and_what_fails_comes_with_a_remedy(tmp_path: Path) -> None:
    told = checks(tmp_path)
    assert len(told) == len(doctor.CHECKS)
    for source in ("recorder", "torch", "torch.profiler", "host", "loader", "disk"):
        assert told[source]["works"], told[source]
    assert "2." in told["torch"]["found"]
    assert str(os.cpu_count()) in told["host"]["found"]
    for check in told.values():
        assert check["found"]
        assert check["works"] or check["remedy"] or check["source"] == "SLURM", check
    # Whatever was tried left nothing behind.
    assert list(tmp_path.iterdir()) == []


def test_what_is_said_of_stacks_is_what_a_reader_of_stacks_may_do() -> None:
    """py-spy need not be here, nor be let at other processes; whichever it is, it was tried."""
    check = doctor._stacks()
    beside = Path(sys.executable).parent / "py-spy"
    if not beside.exists() and shutil.which("py-spy") is None:
        assert "not installed" in check.found
    else:
        assert check.works == ("may read" in check.found)
        assert check.works or "ptrace" in check.remedy.lower()


def test_text_has_a_line_a_source_and_one_for_each_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor.Check("nsys", False, "not on the PATH", "install it")
    fine = doctor.Check("host", True, "2 cores")
    monkeypatch.setattr(doctor, "CHECKS", (lambda: found, lambda: fine))
    done = CliRunner().invoke(doctor.doctor)
    assert done.exit_code == 0
    assert [line.split() for line in done.output.splitlines()] == [
        ["no", "nsys", "not", "on", "the", "PATH"],
        ["→", "install", "it"],
        ["yes", "host", "2", "cores"],
    ]


def test_a_folder_that_cannot_be_written_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert doctor._disk().works
    (tmp_path / "runs").write_text("not a folder")
    check = doctor._disk()
    assert not check.works
    assert "-o" in check.remedy


def test_a_program_on_the_path_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not doctor._nsys().works
    program = tmp_path / "nsys"
    program.write_text("#!/bin/sh\necho NVIDIA Nsight Systems version 2026.1\n")
    program.chmod(0o755)
    assert doctor._nsys().works
    assert "version 2026.1" in doctor._nsys().found
    program.write_text("#!/bin/sh\necho no licence >&2\nexit 1\n")
    assert not doctor._nsys().works
    assert "no licence" in doctor._nsys().found


def test_a_python_without_torch_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that cannot be imported, as a broken installation has it."""
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch_cpu.so: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    doctor._ask_torch.cache_clear()
    try:
        check = doctor._torch()
        assert not check.works
        assert "libtorch_cpu.so" in check.found
        assert not doctor._trace().works
    finally:
        doctor._ask_torch.cache_clear()
