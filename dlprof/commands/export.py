"""`dlprof export PATH`: a run in the formats of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dlprof.commands import PATH, file, jobs, no_limits, quiet, rarely, run_path, say
from dlprof.commands.progress import Progress
from dlprof.errors import DlprofError
from dlprof.units import count, duration

if TYPE_CHECKING:
    from dlprof.read.run import Run


@click.command(short_help="Write a run for Perfetto, speedscope or a spreadsheet.")
@run_path
@file(
    "--perfetto",
    "All ranks on one clock in one reduced trace, for ui.perfetto.dev; packed where the name ends in .gz.",
)
@file("--speedscope", "The Python stacks that py-spy saw, for speedscope.app.")
@click.option("--csv", type=PATH, metavar="FOLDER", help="Every table and every measure as CSV.")
@quiet
@rarely
@jobs
@no_limits
def export(
    path: Path, perfetto: Path | None, speedscope: Path | None, csv: Path | None, jobs: int | None, quiet: bool
) -> None:
    """Write PATH, a run or traces, for other tools: Perfetto, speedscope, or anything that reads CSV."""
    if not (perfetto or speedscope or csv):
        raise click.UsageError("name what to write: --perfetto FILE, --speedscope FILE or --csv FOLDER")
    from dlprof.read.run import open_run

    run = open_run(path)
    failed = []
    for target, write in ((perfetto, _perfetto), (speedscope, _speedscope), (csv, _csv)):
        if target:
            try:
                with Progress(f"{target.name}: ", quiet=quiet) as progress:
                    written = write(run, target, jobs, progress)
                say(f"{target}: {written[0]}")
                for line in written[1:]:
                    say(f"  {line}")
            except DlprofError as e:
                failed.append(str(e))
    if failed:
        raise DlprofError("; ".join(failed))


def _perfetto(run: Run, path: Path, jobs: int | None, progress: Progress) -> list[str]:
    from dlprof.exports import perfetto

    made = perfetto.write(run, path, jobs, progress)
    left_out = [f"{count(made.left_out, 'span')} of at most {duration(made.shortest_ns)} left out"]
    spans = f"{count(made.spans, 'span')}, {count(made.arrows, 'arrow')}"
    return [spans, *(left_out if made.left_out else []), *made.warnings]


def _speedscope(run: Run, path: Path, _jobs: int | None, progress: Progress) -> list[str]:
    from dlprof.exports import speedscope

    return [count(speedscope.write(run, path, progress), "profile")]


def _csv(run: Run, folder: Path, jobs: int | None, progress: Progress) -> list[str]:
    from dlprof.exports import frames

    made = frames.write(run, folder, jobs, progress)
    return [f"{count(made.tables, 'table')}, {count(made.measures, 'measure')}, {made.not_measured} not measured"]
