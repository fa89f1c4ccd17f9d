"""Hands a batch script to SLURM, and asks it what its nodes have."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from dlprof.errors import DlprofError

# sbatch itself asks a controller that does not answer again and again, for minutes.
_PATIENCE_S = 180
_ANSWER_S = 5


def submit(script: str, file: Path | None = None) -> str:
    """Submit a batch script, from its file where it is in one; return the number of the job.

    The job's environment is this one's without what a recording has put there. Raises DlprofError where there is no
    sbatch, or it does not take the job.
    """
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise DlprofError("sbatch is not on the PATH, nothing is submitted; without --submit the script is written")
    env = {name: value for name, value in os.environ.items() if not name.startswith("DLPROF_")}
    command = [sbatch, "--parsable", *([str(file)] if file else [])]
    try:
        done = subprocess.run(
            command,
            env=env,
            input=None if file else script,
            stdin=subprocess.DEVNULL if file else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DlprofError(f"sbatch has not answered for {_PATIENCE_S} s: the scheduler cannot be reached") from None
    number = done.stdout.strip().partition(";")[0]
    if done.returncode or not number.isdigit():
        # sbatch: error: what is wrong.
        lines = [line.split(": ", 2)[-1].rstrip(".") for line in done.stderr.splitlines()]
        said = "; ".join(lines) or "it gives no reason"
        raise DlprofError(f"sbatch did not take the job: {said}")
    return number


def cores_of_nodes(partition: str | None) -> int | None:
    """Return the CPUs of the largest node of a partition, or of all; None: there is no SLURM here, or no answer."""
    sinfo = shutil.which("sinfo")
    if sinfo is None:
        return None
    command = [sinfo, "--noheader", "--Node", "--format", "%c", *([f"--partition={partition}"] if partition else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return max((int(word) for word in done.stdout.split() if word.isdigit()), default=None)
