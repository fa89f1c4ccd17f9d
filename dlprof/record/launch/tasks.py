"""Finds out whether a command is one of several tasks of a job, each with its own supervisor, and which one."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dlprof.files import boot, longer
from dlprof.record.launch.process import started

# Variables with the number of a task among those that one launcher has started.
_NUMBERS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")

# Variables in which torchrun names the job to its ranks; ranks that it restarts after a failure are another job.
_ELASTIC = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")

# Variables with the number of hosts of a job; torchrun may give a range.
_HOSTS = ("SLURM_STEP_NUM_NODES", "PET_NNODES", "SLURM_NNODES")
# Variables with the number of ranks, and of those on this host.
_SIZES = (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))

# Variables with a scheduler's job, and how often the scheduler has restarted it.
_BATCH = (
    ("SLURM", "SLURM_HET_JOB_ID", "SLURM_RESTART_COUNT"),  # of several allocations
    ("SLURM", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
    ("PBS", "PBS_JOBID", ""),
    ("LSF", "LSB_JOBID", ""),
)
# The array that a scheduler's job is an element of, and its index there.
_ARRAY = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")

# What may stand in the name of a run folder, as in the file names of srun, and the variables with its value.
_PATTERNS = {
    "j": ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"),
    "A": ("SLURM_ARRAY_JOB_ID", "SLURM_JOB_ID"),
    "a": ("SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX", "LSB_JOBINDEX"),
    "s": ("SLURM_STEP_ID",),
    "t": _NUMBERS,
    "n": ("SLURM_NODEID",),
    "x": ("SLURM_JOB_NAME", "PBS_JOBNAME", "LSB_JOBNAME"),
}
_PATTERN = re.compile(r"%([0-9]?)([jAastnhx%])")


class Task(NamedTuple):
    """One of several supervisors that record parts of one job into one folder."""

    job: str
    host: str
    number: str | None  # among the launcher's tasks; None if the job was started host by host
    batch: str | None  # the scheduler's job, if any

    @property
    def name(self) -> str:
        """Its name among the tasks of its job; several hosts may have the same name."""
        return longer(self.host, boot()) if self.number is None else f"{self.host}-{self.number}"


def task_of(env: Mapping[str, str]) -> Task | None:
    """Return which task of which job this is, if each starts its own supervisor (mpirun, srun, torchrun, --job).

    Return None if there is only this one.
    """
    job = _job(env)
    return None if job is None else Task(job, os.uname().nodename, number_of(env), batch_of(env))


def number_of(env: Mapping[str, str]) -> str | None:
    """Return the number that the launcher gave this task; None if it gave none."""
    names = ("RANK", *_NUMBERS) if _of_torchrun(env) else _NUMBERS
    return next((env[name] for name in names if env.get(name)), None)


def batch_of(env: Mapping[str, str]) -> str | None:
    """Return the name of the scheduler's job of a process; None if it has none. A requeued job is another one."""
    for scheduler, name, restarts in _BATCH:
        if env.get(name):
            again = env.get(restarts, "0")
            number = element_of(env) or env[name]
            return f"{scheduler} job {number}" + (f" (restart {again})" if again not in ("", "0") else "")
    return None


def element_of(env: Mapping[str, str]) -> str:
    """Return which element of a scheduler's array of jobs this is, as SLURM names it (12_3); "" if it is of none."""
    found = [env.get(name, "") for name in _ARRAY]
    return "_".join(found) if all(found) else ""


def filled(path: Path, env: Mapping[str, str]) -> tuple[Path, list[str]]:
    """Put the job's own names into a path as srun does into its file names: %j, %A, %a, %s, %t, %n, %h, %x, %%.

    A digit is a width: %4t is 0007. Return the path, and the patterns of which nothing is known here; these stay.
    """
    missing: list[str] = []

    def value(found: re.Match[str]) -> str:
        width, letter = found.groups()
        if letter == "%":
            return "%"
        host = os.uname().nodename.partition(".")[0] if letter == "h" else ""
        text = host or next((env[name] for name in _PATTERNS.get(letter, ()) if env.get(name)), "")
        if not text:
            missing.append(found[0])
            return found[0]
        return "".join(c if c.isalnum() or c in "._-" else "_" for c in text.rjust(int(width or 0), "0"))

    return Path(_PATTERN.sub(value, str(path))), missing


def host_count(env: Mapping[str, str], command: Sequence[str]) -> int:
    """Return the number of hosts of a job according to its launcher; 1 if that is unknown.

    `command` may start a launcher itself: torchrun --nnodes 2048.
    """
    parts = [word.partition("=") for word in command]
    after = [*(word for word, _, _ in parts[1:]), ""]
    given = [value or word for (name, _, value), word in zip(parts, after, strict=False) if name == "--nnodes"]
    named = [text.rpartition(":")[2] for text in (*(env.get(name, "") for name in _HOSTS), *given)]
    sizes = [(env.get(every, ""), env.get(here, "")) for every, here in _SIZES]
    counted = [int(every) // max(int(here), 1) for every, here in sizes if every.isdigit() and here.isdigit()]
    return max([1, *(int(text) for text in named if text.isdigit()), *counted])


def _job(env: Mapping[str, str]) -> str | None:
    """Return the name of the job that this is a task of, given by launcher or user; None if there is one task."""
    if env.get("DLPROF_JOB"):
        return env["DLPROF_JOB"]
    if _of_torchrun(env):
        return "-".join(env[name] for name in _ELASTIC if name in env)
    if env.get("OMPI_COMM_WORLD_SIZE", "1") != "1":
        return env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")
    # The number of this step: SLURM_NTASKS is that of the allocation, even for one process in a script or a shell.
    if env.get("SLURM_STEP_ID") and env.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        again = env.get("SLURM_RESTART_COUNT", "0")  # a requeued job has the same number
        return f"{element_of(env) or env.get('SLURM_JOB_ID')}.{env['SLURM_STEP_ID']}" + (
            f"-r{again}" if again not in ("", "0") else ""
        )
    if env.get("PMI_SIZE", "1") != "1":
        # MPICH and Intel MPI give the job no name: the parent of all its tasks on this host has one for it.
        parent = os.getppid()
        since = started(parent)
        return None if since is None else f"{os.uname().nodename}-{parent}-{since}"
    return None


def _of_torchrun(env: Mapping[str, str]) -> bool:
    """Return whether this is one of several ranks that torchrun has started."""
    return bool(env.get("TORCHELASTIC_RUN_ID")) and env.get("WORLD_SIZE", "1") != "1"
