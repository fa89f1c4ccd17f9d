"""`dlprof try RUN`: runs the job again with what the report advises, and measures what that gains."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dlprof.commands import form, minutes, no_limits, quiet, rarely, run_path, say, teller
from dlprof.errors import RefusedError
from dlprof.files import compact
from dlprof.plain import NBSP, plain

in_place = click.option("--in-place", is_flag=True, help="Run in the job's own folder, and not in copies of it.")

if TYPE_CHECKING:
    from dlprof.result import Result
    from dlprof.result.tried import Attempt, Tried
    from dlprof.trial.search import Options, Trial


@click.command("try", short_help="Run the job again with what the report advises, and measure the gain.")
@run_path
@minutes(10.0)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="'NAME=VALUE ...'",
    help="Try this too, whether or not a finding names it; several settings in one word are tried at once. Repeatable."
    " `dlprof explain settings` lists them.",
)
@click.option("--allow-numerics", is_flag=True, help="Try changes with which the job computes other numbers, too.")
@click.option(
    "--change",
    "changes",
    type=click.IntRange(min=1),
    multiple=True,
    metavar="N",
    help="Try only the N-th change that the report proposes: from outside, or by an edit of a copy. Repeatable.",
)
@click.option("--only", is_flag=True, help="Try nothing but what --set names.")
@in_place
@click.option("--copy", is_flag=True, hidden=True, expose_value=False, help="As without --in-place.")
@click.option("--list", "listed", is_flag=True, help="Print what would be tried, and run nothing.")
@form
@quiet
@rarely
@click.option("--steps", type=click.IntRange(8, 1_000_000), help="Steady steps of each run. [default: some seconds]")
@click.option("--obvious", is_flag=True, help="Try also what no finding names, but anyone would try.")
@no_limits
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
def try_(
    path: Path,
    minutes: float,
    steps: int | None,
    settings: tuple[str, ...],
    obvious: bool,
    allow_numerics: bool,
    changes: tuple[int, ...],
    only: bool,
    in_place: bool,
    listed: bool,
    form: str,
    quiet: bool,
    command: tuple[str, ...],
) -> None:
    """Run the job of PATH again with each change that its findings name, and measure what that gains.

    PATH is a run of `dlprof wrap` or `dlprof run`. Each time the job starts anew, in a copy of its folder, and is ended
    after some steps: without changes, with one, without, and so on, until the answers are clear. COMMAND stands for the
    recorded command.
    """
    from dlprof.commands.progress import Progress
    from dlprof.commands.report import analyse
    from dlprof.trial.search import Options, prepared

    with Progress(quiet=quiet) as progress:
        result = analyse(path, None, progress)
    # Who names a change by its number has read that it changes the numbers.
    allow_numerics |= any(one.change.numerics for n, one in enumerate(result.changes, 1) if n in changes)
    options = Options(minutes, steps, settings, obvious, allow_numerics, in_place, changes, command, only)
    if listed:
        trial = prepared(path, result, options, os.environ)
        for line in (*_planned(trial), *_not_tried(trial)):
            say(line)
        return
    ended = try_run(path, result, options, form, quiet)
    if ended:
        raise SystemExit(128 + ended)


def _planned(trial: Trial) -> list[str]:
    """Return a line for each change that is tried."""
    from dlprof.report.formatting import times
    from dlprof.result.tried import Attempt

    lines = []
    for c in trial.plan.candidates:
        predicted = f", {times(c.predicted)} predicted".replace(NBSP, " ") if c.predicted else ""
        words = Attempt(c.settings, "not_tried").words
        lines.append(f"{words}: named by {', '.join(c.findings) or 'no finding'}{predicted}")
    return lines


def _not_tried(trial: Trial) -> list[str]:
    """Return a line for each change that is not tried, with the reason."""
    lines = [f"not tried: {attempt.words}: {attempt.why}" for attempt in trial.plan.left_out]
    lines += [f"not tried: {skipped}" for skipped in trial.plan.skipped]
    return lines + by_hand(trial)


def by_hand(trial: Trial) -> list[str]:
    """Return the change that is predicted to gain most, with its edit, if it cannot be tried; else nothing."""
    change = trial.plan.by_hand
    if change is None:
        return []
    at = f" ({change.at.file}:{change.at.line})" if change.at else ""
    most = f"the change that is predicted to gain most is one to make by hand: {change.text}{at}"
    return [most, *change.diff.splitlines()]


def try_run(
    path: Path, result: Result, options: Options, form: str = "text", quiet: bool = False, *, err: bool = False
) -> int:
    """Try, print the results and add them to the run's report; return the signal that stopped it, 0 for none.

    `err`: print everything on stderr, because stdout belongs to the job.

    Raises DlprofError if nothing can be tried.
    """
    from dlprof.result.tried import to_json
    from dlprof.trial.running import stopping
    from dlprof.trial.search import LEAST_PAIRS, prepared

    trial = prepared(path, result, options, os.environ)
    if trial.least_minutes > options.minutes:
        raise RefusedError(
            f"{options.minutes:.3g} min are too short: a run takes about {trial.run_s:.0f} s, and a change needs"
            f" {1 + 2 * LEAST_PAIRS}; --minutes {math.ceil(trial.least_minutes)} or more"
        )
    with stopping() as stop:
        found = measured(path, result, trial, stop, quiet)
    if form == "json":
        click.echo(compact(to_json(found)))
    else:
        print_tried(found, err=err)
    return stop.by


def print_tried(found: Tried, *, err: bool = False) -> None:
    """Print what was tried, for people."""
    from dlprof.commands.report import width
    from dlprof.report.terminal import trial

    click.echo(plain(trial(found, width()), keep="\n"), nl=False, err=err)


def measured(path: Path, result: Result, trial: Trial, stop: Callable[[], bool], quiet: bool) -> Tried:
    """Say what will be tried, try it, and add the results to the run's report. Raises DlprofError if it cannot run."""
    from dlprof.commands.report import write_files
    from dlprof.trial.job import added
    from dlprof.trial.search import tried

    tell = teller(quiet)
    for line in _announced(trial):
        tell(line)
    found: Tried = tried(trial, stop, lambda found: tell(_attempted(found)))
    write_files(added(result, found), path, path)
    return found


