"""The words before a command under nsys, and what becomes of its report."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.errors import DlprofError
from dlprof.record.launch import nsys
from dlprof.record.launch.nsys import Nsys


def program(folder: Path, body: str = "exit 3") -> str:
    """Put a stand-in for nsys into a folder."""
    (folder / "nsys").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "nsys").chmod(0o755)
    return str(folder / "nsys")


def test_a_window_is_opened_by_the_job_and_without_one_all_is_recorded(tmp_path: Path) -> None:
    window, whole = (Nsys("nsys", "nsys", on).words(tmp_path) for on in (True, False))
    assert {"--capture-range=cudaProfilerApi", "--capture-range-end=stop"} == set(window) - set(whole)
    assert {"--cuda-graph-trace=node", "--kill=none", f"--output={tmp_path / 'nsys'}"} <= set(whole)


def test_tasks_of_a_host_have_reports_of_their_own(tmp_path: Path) -> None:
    env = {"PATH": str(tmp_path)}
    with pytest.raises(DlprofError, match="no nsys on the PATH"):
        nsys.launcher(env, window=True)
    program(tmp_path)
    assert nsys.launcher(env, window=True).name == "nsys"
    assert nsys.launcher({**env, "SLURM_PROCID": "3"}, window=False).name == "nsys-3"


def test_what_was_left_is_exported_or_named(tmp_path: Path) -> None:
    made = Nsys(program(tmp_path), "nsys", window=True)
    (line,) = made.ended(tmp_path)
    assert "--window" in line
    (tmp_path / "nsys.qdstrm").touch()
    assert "nsys.qdstrm" in made.ended(tmp_path)[0]
    (tmp_path / "nsys.nsys-rep").touch()
    assert "nsys-ui" in made.ended(tmp_path)[0]
    program(tmp_path, 'for w; do case $w in --output=*) touch "${w#*=}";; esac; done')
    assert made.ended(tmp_path) == []
    assert (tmp_path / "nsys.sqlite").exists()
