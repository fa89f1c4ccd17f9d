"""Which rank a process is, and where a loader's worker finds what its rank records."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

# The variables in which launchers pass the rank. SLURM's comes last: what another launcher starts within a job has that
# of the batch script too, which is task 0.
_RANKS = ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def find_rank() -> int:
    """Return this process's rank: the process group's if there is one, else by the launcher's variables, else 0."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    for name in _RANKS:
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    return 0


def folder_of_rank(run: Path) -> Path | None:
    """Return the folder of the rank that this process is a loader's worker of; None: it does not train yet, or is none.

    Workers are started before their rank knows that it trains, and may start in an interpreter of their own.
    """
    try:
        return run / "ranks" / _word_of_rank(run).read_text().partition(" ")[0]
    except FileNotFoundError:
        return None


def age_of_rank(run: Path) -> int:
    """Return for how long that rank has trained, in ns. Raises OSError where it does not train."""
    return max(time.time_ns() - _word_of_rank(run).stat().st_mtime_ns, 0)


def _word_of_rank(run: Path) -> Path:
    from multiprocessing.process import parent_process

    rank = parent_process()
    return run / "hosts" / os.uname().nodename / f"rank-{rank.pid if rank else 0}"
