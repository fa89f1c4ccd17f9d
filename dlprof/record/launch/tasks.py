"""Tells whether a command is one of several tasks of a job, each with a supervisor of its own, and which."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from dlprof.files import boot, longer
from dlprof.record.launch.process import started

# What tells a task its number among those that one launcher has started.
TASK_NUMBERS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


class Task(NamedTuple):
    """One of several supervisors that record parts of one job into one folder."""

    job: str
    host: str
    number: str | None  # among the launcher's tasks; None: the job was started host by host

    @property
    def name(self) -> str:
        """Name it among the tasks of its job; hosts that have one name are several."""
        return longer(self.host, boot()) if self.number is None else f"{self.host}-{self.number}"


def task_of(env: Mapping[str, str]) -> Task | None:
    """Return which task of which job this is where each starts a supervisor of its own (mpirun, srun, --job).

    None: there is only this one.
    """
    job = _job(env)
    number = next((env[name] for name in TASK_NUMBERS if env.get(name)), None)
    return None if job is None else Task(job, os.uname().nodename, number)


def _job(env: Mapping[str, str]) -> str | None:
    """Name the job that this is a task of, as its launcher or the user does; None: it has one task."""
    if env.get("DLPROF_JOB"):
        return env["DLPROF_JOB"]
    if env.get("OMPI_COMM_WORLD_SIZE", "1") != "1":
        return env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")
    # Of this step: SLURM_NTASKS is the allocation's, where one process in a batch script or a shell is its own job.
    if env.get("SLURM_STEP_ID") and env.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return f"{env.get('SLURM_JOB_ID')}.{env['SLURM_STEP_ID']}"
    if env.get("PMI_SIZE", "1") != "1":
        return _process_manager()
    return None


def _process_manager() -> str | None:
    """Name what has started this host's tasks of an MPI job (MPICH's and Intel's tell no name): the one parent of all.

    The tasks of another host have another.
    """
    parent = os.getppid()
    since = started(parent)
    return None if since is None else f"{os.uname().nodename}-{parent}-{since}"
