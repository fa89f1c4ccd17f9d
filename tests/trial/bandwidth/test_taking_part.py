"""Ranks that a launcher started: rank 0 prints and saves, and a rank that never comes is one line on rank 0."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="exchanging needs torch")

from tests.fixtures.jobs import DLPROF, environment, free_port, launch

ASKED = ("bandwidth", "--sizes", "64K", "--iterations", "3", "--collectives", "all_reduce", "--backend", "gloo")


@pytest.mark.long
def test_under_torchrun_rank_0_prints_and_saves(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = launch([*torchrun, "-m", "dlprof", *ASKED, "--quiet"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all_reduce reaches") == 1
    data = json.loads((tmp_path / "runs/bandwidth-gloo-2-ranks-1-hosts.json").read_text())
    assert [t["correct"] for t in data["timings"]] == [True]


@pytest.mark.long
def test_a_rank_that_is_missing_is_one_line_on_rank_0(tmp_path: Path) -> None:
    port = free_port()

    def rank(r: int) -> subprocess.Popen[str]:
        env = environment(RANK=str(r), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        words = [*DLPROF, *ASKED, "--timeout", "2"]
        return subprocess.Popen(words, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    came = [rank(0), rank(1)]
    said = [process.communicate(timeout=120) for process in came]
    assert [process.returncode for process in came] == [1, 1]
    assert [out for out, _ in said] == ["", ""]
    (line,) = said[0][1].splitlines()
    assert line.startswith(f"dlprof: the 3 ranks have not met at 127.0.0.1:{port} within 2 s")
    assert said[1][1] == ""
    assert list(tmp_path.iterdir()) == []
