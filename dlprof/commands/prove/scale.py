"""`dlprof scale`: throughput and efficiency on several numbers of ranks, what grows, and what more ranks would give."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dlprof.commands import WithCommand, after_dashes, form, jobs, minutes, no_limits, out, quiet, rarely, say, show
from dlprof.errors import DlprofError

if TYPE_CHECKING:
    from dlprof.trial.job import Job
    from dlprof.trial.sweep.sizes import Recorded

_MOST_RANKS = 1 << 20


def _sizes(_ctx: click.Context, option: click.Parameter, text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        found = sorted(int(word) for word in text.split(","))
    except ValueError:
        found = []
    if not found or not 1 <= found[0] <= found[-1] <= _MOST_RANKS:
        raise click.BadParameter(f"{text!r} names no numbers of ranks; write 1,2,4,8", param=option)
    if twice := next((n for n, more in itertools.pairwise(found) if n == more), None):
        raise click.BadParameter(f"{text!r} names {twice} twice; write each once", param=option)
    return tuple(found)


@click.command(cls=WithCommand, short_help="Show how a job scales, and predict it on more ranks.")
@click.argument("paths", nargs=-1, metavar="[WORKLOAD | RUN RUN...] [-- SCRIPT.py or OPTIONS...]")
@click.option("--gpus", callback=_sizes, metavar="1,2,4,8", help="Numbers of ranks to record on, one a GPU.")
@click.option("--procs", callback=_sizes, metavar="1,2", help="The same on the CPU.")
@minutes(30.0)
@click.option("--at", "targets", callback=_sizes, metavar="64,1024", help="Numbers of ranks to predict.")
@out("Folder of the study; one that holds recordings of it is gone on with. [default: a new dlprof-scale]")
@form
@show
@quiet
@rarely
@click.option(
    "--mode",
    type=click.Choice(["weak", "strong"]),
    default="weak",
    show_default=True,
    help="weak: each rank has a batch of its own; strong: all share one.",
)
@click.option("--batch", type=click.IntRange(min=1), help="Batch of each rank; with strong, of all ranks.")
@click.option("--repeat", type=click.IntRange(1, 100), default=2, show_default=True, help="Recordings of each size.")
@click.option("--steps", type=click.IntRange(60, 1_000_000), default=60, show_default=True, help="Steps of each.")
@jobs
@no_limits
@click.pass_context
def scale(
    ctx: click.Context,
    paths: tuple[str, ...],
    gpus: tuple[int, ...],
    procs: tuple[int, ...],
    mode: str,
    batch: int | None,
    repeat: int,
    steps: int,
    minutes: float,
    targets: tuple[int, ...],
    out: Path | None,
    form: str,
    jobs: int | None,
    show: bool,
    quiet: bool,
) -> None:
    """Record a job on several numbers of ranks, or take runs that exist, and show throughput and efficiency.

    \b
    dlprof scale ddp_resnet --procs 1,2
    dlprof scale --gpus 1,2,4,8 --batch 32 -- torchrun --nproc-per-node {ranks} train.py --batch-size {batch}
    dlprof scale runs/1 runs/2 runs/4 runs/8

    Runs that exist may be of any cluster: folders, or their result.json. Shown are the speed-up and the efficiency of
    each size, which part of the step grows, and the step predicted for more ranks, with its interval. How good that is
    shows in the largest size, predicted from the others.
    """  # noqa: D301 - \b keeps these lines apart in click's help
    from dlprof.commands import new_folder
    from dlprof.trial.running import stopping

    command = after_dashes(ctx)
    if gpus and procs:
        raise click.UsageError("--gpus and --procs exclude each other")
    sizes = gpus or procs
    if not sizes:
        if command:
            raise click.UsageError("name the numbers of ranks: --procs 1,2 or --gpus 1,2,4")
        if len(paths) < 2:
            raise click.UsageError("name two runs or more, or a workload with --procs 1,2 or --gpus 1,2,4")
        _study([Path(p) for p in paths], [], targets, out, form, jobs, show=show, quiet=quiet)
        return
    if len(paths) > 1 or (paths and paths[0].endswith(".json")):
        raise click.UsageError("--procs and --gpus record a workload or a command: name no runs")
    if os.environ.get("DLPROF_RUN"):
        raise DlprofError(f"this already runs under dlprof, which records into {os.environ['DLPROF_RUN']}")
    todo = _jobs(paths, command, sizes, bool(gpus), mode, batch)
    folder = out or new_folder("dlprof-scale")

    def tell(line: str) -> None:
        if not quiet:
            say(f"dlprof: {line}", err=True)

    from dlprof.trial.sweep.sizes import Options, record_sizes

    with stopping() as asks:
        done = record_sizes(todo, folder, Options(minutes, steps, repeat), asks, tell)
    found = [path for _, of in sorted(done.paths.items()) for path in of]
    if found:
        _study(found, _lacking(done), targets, folder, form, jobs, show=show, quiet=quiet)
    if asks.by:
        raise SystemExit(128 + asks.by)
    if not found:
        raise DlprofError("; ".join(f"{name}: {why}" for name, why in done.failed) or done.lacking)


def _lacking(done: Recorded) -> list[tuple[str, str]]:
    return [*done.failed, *([("a part of the study", done.lacking)] if done.lacking else [])]


def _jobs(
    paths: Sequence[str], command: Sequence[str], sizes: Sequence[int], gpus: bool, mode: str, batch: int | None
) -> Mapping[int, Job]:
    """Return the job of each size; raise DlprofError or UsageError where there is none."""
    from dlprof.commands.run import count_gpus, find_workload, launcher
    from dlprof.trial.job import Job
    from dlprof.trial.sweep.sizes import filled_for

    strong = mode == "strong"
    env = {n: v for n, v in os.environ.items() if not n.startswith("DLPROF_")}
    if gpus and sizes[-1] > count_gpus():
        raise DlprofError(f"--gpus {sizes[-1]}: there are {count_gpus()} GPUs here; record larger sizes where they are")
    if not gpus:
        env["CUDA_VISIBLE_DEVICES"] = ""
        # All sizes have the same: what a rank computes on fewer or more cores does not compare.
        env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // sizes[-1])))
    if not paths:
        if not command:
            raise click.UsageError("name a workload, or the script after --")
        python = command[0].endswith(".py") or command[0].startswith("-m")
        words = (sys.executable, *command) if python else tuple(command)
        if not any("{ranks}" in word for word in words):
            raise click.UsageError("write {ranks} where the command takes their number: --nproc-per-node {ranks}")
        if strong and not any("{batch}" in word for word in words):
            raise click.UsageError("--mode strong: write {batch} where the command takes the batch of a rank")
        of = dict.fromkeys(sizes, words)
    else:
        script = find_workload(paths[0])
        if strong and batch is None:
            raise click.UsageError("--mode strong: name the batch of all ranks with --batch")
        options = (*(("--batch-size", "{batch}") if batch is not None else ()), *command)
        of = {n: (*launcher(script, n), str(script), *options) for n in sizes}
    return {n: Job(filled_for(words, n, batch, strong=strong), Path.cwd(), env, {}) for n, words in of.items()}


def _study(
    paths: Sequence[Path],
    left_out: Sequence[tuple[str, str]],
    targets: Sequence[int],
    out: Path | None,
    form: str,
    jobs: int | None,
    *,
    show: bool,
    quiet: bool,
) -> None:
    """Read the runs, print and write the study; raise DlprofError if no run can be read."""
    from dlprof.analysis.compare.ladder import script_of
    from dlprof.analysis.scaling.predictions import TARGETS, replays_of, studied
    from dlprof.analysis.scaling.study import Named, sizes
    from dlprof.commands.prove.compare import name_of, result_of
    from dlprof.commands.report import write_summary
    from dlprof.report.compare.scale import summary
    from dlprof.result.scale import to_json

    runs, broken, places = list[Named](), list(left_out), dict[int, list[Path]]()
    for path in paths:
        name = name_of(path, paths)
        try:
            result = result_of(path, jobs, quiet)
        except DlprofError as e:
            broken.append((name, str(e)))
            continue
        runs.append(Named(name, result))
        if path.is_dir():
            places.setdefault(result.run.world_size, []).append(path)
    found = sizes(runs, broken)
    if not found.sizes:
        raise DlprofError("; ".join(["none of these runs has a size", *(f"{n}: {w}" for n, w in found.left_out)]))
    script = script_of(found.runs[0][0].result) or found.runs[0][0].name
    study = studied(script, found, targets or TARGETS, replays_of(places, jobs))
    write_summary(summary(study), to_json(study), "scale", "dlprof-scale", out, form, show=show)
