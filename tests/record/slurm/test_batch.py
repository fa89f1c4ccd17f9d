"""The batch script of a job: what SLURM is asked for, and words that reach the script as they are."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
from pathlib import Path

import pytest

from dlprof.record.slurm import Batch, Container, name_of

JOB = Batch(
    command=("train.py", "--lr", "0.1"),
    name="train",
    nodes=2,
    ranks=4,
    gpus=True,
    launcher="srun",
    cores=8,
    threads=1,
    runs=Path("/shared/runs"),
    directory=Path("/shared/a project"),
    dlprof=("/env/bin/python", "-m", "dlprof"),
    python="/env/bin/python",
)


def directives(batch: Batch) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in batch.text().splitlines() if line.startswith("#SBATCH")]


def started(batch: Batch) -> list[str]:
    """Return the words of the job's command, as a shell takes them; bash must take the script."""
    text = batch.text()
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    return shlex.split(text[text.index("exec srun") :].replace("\\\n", ""))


def test_one_task_a_rank_has_its_cores_in_both_places() -> None:
    lines = directives(JOB)
    assert {"--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=8", "--gpus-per-node=4", "--signal=TERM@60"} <= {
        *lines
    }
    assert "'--chdir=/shared/a project'" in lines
    words = started(JOB)
    assert {"--cpus-per-task=8", "--cpu-bind=cores", "--distribution=block:block", "--kill-on-bad-exit=1"} <= {*words}
    assert words[words.index("rank") + 1 :] == [
        *("/env/bin/python", "-m", "dlprof", "wrap", "-o", "$run", "--"),
        *("/env/bin/python", "train.py", "--lr", "0.1"),
    ]


def test_one_torchrun_a_node_has_the_cores_of_all_its_ranks() -> None:
    batch = dataclasses.replace(JOB, launcher="torchrun", numa="node")
    assert {"--ntasks-per-node=1", "--cpus-per-task=32", "--gpus-per-node=4"} <= {*directives(batch)}
    words = started(batch)
    assert words[words.index("wrap") + 3 :][:6] == [
        "--",
        "/env/bin/python",
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
    ]
    assert words[-3:] == ["train.py", "--lr", "0.1"]
    assert "node" in words
    assert "rank" not in words
    other = dataclasses.replace(batch, command=("bash", "train.sh"))
    assert started(other)[-3:] == ["--no-python", "bash", "train.sh"]


def test_a_job_without_gpus_asks_for_none_and_hides_those_there() -> None:
    batch = dataclasses.replace(JOB, gpus=False, grace_s=0, hint="nomultithread")
    assert not [line for line in directives(batch) if "gpu" in line or "signal" in line]
    assert "export CUDA_VISIBLE_DEVICES=\n" in batch.text()
    # SLURM takes only one of the two.
    assert "--hint=nomultithread" in directives(batch)
    assert "--cpu-bind=cores" not in started(batch)


def test_lines_of_the_user_come_last_and_win() -> None:
    batch = dataclasses.replace(JOB, directives=("--signal=USR1@300",), setup=("module load cuda",))
    assert directives(batch)[-1] == "--signal=USR1@300"
    assert batch.text().index("module load") < batch.text().index("exec srun")


@pytest.mark.parametrize("odd", ["$HOME", "a b", "it's", "`id`", '"', "x;y", "&", "\\"])
def test_no_word_of_the_script_means_something_to_the_shell(odd: str) -> None:
    assert started(dataclasses.replace(JOB, command=("train.py", odd)))[-1] == odd
    batch = dataclasses.replace(JOB, recording=("--lines", odd))
    assert odd in started(batch)
    runs = f"printf %s {dataclasses.replace(JOB, runs=Path('/r', odd)).run}"
    said = subprocess.run(["bash", "-c", runs], env={"SLURM_JOB_ID": "7"}, capture_output=True, text=True, check=True)
    assert said.stdout == f"/r/{odd}/train-7"


def test_a_job_that_is_requeued_has_another_folder() -> None:
    env = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    said = subprocess.run(["bash", "-c", f"echo {JOB.run}"], env=env, capture_output=True, text=True, check=True)
    assert said.stdout == "/shared/runs/train-7-1\n"


def test_dlprof_is_outside_of_apptainers_containers_and_inside_of_those_of_pyxis() -> None:
    words = started(dataclasses.replace(JOB, python="python3", container=Container("my.sif", "apptainer")))
    wrapped = words[words.index("wrap") + 4 :]
    assert words[words.index("wrap") - 3] == "/env/bin/python"
    assert wrapped[:3] == ["apptainer", "exec", "--nv"]
    assert wrapped[wrapped.index("my.sif") + 1 :] == ["python3", "train.py", "--lr", "0.1"]
    words = started(dataclasses.replace(JOB, python="python3", container=Container("nvcr.io#it", "pyxis")))
    assert words.index("--container-image=nvcr.io#it") < words.index("bash")
    assert words[words.index("wrap") - 3] == "python3"
    assert words[words.index("wrap") + 4 :] == ["python3", "train.py", "--lr", "0.1"]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["a/train.py", "x"], "train"),
        (["-m", "package.train", "x"], "package.train"),
        (["python", "b/two words.py"], "two_words"),
        (["./run.sh"], "run.sh"),
        (["€"], "_"),
    ],
)
def test_a_job_is_named_after_its_script(words: list[str], name: str) -> None:
    assert name_of(words) == name