def _announced(trial: Trial) -> list[str]:
    """Return the lines that announce what will run."""
    from dlprof.trial.search import LEAST_PAIRS
    from dlprof.units import count, few

    changes = trial.plan.candidates
    if not changes:
        return [
            "nothing to try: no finding names a change that can be set from outside (--obvious tries more)",
            *_not_tried(trial),
        ]
    options = trial.options
    lines = [
        f"{count(len(changes), 'change')} to try, {count(trial.steps, 'steady step')} a run, for at most"
        f" {options.minutes:.3g} minutes: {' '.join(trial.job.command)[:200]}",
        *(f"{place}. {line}" for place, line in enumerate(_planned(trial), 1)),
        *_not_tried(trial),
    ]
    if trial.run_s:
        minutes = (1 + 2 * LEAST_PAIRS * len(changes)) * trial.run_s / 60
        less = "; the first ones come first" if minutes > options.minutes and len(changes) > 1 else ""
        lines.append(
            f"a run takes about {trial.run_s:.0f} s, {LEAST_PAIRS} pairs of each change about {minutes:.1f} min{less}"
        )
    if trial.not_copied:
        saves = f": it was seen to save {few(trial.job.saves, 3)}" if trial.job.saves else ""
        lines.append(
            f"the script starts again and again in {trial.job.cwd} ({trial.not_copied}), and each time writes its"
            f" files{saves}"
        )
    else:
        lines.append(
            f"each run has a new copy of {trial.job.cwd}, with links to large data, which it must only read; wandb,"
            " MLflow and others write into it, and to no server"
        )
        elsewhere = [path for path in trial.job.saves if path.startswith(("/", ".."))]
        lines += [f"not redirected, as it names the place itself: {few(elsewhere, 3)}"] if elsewhere else []
    return [*lines, *trial.warnings]


def _attempted(found: Attempt | float) -> str:
    from dlprof.report.formatting import duration
    from dlprof.report.tried import row

    if isinstance(found, float):
        return f"without changes: {duration(found)} a step".replace(NBSP, " ")
    return row(found).replace(NBSP, " ")
