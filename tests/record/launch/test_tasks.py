"""What launchers say tells a task of several from a command of its own, and the rank agrees with its supervisor."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest

from dlprof.record.collectors.facts import Facts
from dlprof.record.launch.tasks import batch_of, host_count, task_of
from dlprof.record.ranks import find_rank
from tests.fixtures.jobs import environment

# What launchers put into the environment of a task, as far as it matters here: Open MPI 4.1, MPICH 4.0, SLURM 22.05 and
# Horovod 0.28.
_ALLOCATED = {"SLURM_JOB_ID": "11", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_TASKS_PER_NODE": "4"}
_BATCH = _ALLOCATED | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
_SHELL = _BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}
_STEP = _ALLOCATED | {"SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
_OPEN = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
_OPEN |= {"PMIX_NAMESPACE": "2004221953"}
_HOROVOD = {"HOROVOD_SIZE": "4", "HOROVOD_RANK": "3", "HOROVOD_LOCAL_RANK": "1"}
_MPICH = {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALRANKID": "1"}


@pytest.mark.parametrize(
    ("env", "command", "hosts"),
    [
        ({}, ["python", "train.py"], 1),
        ({"SLURM_STEP_NUM_NODES": "2048"}, [], 2048),
        ({"SLURM_NNODES": "300"}, [], 300),
        (_OPEN | {"OMPI_COMM_WORLD_SIZE": "600", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, [], 300),
        ({"WORLD_SIZE": "16384", "LOCAL_WORLD_SIZE": "8"}, [], 2048),
        ({"WORLD_SIZE": "", "LOCAL_WORLD_SIZE": "0", "PET_NNODES": "x"}, [], 1),
        ({}, ["torchrun", "--nnodes", "16:512", "train.py"], 512),
        ({}, ["torchrun", "--nnodes=512", "train.py"], 512),
        ({}, ["torchrun", "--nnodes"], 1),
    ],
)
def test_how_many_hosts_there_are_is_what_launchers_say(env: dict[str, str], command: list[str], hosts: int) -> None:
    assert host_count(env, command) == hosts


def test_a_requeued_job_of_slurm_is_another_one() -> None:
    again = _STEP | {"SLURM_RESTART_COUNT": "2"}
    assert [task.job for env in (_STEP, again) if (task := task_of(env))] == ["11.2", "11.2-r2"]
    assert [batch_of(env) for env in ({}, _STEP, again)] == [None, "SLURM job 11", "SLURM job 11 (restart 2)"]
    assert batch_of(_STEP | {"SLURM_HET_JOB_ID": "10"}) == "SLURM job 10"
    assert batch_of({"PBS_JOBID": "7.server"}) == "PBS job 7.server"


@pytest.mark.parametrize(
    ("set_by", "rank", "size", "job"),
    [
        ({}, 0, 1, None),
        (_ALLOCATED, 0, 1, None),
        (_BATCH, 0, 1, None),
        (_SHELL, 0, 1, None),
        (_STEP, 3, 4, "11.2"),
        (_OPEN, 3, 4, "2004221953"),
        (_BATCH | _OPEN, 3, 4, "2004221953"),
        (_MPICH, 3, 4, "this process's parent"),
        (_BATCH | _MPICH, 3, 4, "this process's parent"),
        (_BATCH | _HOROVOD, 3, 4, None),
        (_STEP | {"RANK": "5", "WORLD_SIZE": "8"}, 5, 8, "11.2"),
    ],
)
def test_a_task_is_told_from_a_single_process_in_an_allocation(
    set_by: Mapping[str, str], rank: int, size: int, job: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in set(os.environ) - set(environment()) | {"OMP_NUM_THREADS"}:
        monkeypatch.delenv(name, raising=False)
    for name, value in set_by.items():
        monkeypatch.setenv(name, value)
    assert find_rank() == rank
    assert Facts()._group["world_size"] == size
    told = task_of(os.environ)
    if job is None:
        assert told is None
        return
    assert told is not None
    assert told.number == ("3" if "RANK" not in set_by else set_by["SLURM_PROCID"])
    assert (f"-{os.getppid()}-" in told.job) if job == "this process's parent" else told.job == job
