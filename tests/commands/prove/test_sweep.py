"""`dlprof sweep` runs a script with each of several values, shows the curve, and goes on where it stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from dlprof.cli import cli
from tests.fixtures import jobs
from tests.fixtures.jobs import environment, running, tiny

SLEEPS = """
if sys.argv[1] == "3":
    raise SystemExit("three is too many")
for epoch in range(10_000):
    for batch in DataLoader(data, batch_size=int(sys.argv[1])):
        train(batch)
        time.sleep(0.02)
"""


def test_what_it_would_run() -> None:
    words = ["sweep", "loader.num_workers=0..2", "batch=8,16", "--list", "--", "train.py", "--batch", "{batch}"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0
    assert done.stdout.splitlines()[0] == "loader.num_workers=0 batch=8"
    assert len(done.stdout.splitlines()) == 6


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["loader.num_workers=0,1"], "name the script after --"),
        (["loader.num_workers=x", "--", "train.py"], "whole number"),
        (["batch=8", "--", "train.py"], "{batch}"),
        (["torch.autocast=bf16", "--", "train.py"], "--allow-numerics"),
    ],
)
def test_mistakes(words: list[str], said: str) -> None:
    done = CliRunner().invoke(cli, ["sweep", *words])
    assert (done.exit_code, said in done.output) == (2, True)


def sweep(folder: Path, values: str, rounds: str) -> list[str]:
    """Return the command that sweeps over batches."""
    script = tiny(folder, SLEEPS)
    options = ["--steps", "10", "--rounds", rounds, "-o", "out"]
    return [*jobs.DLPROF, "sweep", f"batch={values}", *options, "--", str(script), "{batch}"]


@pytest.mark.long
def test_a_sweep_of_a_script(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="recording needs torch")
    command = sweep(tmp_path, "2,3,4", "1")
    done = jobs.launch(command, tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "batch=4 is the best" in done.stdout
    data = json.loads((tmp_path / "out/sweep.json").read_text())
    assert data["state"] == "complete"
    assert "three is too many" in data["points"][1]["why"]
    assert "Samples a second by batch" in (tmp_path / "out/sweep.html").read_text(encoding="utf-8")
    again = jobs.launch(command, tmp_path, timeout=200)
    assert again.returncode == 0
    assert json.loads((tmp_path / "out/sweep.json").read_text())["points"][::2] == data["points"][::2]


@pytest.mark.long
@pytest.mark.slow
def test_ctrl_c_leaves_no_process_and_a_partial_answer(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="recording needs torch")
    process = subprocess.Popen(
        sweep(tmp_path, "2,4", "9"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert jobs.until(lambda: (tmp_path / "out/sweep.json").exists())
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "Not complete: it was interrupted" in out
    assert running(tmp_path / "train.py") == []
