"""The batch script of a job: what SLURM is asked for, what starts the ranks and containers, and submitting it."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dlprof.errors import DlprofError
from dlprof.record.slurm import PACKAGE, Batch, Container, cores_of_nodes, limit_s, name_of, submit

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
SCRIPT = "train.py --lr 0.1"
TORCHRUN = "/env/bin/python -m torch.distributed.run --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d"
MEETING = "--rdzv-id $SLURM_JOB_ID --rdzv-endpoint $MASTER_ADDR:$MASTER_PORT"
OUTSIDE = "/env/bin/python -m dlprof wrap -o $run --"


def directives(batch: Batch) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in batch.text().splitlines() if line.startswith("#SBATCH")]


def started(batch: Batch) -> list[str]:
    """Return the words of the job's command, as a shell takes them; bash must take the script."""
    text = batch.text()
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    command = re.search(r"^(?:exec )?srun (?:.*\\\n)*.*$", text, re.M)
    assert command is not None
    return shlex.split(command[0].replace("\\\n", ""))


# What of the job is changed; directives and words of srun that there are, and that there are not; and how the words of
# the command begin and end.
JOBS: dict[str, tuple[dict[str, Any], set[str], set[str], str, str]] = {
    "a task a rank": (
        {},
        {"--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=8", "--gpus-per-node=4", "--signal=TERM@60"}
        | {"'--chdir=/shared/a project'", "--cpu-bind=cores", "--distribution=block:block", "--kill-on-bad-exit=1"},
        {"export CUDA_VISIBLE_DEVICES="},
        *(f"{OUTSIDE} /env/bin/python {SCRIPT}", SCRIPT),
    ),
    "a torchrun a node": (
        {"launcher": "torchrun", "numa": "node"},
        {"--ntasks-per-node=1", "--cpus-per-task=32", "--gpus-per-node=4"},
        {"rank", "--distribution=block:block"},
        *(f"{OUTSIDE} {TORCHRUN} --numa-binding node {MEETING} {SCRIPT}", SCRIPT),
    ),
    "a torchrun of no Python": (
        {"launcher": "torchrun", "command": ("bash", "train.sh")},
        set(),
        set(),
        *(f"{OUTSIDE} {TORCHRUN} {MEETING}", "--no-python bash train.sh"),
    ),
    "no GPUs: those there are hidden": (
        {"gpus": False, "grace_s": 0, "hint": "nomultithread"},
        {"--hint=nomultithread", "export CUDA_VISIBLE_DEVICES="},
        {"--gpus-per-node=4", "--signal=TERM@60", "--cpu-bind=cores"},  # SLURM takes only one of hint and binding
        *(OUTSIDE, SCRIPT),
    ),
    "the user's lines": (
        {"directives": ("--signal=USR1@300",), "setup": ("module load cuda",), "recording": ("--lines", "main")},
        {"module load cuda"},
        set(),
        *("/env/bin/python -m dlprof wrap -o $run --lines main --", SCRIPT),
    ),
    "queued again before its limit": (
        {"requeue": "USR1", "directives": ("--signal=USR1@300",)},
        {
            "--requeue",
            "--open-mode=append",
            "--signal=B:USR2@60",
            '[ -z "$again" ] || scontrol requeue "$SLURM_JOB_ID"',
        },
        {"--signal=TERM@60", "exec"},
        *(OUTSIDE, f"{SCRIPT} &"),
    ),
    "an array of jobs whose recording a group reads": (
        {"directives": ("--array=0-3", "--signal=USR1@300"), "group": "a lab"},
        {
            "run=/shared/runs/train-${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID${SLURM_RESTART_COUNT:+-$SLURM_RESTART_COUNT}"
        }
        | {"--output=train-%A_%a.out", 'chgrp \'a lab\' "$run" && chmod 2750 "$run" || exit'},
        {"--output=train-%j.out"},
        *(OUTSIDE, SCRIPT),
    ),
    "the user's own output": (
        {"directives": ("-o all.out", "--output=log-%x.out", "--signal=USR1@300")},
        {"--output=log-%x.out"},
        {"--output=train-%j.out"},
        *(OUTSIDE, SCRIPT),
    ),
    "dlprof outside of Apptainer's container": (
        {"python": "python3", "container": Container("my.sif", "apptainer")},
        set(),
        set(),
        *(f"{OUTSIDE} apptainer exec --nv", f"my.sif python3 {SCRIPT}"),
    ),
    "dlprof inside of that of pyxis": (
        {"python": "python3", "container": Container("nvcr.io#it", "pyxis")},
        {"--container-image=nvcr.io#it"},
        set(),
        *(f"python3 -m dlprof wrap -o $run -- python3 {SCRIPT}", SCRIPT),
    ),
}


