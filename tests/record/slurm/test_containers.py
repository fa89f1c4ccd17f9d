"""Containers: what is there inside as outside, each place once."""

from __future__ import annotations

from pathlib import Path

from dlprof.record.slurm import PACKAGE, Container

PLACES = (Path("/shared/project"), Path("/shared/project/runs"))


def test_apptainer_has_the_project_the_runs_and_the_recorder() -> None:
    words = Container("my.sif", "apptainer").of_command(PLACES, gpus=True)
    assert words == [
        *("apptainer", "exec", "--nv", "--bind", "/shared/project", "--bind", str(PACKAGE)),
        *("--pwd", "/shared/project", "my.sif"),
    ]
    assert (PACKAGE / "record/inject/sitecustomize.py").exists()
    assert "--nv" not in Container("my.sif", "apptainer").of_command(PLACES, gpus=False)
    assert Container("my.sif", "apptainer").of_srun(PLACES) == []


def test_a_place_that_holds_another_is_bound_and_not_the_other() -> None:
    words = Container("my.sif", "apptainer").of_command((Path("/a/b"), Path("/a"), Path("/ab")), gpus=False)
    assert words.count("--bind") == 3
    assert words[2:7] == ["--bind", "/a", "--bind", "/ab", "--bind"]


def test_pyxis_is_options_of_srun() -> None:
    container = Container("nvcr.io#nvidia/pytorch:25.01-py3", "pyxis")
    assert container.of_srun((Path("/p"), Path("/runs"))) == [
        "--container-image=nvcr.io#nvidia/pytorch:25.01-py3",
        "--container-mounts=/p:/p,/runs:/runs",
        "--container-workdir=/p",
    ]
    assert container.of_command(PLACES, gpus=True) == []
