"""`dlprof reduce PATH`: read a share of the ranks and keep what the report needs of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dlprof.commands import cache, jobs, no_limits, quiet, run_path, say
from dlprof.commands.terminal.progress import Progress
from dlprof.files import writing
from dlprof.units import count

if TYPE_CHECKING:
    from dlprof.read.run import Run

# What a launcher tells each of its processes: its number, from 0 on, and how many there are. SLURM's second one is of
# a step: a batch script has SLURM_NTASKS too, and is no task of any.
_LAUNCHERS = (
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def _shard(_context: click.Context, _option: click.Parameter, text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    k, _, n = text.partition("/")
    if not (k.isdecimal() and n.isdecimal() and 0 <= int(k) < int(n) < 100_000):
        raise click.BadParameter(f"{text!r}: K/N, with K from 0 to N - 1")
    return int(k), int(n)


@click.command(short_help="Read a share of the ranks, so that the report need not.")
@run_path
@click.option(
    "--shard",
    callback=_shard,
    metavar="K/N",
    help="Which of N shares, from 0 on. [default: what srun or mpirun says, else 0/1]",
)
@click.option(
    "--window",
    type=click.IntRange(min=1),
    metavar="N",
    help="Of ranks with several traces: which. [default: the last complete one]",
)
@cache
@jobs
@no_limits
@quiet
def reduce(
    path: Path, shard: tuple[int, int] | None, window: int | None, cache: Path | None, jobs: int | None, quiet: bool
) -> None:
    """Read a share of PATH's ranks and keep what `dlprof report PATH` needs of them; what is kept is not read again.

    `srun dlprof reduce PATH` runs it on any number of nodes that see the same files. It may be stopped and repeated.
    """
    k, n = shard or _launched()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from dlprof.read.run import open_run
    from dlprof.record.launch.process import keep_memory

    keep_memory()
    run = open_run(path, window)
    with Progress(f"shard {k}/{n}: " if n > 1 else "", quiet=quiet) as progress:
        lines = _reduced(run, k, n, cache, jobs or _jobs(n), progress)
    for line in lines:
        say(line)


def _reduced(run: Run, k: int, n: int, cache: Path | None, jobs: int | None, progress: Progress) -> list[str]:
    """Read the ranks of a share and keep their answers; return what there is to say of it."""
    from dataclasses import replace

    from dlprof.analysis.diagnosis import wanted
    from dlprof.analysis.engine import answers_of, open_store
    from dlprof.analysis.engine.store import shares
    from dlprof.analysis.rules import RULES

    store = open_store(run, cache, f"{k}/{n}")
    with writing(f"what is known of each rank, in {store.folder},", "; --cache names another folder"):
        store.make()
    mine = shares(run, n)[k]
    share = replace(run, ranks=tuple(sorted(mine, key=lambda rank: rank.index)))
    answers = answers_of(share, wanted(RULES), jobs, progress, store=store, tell=progress.tell)
    lines = [f"rank {r}: {answer.warnings[0]}" for r, answer in sorted(answers.items()) if not answer.tables]
    whole = count(len(run.ranks), "rank")
    return [*lines, f"shard {k}/{n}: {len(answers):,} of {whole} in {store.folder}; `dlprof report` uses them"]


def _launched() -> tuple[int, int]:
    """Return which process of how many this is, as its launcher says; of one where none says anything."""
    for number, many in _LAUNCHERS:
        k, n = os.environ.get(number, ""), os.environ.get(many, "")
        if k.isdecimal() and n.isdecimal() and int(k) < int(n):
            return int(k), int(n)
    return 0, 1


def _jobs(shards: int) -> int | None:
    """Return how many processes read at once: the cores that SLURM gives a task, else one a shard, all of one shard."""
    cores = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return int(cores) if cores.isdecimal() and int(cores) > 0 else 1 if shards > 1 else None
