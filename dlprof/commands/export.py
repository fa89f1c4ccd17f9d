"""`dlprof export PATH`: a run in the formats of other tools."""

from __future__ import annotations

from pathlib import Path

import click

from dlprof.commands import jobs, no_limits, quiet, say
from dlprof.errors import DlprofError
from dlprof.progress import Progress
from dlprof.units import count, duration


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--perfetto",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="All ranks on one clock in one reduced trace, for ui.perfetto.dev; packed where the name ends in .gz.",
)
@click.option(
    "--speedscope",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="The Python stacks that py-spy saw, for speedscope.app.",
)
@click.option(
    "--csv",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Every table and every measure as CSV.",
)
@jobs
@no_limits
@quiet
def export(
    path: Path, perfetto: Path | None, speedscope: Path | None, folder: Path | None, jobs: int | None, quiet: bool
) -> None:
    """Write PATH, a run or traces, for other tools: Perfetto, speedscope, or anything that reads CSV."""
    if not (perfetto or speedscope or folder):
        raise click.UsageError("say what to write: --perfetto FILE, --speedscope FILE or --csv FOLDER")
    from dlprof.exports import frames
    from dlprof.exports import perfetto as trace
    from dlprof.exports import speedscope as stacks
    from dlprof.read.run import open_run

    run = open_run(path)
    failed: list[DlprofError] = []
    if perfetto:
        try:
            with Progress(f"{perfetto.name}: ", quiet=quiet) as progress:
                made = trace.write(run, perfetto, jobs, progress)
            say(f"{perfetto}: {count(made.spans, 'span')}, {count(made.arrows, 'arrow')}")
            if made.left_out:
                say(f"  {count(made.left_out, 'span')} of at most {duration(made.shortest_ns)} left out")
            for warning in made.warnings:
                say(f"  {warning}")
        except DlprofError as e:
            failed.append(e)
    if speedscope:
        try:
            with Progress(f"{speedscope.name}: ", quiet=quiet) as progress:
                profiles = stacks.write(run, speedscope, progress)
            say(f"{speedscope}: {count(profiles, 'profile')}")
        except DlprofError as e:
            failed.append(e)
    if folder:
        try:
            with Progress(f"{folder.name}: ", quiet=quiet) as progress:
                there = frames.write(run, folder, jobs, progress)
            say(
                f"{folder}: {count(there.tables, 'table')}, {count(there.measures, 'measure')},"
                f" {there.not_measured} not measured"
            )
        except DlprofError as e:
            failed.append(e)
    if failed:
        raise DlprofError("; ".join(map(str, failed)))
