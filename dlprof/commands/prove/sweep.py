"""`dlprof sweep NAME=VALUES -- SCRIPT`: the job with each of several values of its settings, measured."""

from __future__ import annotations

import os
from pathlib import Path

import click

from dlprof.commands import (
    WithCommand,
    after_dashes,
    form,
    minutes,
    new_folder,
    out,
    quiet,
    rarely,
    say,
    show,
    teller,
    under_python,
)
from dlprof.errors import DlprofError


@click.command(cls=WithCommand, short_help="Measure a job with each of several values of its settings.")
@click.argument("axes", nargs=-1, required=True, metavar="NAME=VALUES... -- SCRIPT.py [ARGS]...")
@minutes(30.0)
@click.option(
    "--steps", type=click.IntRange(8, 1_000_000), default=30, show_default=True, help="Steady steps of each run."
)
@click.option("--list", "listed", is_flag=True, help="Print the points, and run nothing.")
@out("Folder of the sweep; one that holds this sweep already is gone on with. [default: a new dlprof-sweep]")
@form
@show
@quiet
@rarely
@click.option(
    "--rounds", type=click.IntRange(1, 100), default=2, show_default=True, help="How often each point is measured."
)
@click.option("--no-predict", is_flag=True, help="Do not record the job first to predict the curve of its workers.")
@click.option("--allow-numerics", is_flag=True, help="Allow settings with which the job computes other numbers.")
@click.option("--copy", is_flag=True, help="Run in a new copy of the working directory each time.")
@click.pass_context
def sweep(
    ctx: click.Context,
    axes: tuple[str, ...],
    minutes: float,
    steps: int,
    rounds: int,
    no_predict: bool,
    allow_numerics: bool,
    copy: bool,
    listed: bool,
    out: Path | None,
    form: str,
    show: bool,
    quiet: bool,
) -> None:
    """Run an unedited script with each of several values of its settings, and show the curve.

    \b
    dlprof sweep loader.num_workers=0,1,2,4,8 -- train.py --lr 0.1
    dlprof sweep loader.num_workers=0..4 torch.num_threads=1,2 -- train.py
    dlprof sweep batch=8..64*2 -- train.py --batch-size {batch}
    dlprof sweep n=1,2,4 -- torchrun --nproc-per-node {n} train.py

    NAME is a setting of `dlprof explain settings`, or stands as {NAME} in the command. VALUES: by commas, A..B,
    A..B..STEP or A..B*FACTOR; several axes make a grid. Each point starts the job anew and ends it after some steady
    steps, in rounds, so that a machine that drifts does so to all points. What it writes, it writes each time. After
    Ctrl-C, or when the time is up, the same command with -o of its folder goes on.
    """  # noqa: D301 - \b keeps these lines apart in click's help
    from dlprof.commands.report import print_summary, shown, write_summary
    from dlprof.overrides import changes_numbers
    from dlprof.report.studies import of_sweep
    from dlprof.result.sweep import to_json
    from dlprof.trial.job import Job, refuse_inside, without_ours
    from dlprof.trial.running import stopping
    from dlprof.trial.sweep import (
        Options,
        axis,
        begun,
        grid,
        placeholders,
        settings,
        swept,
        threads,
    )

    words = after_dashes(ctx)
    if not words:
        raise click.UsageError("name the script after --: dlprof sweep loader.num_workers=0,2 -- train.py")
    refuse_inside(os.environ)
    command = tuple(under_python(words))
    try:
        parsed = [axis(word) for word in axes]
        of_command = placeholders(parsed, command)
        points = grid(parsed)
    except DlprofError as e:
        raise click.UsageError(str(e)) from None
    other = sorted({n for p in points for n in changes_numbers(settings(p, of_command))})
    if other and not allow_numerics:
        raise click.UsageError(f"{', '.join(other)}: the job then computes other numbers; --allow-numerics allows it")
    if listed:
        for point in points:
            say(" ".join(f"{n}={v}" for n, v in point.items()))
        return
    folder = out or new_folder("dlprof-sweep")
    options = Options(minutes, steps, rounds, not no_predict, copy, allow_numerics)
    going = begun(command, parsed, folder, options)
    env = without_ours(os.environ)
    each = None if "OMP_NUM_THREADS" in env else threads(parsed, command, len(os.sched_getaffinity(0)))
    job = Job(command, Path.cwd(), env | ({} if each is None else {"OMP_NUM_THREADS": str(each)}), {})
    tell = teller(quiet)
    tell(f"{len(points)} points, {rounds} rounds, for at most {minutes:g} minutes, in {shown(folder)}")
    if each is not None:
        tell(f"OMP_NUM_THREADS={each} for every process, so that points with one and with several compare")
    with stopping() as asks:
        done = swept(going, job, folder, options, asks, tell)
    outcome = of_sweep(done)
    if any(p.readings for p in done.points):
        write_summary(outcome, to_json(done), "sweep", "", folder, form, show=show)
    else:
        print_summary(outcome, to_json(done), form)
    if asks.by:
        raise SystemExit(128 + asks.by)
    if not any(p.readings for p in done.points):
        raise SystemExit(1)
