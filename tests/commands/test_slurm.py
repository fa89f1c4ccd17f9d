"""The command line of `dlprof slurm`: what it writes where, and what it does not take."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dlprof.cli import cli
from dlprof.commands.slurm import slurm
from dlprof.errors import DlprofError


def asked(*words: str) -> Result:
    return CliRunner().invoke(cli, ["slurm", *words])


@pytest.fixture(autouse=True)
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    # Without the SLURM that may be here.
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "bash").symlink_to(shutil.which("bash") or "")
    monkeypatch.setenv("PATH", str(programs))
    return tmp_path


def test_a_script_that_bash_takes_with_the_options_of_the_recording(there: Path) -> None:
    options = ["--time", "1:00:00", "--account", "me", "--partition", "big", "--qos", "low"]
    options += ["--sbatch", "--constraint=a100", "--set", "loader.num_workers=4", "--window", "5,1,3", "--memory"]
    done = asked("train.py", "--nodes", "2", "--gpus-per-node", "4", *options, "--", "--nodes", "7")
    assert done.exit_code == 0, done.output
    text = done.stdout
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    for line in ("--time=1:00:00", "--account=me", "--partition=big", "--qos=low", "--constraint=a100", "--nodes=2"):
        assert f"#SBATCH {line}\n" in text
    assert '-o "$run" --window 5,1,3 --memory --set loader.num_workers=4 -- ' in text
    assert f"{sys.executable} train.py --nodes 7\n" in text
    assert f"run={there}/runs/train-$SLURM_JOB_ID" in text
    assert "export OMP_NUM_THREADS=1\n" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train.py"], "--gpus-per-node N, or --procs-per-node N"),
        (["train.py", "--gpus-per-node", "1", "--procs-per-node", "1"], "either"),
        (["--gpus-per-node", "1"], "a script"),
        (["train.py", "--gpus-per-node", "1", "--account", "me\n#SBATCH --nodes=9"], "one line"),
        (["train.py", "--gpus-per-node", "1", "--setup", "one\ntwo"], "one line"),
        (["train.py", "--gpus-per-node", "1", "--time", "soon"], "soon: SLURM takes minutes"),
        (["train.py", "--gpus-per-node", "1", "--sbatch", "exclusive"], "exclusive: an option of sbatch"),
        (["train.py", "--gpus-per-node", "1", "--numa-binding", "node"], "torchrun's"),
        (["train.py", "--gpus-per-node", "1", "--set", "torch.autocast=bf16"], "--allow-numerics"),
    ],
)
def test_what_cannot_be_is_a_usage_error(words: list[str], says: str) -> None:
    done = asked(*words)
    assert done.exit_code == 2
    assert says in done.stderr


@pytest.mark.parametrize(
    ("limit", "grace_s", "said"),
    [("1:00:00", 60, ""), ("0:30", 15, "--grace 60 is too long for --time 0:30: the job is told to end 15 s before")]
    + [(limit, 60, "") for limit in ("0", "2", "INFINITE")],
)
def test_the_job_is_told_to_end_within_its_time(limit: str, grace_s: int, said: str, there: Path) -> None:
    done = asked("train.py", "--gpus-per-node", "1", "--time", limit)
    assert f"#SBATCH --signal=TERM@{grace_s}\n" in done.stdout
    assert said in done.stderr
    assert bool(said) == bool(done.stderr)


def test_a_script_that_is_not_there_and_a_workload_by_its_name() -> None:
    done = CliRunner().invoke(slurm, ["tran.py", "--gpus-per-node", "1"])
    assert isinstance(done.exception, DlprofError)
    assert "tran.py" in str(done.exception)
    assert "/workloads/ddp_resnet.py" in asked("ddp_resnet", "--gpus-per-node", "1").stdout
