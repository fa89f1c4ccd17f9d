"""`dlprof try RUN`: runs the job again with what the report advises, and measures what that gains."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dlprof.commands import form, minutes, no_limits, quiet, run_path, say
from dlprof.files import compact
from dlprof.plain import plain

if TYPE_CHECKING:
    from dlprof.result import Result
    from dlprof.result.tried import Attempt, Tried
    from dlprof.trial.search import Options, Trial


@click.command("try", short_help="Run the job again with what the report advises, and measure the gain.")
@run_path
@minutes(10.0)
@click.option("--steps", type=click.IntRange(8, 1_000_000), help="Steady steps of each run. [default: some seconds]")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="'NAME=VALUE ...'",
    help="Try this too, whether or not a finding names it; several settings in one word are tried at once. Repeatable."
    " `dlprof explain settings` lists them.",
)
@click.option("--obvious", is_flag=True, help="Try also what no finding names, but anyone would try.")
@click.option("--allow-numerics", is_flag=True, help="Try changes with which the job computes other numbers, too.")
@click.option("--copy", is_flag=True, help="Run in a new copy of the working directory each time.")
@click.option("--list", "listed", is_flag=True, help="Print what would be tried, and run nothing.")
@form
@no_limits
@quiet
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
def try_(
    path: Path,
    minutes: float,
    steps: int | None,
    settings: tuple[str, ...],
    obvious: bool,
    allow_numerics: bool,
    copy: bool,
    listed: bool,
    form: str,
    quiet: bool,
    command: tuple[str, ...],
) -> None:
    """Run the job of PATH again, unedited, with each change that its findings name, and measure what that gains.

    PATH is a run of `dlprof wrap` or `dlprof run`. Each time the job starts anew and is ended after some steps: without
    changes, with one, without, and so on, until the answers are clear. What it writes, it writes each time.
    COMMAND stands for the recorded command.
    """
    from dlprof.commands.progress import Progress
    from dlprof.commands.report import analyse
    from dlprof.trial.search import Options, prepared

    with Progress(quiet=quiet) as progress:
        result = analyse(path, None, progress)
    options = Options(minutes, steps, settings, obvious, allow_numerics, copy, command)
    if listed:
        _print_plan(prepared(path, result, options, os.environ))
        return
    ended = try_run(path, result, options, form, quiet)
    if ended:
        raise SystemExit(128 + ended)


def _print_plan(trial: Trial) -> None:
    """Print a line for each change that is tried, and for each that is not, with the reason."""
    from dlprof.report.formatting import times
    from dlprof.result.tried import Attempt

    for c in trial.plan.candidates:
        predicted = f", {times(c.predicted)} predicted" if c.predicted else ""
        say(f"{Attempt(c.settings, 'not_tried').words}: named by {', '.join(c.findings) or 'no finding'}{predicted}")
    for attempt in trial.plan.left_out:
        say(f"{attempt.words}: not tried: {attempt.why}")
    for skipped in trial.plan.skipped:
        say(f"not tried: {skipped}")


def try_run(
    path: Path, result: Result, options: Options, form: str = "text", quiet: bool = False, *, err: bool = False
) -> int:
    """Try, print the results and add them to the run's report; return the signal that stopped it, 0 for none.

    `err`: print everything on stderr, because stdout belongs to the job.

    Raises DlprofError if nothing can be tried.
    """
    from dlprof.commands.report import width, write_files
    from dlprof.report.tried_text import render
    from dlprof.result.tried import to_json
    from dlprof.trial.job import added
    from dlprof.trial.running import stopping
    from dlprof.trial.search import prepared, tried

    trial = prepared(path, result, options, os.environ)
    if not quiet:
        for line in _announced(trial):
            say(f"dlprof: {line}", err=True)

    def tell(found: Attempt | float) -> None:
        if not quiet:
            say(f"dlprof: {_told(found)}", err=True)

    with stopping() as stop:
        found: Tried = tried(trial, stop, tell)
    if form == "json":
        click.echo(compact(to_json(found)))
    else:
        click.echo(plain(render(found, width()), keep="\n"), nl=False, err=err)
        for skipped in trial.plan.skipped:
            say(f"not tried: {skipped}", err=err)
    write_files(added(result, found), path, path)
    return stop.by


def _announced(trial: Trial) -> list[str]:
    """Return the lines that announce what will run."""
    from dlprof.units import count, few

    changes = trial.plan.candidates
    if not changes:
        return ["nothing to try: no finding names a change that can be set from outside (--obvious tries more)"]
    options = trial.options
    lines = [
        f"{count(len(changes), 'change')} to try, {count(trial.steps, 'steady step')} a run, for at most"
        f" {options.minutes:g} minutes: {' '.join(trial.job.command)[:200]}"
    ]
    if options.copy:
        lines.append("each run has a new copy of the working directory; the script still writes to other folders")
    else:
        saves = f": it was seen to save {few(trial.job.saves, 3)}" if trial.job.saves else ""
        lines.append(
            f"the script starts again and again in {trial.job.cwd}, and each time writes its files{saves}"
            " (--copy has it run in a copy)"
        )
    return [*lines, *trial.warnings]


def _told(found: Attempt | float) -> str:
    from dlprof.report.formatting import duration
    from dlprof.report.tried import row

    if isinstance(found, float):
        return f"without changes: {duration(found)} a step".replace("\u00a0", " ")
    return row(found).replace("\u00a0", " ")
