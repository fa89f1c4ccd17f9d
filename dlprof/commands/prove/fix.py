"""`dlprof fix train.py`: records a job, tries what the report proposes, and writes what helped as a patch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dlprof.commands import form, minutes, no_limits, out, quiet, rarely, say, teller
from dlprof.commands.configured import CONFIG
from dlprof.commands.prove.try_ import in_place
from dlprof.commands.recording import checked_by
from dlprof.commands.wrap import OfScript, name_of, with_python
from dlprof.errors import DlprofError
from dlprof.files import compact, write, writing
from dlprof.record.launch import options

if TYPE_CHECKING:
    from dlprof.trial.running import Interruption

FILE = "fix.patch"
_RUN = "dlprof.fixed_run"  # in the context's meta


class _Fix(OfScript):
    """Takes a run folder with options after it, as well as a script or a command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the run folder, if one is named, and parse the rest."""
        of_ours = args[: args.index("--")] if "--" in args else args
        run = next((word for word in of_ours if Path(word, "run.json").is_file()), None)
        if run is None:
            return super().parse_args(ctx, args)
        ctx.meta[_RUN] = Path(run)
        at = args.index(run)
        return click.Command.parse_args(self, ctx, [*args[:at], *args[at + 1 :]])


@click.command(
    cls=_Fix,
    options_metavar="[OPTIONS]",
    context_settings={"allow_interspersed_args": False},
    short_help="Find what makes a job faster, as a patch.",
)
@minutes(10.0)
@click.option("--write", "written", is_flag=True, help="Also apply the patch to the job's files.")
@out("The folder of the recording [default: a new one in runs/].")
@form
@quiet
@rarely
@click.option(
    "--stop-after",
    type=checked_by(options.stop_after),
    metavar="N|TIME",
    help="How much of the job to record: steps (200) or a time (90s, 5m). [default: 60s, less with few --minutes]",
)
@click.option(
    "--allow-numerics", is_flag=True, help="Try and keep changes with which the job computes other numbers, too."
)
@in_place
@no_limits
@click.argument(
    "command",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="(RUN | SCRIPT.py | -m PACKAGE | -- COMMAND) [ARGS]...",
)
@click.pass_context
def fix(
    ctx: click.Context,
    minutes: float,
    stop_after: str | None,
    written: bool,
    allow_numerics: bool,
    in_place: bool,
    out: Path | None,
    form: str,
    quiet: bool,
    command: tuple[str, ...],
) -> None:
    """Record a training script, try what makes it faster, and write what helped as a patch.

    \b
    dlprof fix train.py --lr 0.1
    dlprof fix -- torchrun --nproc-per-node 4 train.py --lr 0.1
    dlprof fix runs/a

    The job is recorded in its folder for a minute (a RUN is not recorded again). Then it runs again and again in copies
    of its folder, without and with each proposed change, alone and together, and the losses are compared. What made it
    faster becomes fix.patch in the run folder; --write applies it. Nothing to gain is an answer, too.
    """  # noqa: D301 - \b keeps these lines apart in click's help
    from dlprof.commands.prove.try_ import by_hand, measured, print_tried
    from dlprof.commands.report import analyse, shown, width
    from dlprof.report.terminal import to_keep
    from dlprof.result.tried import to_json
    from dlprof.trial.copies import edit_in
    from dlprof.trial.running import stopping
    from dlprof.trial.search import Options, fixed, prepared

    run = ctx.meta.get(_RUN)
    if run is None and not command:
        raise click.UsageError("name a script, a command after --, or a run")
    words = with_python(ctx, command) if command and run is None else list(command)
    began = time.monotonic()
    limit = stop_after or f"{min(60, max(10, int(15 * minutes)))} s of training"
    with stopping() as stop:
        path = run if run is not None else _recorded(words, out, limit, quiet, stop)
        if stop.by:
            raise SystemExit(128 + stop.by)
        result = analyse(path)
        if result.window is None:
            why = "no step was recorded" if run is not None else f"no step has ended within {limit}"
            raise DlprofError(f"{path}: {why}; --stop-after 5m --minutes 30 give it longer")
        left = max(minutes - (time.monotonic() - began) / 60, 0.1)
        chosen = Options(left, allow_numerics=allow_numerics, in_place=in_place, command=tuple(words))
        trial = prepared(path, result, chosen, os.environ)
        found = measured(path, result, trial, stop, quiet)
    made = fixed(trial, result, found)
    file = path / FILE
    if made.patch.text:
        with writing(f"the patch {file}"):
            write(file, made.patch.text)
    elif file.exists():
        file.unlink()
    why = edit_in(trial.job.cwd, made.patch) if written else ""
    if form == "json":
        patch = {"patch": str(file) if made.patch.text else None, "words": made.words, "lines": made.lines}
        said = {"by_hand": by_hand(trial), "written": written and not why, "why": why}
        click.echo(compact({**to_json(found), "fix": {**patch, **said}}))
    else:
        print_tried(found)
        there = f"cd {trial.job.cwd} && " if Path.cwd() != trial.job.cwd else ""
        for line in (*to_keep(found, made.words, made.lines, width()), *by_hand(trial)):
            say(line)
        if made.patch.text and written and not why:
            say(f"Written into {', '.join(made.lines)}. To undo: {there}patch -R -p1 < {shown(file)}")
        elif made.patch.text:
            say(
                why
                or f"To apply: {there}git apply {shown(file.resolve())} (or patch -p1 < …); to undo: patch -R -p1 < …"
            )
    if stop.by or (found.state == "failed" and found.best is None):
        raise SystemExit(128 + stop.by if stop.by else 1)


def _recorded(words: Sequence[str], out: Path | None, stop_after: str, quiet: bool, stop: Interruption) -> Path:
    """Record a command for a while as `dlprof wrap` does, and return the run; raise DlprofError if it fails."""
    from dlprof.commands import new_folder
    from dlprof.record.launch.process import tied
    from dlprof.trial.copies import quiet_trackers
    from dlprof.trial.job import refuse_inside
    from dlprof.trial.running import DLPROF

    refuse_inside(os.environ)
    folder = out or new_folder(f"runs/{name_of(words)}-fix")
    teller(quiet)(f"recording into {folder} for {stop_after}; the script runs in this folder, as it is")
    of_ours = ["-o", str(folder), "--no-report", "--quiet", "--stop-after", stop_after]
    process = subprocess.Popen(
        [*DLPROF, "wrap", *of_ours, "--", *words],
        env={**os.environ, **quiet_trackers(os.environ, folder.resolve()), CONFIG: ""},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),
        start_new_session=True,
        preexec_fn=tied(signal.SIGTERM),
    )
    while process.poll() is None:
        if stop():
            os.killpg(process.pid, stop.by)
            process.wait()
            break
        time.sleep(0.1)
    if process.returncode and not stop.by:
        how = f"exit code {process.returncode}" if process.returncode > 0 else f"signal {-process.returncode}"
        raise DlprofError(f"the job ended with {how}: nothing is tried (`dlprof report {folder}` says more)")
    return folder