@pytest.mark.parametrize(("changes", "there", "absent", "begins", "ends"), JOBS.values(), ids=JOBS)
def test_the_script_of_a_job(changes: Any, there: set[str], absent: set[str], begins: str, ends: str) -> None:
    batch = dataclasses.replace(JOB, **changes)
    words, lines = started(batch), directives(batch)
    found = {*batch.text().splitlines(), *lines, *words}
    assert there <= found
    assert not absent & found
    assert " ".join(words[words.index("wrap") - 3 :]).startswith(begins)
    assert " ".join(words).endswith(ends)
    assert lines[-1] in ("--signal=TERM@60", "--hint=nomultithread", "--signal=USR1@300")  # the user's come last
    assert [word for word in words if word.startswith("--cpus-per-task")] == [
        line for line in lines if line.startswith("--cpus-per-task")
    ]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("1:30", 90),
        ("4:00:00", 14_400),
        ("2-00", 172_800),
        ("1-2:3", 93_780),
        ("1-2:3:4", 93_784),
        ("0", 0),
        ("infinite", math.inf),
        ("soon", None),
        ("1:2:3:4", None),
        ("4h", None),
    ],
)
def test_a_time_limit_is_read_as_slurm_does(text: str, seconds: float | None) -> None:
    if seconds is None:
        with pytest.raises(ValueError, match="minutes"):
            limit_s(text)
    else:
        assert limit_s(text) == seconds


@pytest.mark.parametrize("odd", ["$HOME", "a b", "it's", "`id`", '"', "x;y", "&", "\\"])
def test_no_word_of_the_script_means_something_to_the_shell(odd: str) -> None:
    batch = dataclasses.replace(JOB, command=("train.py", odd), recording=("--lines", odd), runs=Path("/r", odd))
    words = started(batch)
    assert (words[-1], words[words.index("--lines") + 1]) == (odd, odd)
    for env, end in (({}, ""), ({"SLURM_RESTART_COUNT": "1"}, "-1")):  # requeued
        command = ["bash", "-c", f"printf %s {batch.run}"]
        said = subprocess.run(command, env={"SLURM_JOB_ID": "7"} | env, capture_output=True, text=True, check=True)
        assert said.stdout == f"/r/{odd}/train-7{end}"


APPTAINER, PYXIS = Container("my.sif", "apptainer"), Container("nvcr.io#nvidia/pytorch:25.01-py3", "pyxis")


@pytest.mark.parametrize(
    ("places", "binds"),
    [
        (("/shared/project", "/shared/project/runs"), ("/shared/project",)),  # each place once
        (("/a/b", "/a", "/ab"), ("/a", "/ab")),
    ],
)
def test_apptainer_has_the_project_the_runs_and_the_recorder(places: Any, binds: tuple[str, ...]) -> None:
    paths = [Path(place) for place in places]
    bound = [word for place in (*binds, str(PACKAGE)) for word in ("--bind", place)]
    end = ["--pwd", places[0], "my.sif"]
    assert APPTAINER.of_command(paths, gpus=True) == ["apptainer", "exec", "--nv", *bound, *end]
    assert APPTAINER.of_command(paths, gpus=False) == ["apptainer", "exec", *bound, *end]
    assert (PACKAGE / "record/inject/sitecustomize.py").exists()
    assert APPTAINER.of_srun(paths) == PYXIS.of_command(paths, gpus=True) == []
    assert PYXIS.of_srun(paths) == [
        "--container-image=nvcr.io#nvidia/pytorch:25.01-py3",
        f"--container-mounts={','.join(f'{bind}:{bind}' for bind in binds)}",
        f"--container-workdir={places[0]}",
    ]


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


def test_without_sbatch_nothing_is_submitted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where there is SLURM: tests/robustness/test_slurm.py."""
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
