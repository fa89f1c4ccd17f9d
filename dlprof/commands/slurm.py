"""`dlprof slurm`: writes the batch script of a recorded SLURM job, and submits it."""

from __future__ import annotations

import functools
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click

from dlprof.commands import F, file, rarely, say
from dlprof.commands.recording import Recording, recording_options
from dlprof.errors import DlprofError
from dlprof.files import write, writing
from dlprof.record.slurm import Batch, Container, Launcher, Runtime, cores_of_nodes, limit_s, name_of, submit

# Cores of a rank. With a GPU, its loader's workers run beside it.
_CORES_WITH_GPU, _CORES = 8, 2
_COUNT = click.IntRange(min=1)


def _line(ctx: click.Context, _param: click.Parameter, value: Any) -> Any:
    """Let no value of an option begin a line of its own in the script."""
    for text in value if isinstance(value, tuple) else (value,):
        if text and any(ord(c) < 32 for c in text):
            raise click.BadParameter("one line, without control characters", ctx)
    return value


def _time(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if _line(ctx, param, value) is not None:
        try:
            limit_s(str(value))
        except ValueError as e:
            raise click.BadParameter(f"{value}: SLURM takes {e}", ctx) from None
    return value


def _signal(ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    name = (value or "").upper().removeprefix("SIG")
    if value and (f"SIG{name}" not in signal.Signals.__members__ or name in ("KILL", "STOP")):
        raise click.BadParameter(f"{value} is no signal that a script can take; USR1 or TERM", ctx)
    return name or None


def _directives(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    for text in _line(ctx, param, value):
        if not text.startswith("-"):
            raise click.BadParameter(f"{text}: an option of sbatch begins with a hyphen, as --exclusive", ctx)
    return value


def _text(name: str, metavar: str, help: str, **more: Any) -> Callable[[F], F]:  # noqa: A002 - click's name
    return click.option(name, metavar=metavar, help=help, **{"callback": _line, **more})


@click.command(short_help="Write the batch script of a recorded SLURM job, or submit it.")
@click.option("--nodes", type=_COUNT, default=1, show_default=True, help="How many nodes.")
@click.option("--gpus-per-node", type=_COUNT, help="Ranks of a node, one a GPU.")
@click.option("--procs-per-node", type=_COUNT, help="Ranks of a node, on the CPU.")
@_text("--partition", "NAME", "Its partition.")
@_text("--time", "LIMIT", "How long it may run: 30, 4:00:00, 2-00.", callback=_time)
@click.option("--submit", "submits", is_flag=True, help="Submit it with sbatch.")
@file("--out", "Write the script to a file. [default: to stdout, unless it is submitted]")
@click.option("-m", "module", metavar="PACKAGE", help="Train with `python -m PACKAGE`.")
@rarely
@click.option(
    "--launcher",
    type=click.Choice(get_args(Launcher)),
    default="srun",
    show_default=True,
    help="srun: one task a rank, each on cores of its own. torchrun: one torchrun a node, which starts the ranks.",
)
@click.option(
    "--cpus-per-rank",
    type=_COUNT,
    help=f"Cores of a rank and its loader workers. [default: {_CORES_WITH_GPU}, {_CORES} without a GPU; fewer where the"
    " nodes, as sinfo lists them, have fewer]",
)
@click.option(
    "--omp-threads", type=_COUNT, help="OMP_NUM_THREADS. [default: 1; without a GPU as many as --cpus-per-rank]"
)
@click.option(
    "--hint",
    type=click.Choice(["compute_bound", "memory_bound", "multithread", "nomultithread"]),
    help="SLURM's --hint instead of --cpu-bind=cores; nomultithread: one hardware thread of each core.",
)
@click.option(
    "--numa-binding",
    type=click.Choice(["node", "socket", "exclusive", "core-complex"]),
    help="With --launcher torchrun: bind each rank near its GPU (torch 2.8).",
)
@_text("--account", "NAME", "Who pays for it.")
@_text("--qos", "NAME", "Its quality of service.")
@_text("--job-name", "NAME", "Its name, and that of its run folder and its output. [default: the script's]")
@_text(
    "--sbatch",
    "OPTION",
    "Another line #SBATCH, such as --constraint=a100. Repeatable.",
    multiple=True,
    callback=_directives,
)
@_text("--setup", "LINE", "A line of shell before the job, such as 'module load cuda'. Repeatable.", multiple=True)
@click.option(
    "--grace",
    type=click.IntRange(min=0),
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="SIGTERM comes so long before the time is up, to close the recording and report on it; 0: when it is up.",
)
@click.option(
    "--requeue-before-limit",
    metavar="SIGNAL",
    callback=_signal,
    help="--grace before the time is up send the ranks this signal, on which the script saves and ends (USR1), wait for"
    " them, and queue the job again.",
)
@click.option(
    "--runs",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs"),
    show_default=True,
    help="The folder for run folders, on a disk that all nodes share.",
)
@_text("--group", "NAME", "The Unix group that may read the recording. [default: nobody but you]")
@_text("--container", "IMAGE", "Train in a container.")
@click.option(
    "--runtime",
    type=click.Choice(get_args(Runtime)),
    default="apptainer",
    show_default=True,
    help="What runs the container. With pyxis the image must have dlprof.",
)
@_text("--python", "PATH", "The interpreter that trains. [default: this one; in a container python3]")
@functools.partial(recording_options, without=("out", "job", "tries"))
@click.argument("command", nargs=-1, metavar="[SCRIPT.py | COMMAND] [-- ARGS]...")
def slurm(recording: Recording, module: str | None, command: tuple[str, ...], **given: Any) -> None:
    """Write a SLURM batch script in which every rank of a job is recorded, into one run folder; submit it if asked to.

    \b
    dlprof slurm train.py --nodes 2 --gpus-per-node 4 --time 1:00:00 -- --lr 0.1
    dlprof slurm -m package.train --procs-per-node 4 --submit -- --lr 0.1

    What stands after -- goes to the script. The options at the end are those of `dlprof wrap`.
    """  # noqa: D301 - \b keeps these lines apart in click's help
    gpus, procs, image, out = (given[name] for name in ("gpus_per_node", "procs_per_node", "container", "out"))
    if bool(gpus) == bool(procs):
        raise click.UsageError("either --gpus-per-node N, or --procs-per-node N for ranks on the CPU")
    if given["numa_binding"] and given["launcher"] != "torchrun":
        raise click.UsageError("--numa-binding is torchrun's; with --launcher srun SLURM binds the ranks")
    words = ("-m", module, *command) if module else command
    if not words:
        raise click.UsageError("a script, -m PACKAGE, or a command")
    if given["requeue_before_limit"] and not given["grace"]:
        raise click.UsageError("--requeue-before-limit needs --grace: how long before the time is up")
    words = _found(words)
    cores = given["cpus_per_rank"] or _usual_cores(given["partition"], gpus, procs)
    chosen = {name: given[name] for name in ("partition", "account", "qos", "time") if given[name]}
    batch = Batch(
        command=words,
        name=name_of([given["job_name"] or name_of(words)]),
        nodes=given["nodes"],
        ranks=gpus or procs,
        gpus=bool(gpus),
        launcher=given["launcher"],
        cores=cores,
        threads=given["omp_threads"] or (1 if gpus else cores),
        runs=given["runs"].absolute(),
        directory=Path.cwd(),
        dlprof=(sys.executable, "-m", "dlprof"),
        python=given["python"] or ("python3" if image else sys.executable),
        recording=tuple(recording.words),
        directives=(*(shlex.quote(f"--{name}={value}") for name, value in chosen.items()), *given["sbatch"]),
        setup=given["setup"],
        grace_s=_grace_s(given["grace"], given["time"]),
        hint=given["hint"] or "",
        numa=given["numa_binding"] or "",
        container=Container(image, given["runtime"]) if image else None,
        group=given["group"] or "",
        requeue=given["requeue_before_limit"] or "",
    )
    text = batch.text()
    if out is not None:
        with writing(str(out)):
            write(out, text)
    elif not given["submits"]:
        click.echo(text, nl=False)
    if given["submits"]:
        _say_submitted(submit(text, out), batch)
    elif out is not None:
        say(f"dlprof: {out} is written; to submit it: sbatch {shlex.quote(str(out))}")


def _grace_s(grace_s: int, time: str | None) -> int:
    """Return how long before its limit a job is told to end: at most half of the limit, which is said where it is."""
    most = limit_s(time or "UNLIMITED") / 2
    if 0 < most < grace_s:  # 0: the limit of the partition, which is not known
        click.echo(
            f"dlprof: --grace {grace_s} is too long for --time {time}: the job is told to end {int(most)} s before",
            err=True,
        )
        return int(most)
    return grace_s


def _usual_cores(partition: str | None, gpus: int | None, procs: int | None) -> int:
    """Return the default number of cores of a rank: at most those of a node, else the job would wait for ever."""
    usual, there = _CORES_WITH_GPU if gpus else _CORES, cores_of_nodes(partition)
    return usual if there is None else max(min(usual, there // (gpus or procs or 1)), 1)


def _found(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words of the job, with a reference workload's path for its name; raise DlprofError for no script."""
    from dlprof.commands.run import workloads

    first, *rest = words
    if first == "-m" or Path(first).is_file():
        return words
    if found := [script for script in workloads() if first in (script.stem, script.name)]:
        return (str(found[0]), *rest)
    if first.endswith(".py"):
        raise DlprofError(f"there is no script {first}")
    return words


def _say_submitted(number: str, batch: Batch) -> None:
    """Print the number of a submitted job, and the commands that show its state."""
    element = "_INDEX" if batch.is_array else ""
    run = f"{batch.runs}/{batch.name}-{number}{element}"
    output = batch.output
    for pattern, value in (
        ("%A", number),
        ("%j", "%j" if batch.is_array else number),
        ("%a", "INDEX"),
        ("%x", batch.name),
    ):
        output = output.replace(pattern, value)
    say(f"dlprof: job {number} is submitted; it records into {run}")
    for what, how in (
        ("its state", f"squeue --job {number}"),
        ("its output", f"tail -F {batch.directory / output}"),
        ("to end it", f"scancel {number}"),
        ("its report", f"{run}/report.html, or dlprof report {run}"),
    ):
        say(f"  {what:<10}  {how}")
