"""`dlprof report PATH`: the verdict on a run or on traces from anywhere."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dlprof.commands import form, jobs, no_limits, quiet, say, show
from dlprof.errors import DlprofError
from dlprof.files import write
from dlprof.plain import plain
from dlprof.progress import Done, Progress
from dlprof.record.launch.folder import make_first

if TYPE_CHECKING:
    from dlprof.result import Result


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Folder for report.html and result.json.")
@form
@jobs
@no_limits
@click.option(
    "--redact", is_flag=True, help="Leave out the names of users, hosts and folders, so that the report can be shared."
)
@show
@quiet
def report(path: Path, out: Path | None, form: str, jobs: int | None, redact: bool, show: bool, quiet: bool) -> None:
    """Say where the time goes in PATH: a run, a folder of torch-profiler traces, or one trace file.

    Prints the verdict and writes report.html and result.json: beside a run, or into a new folder dlprof-report.
    """
    with Progress(quiet=quiet) as progress:
        result = analyse(path, jobs, _getting_ready(progress), page=True)
    if redact:
        from dlprof.report.sharing import shareable

        result = shareable(result)
    verdict = _json(result) if form == "json" else _verdict(result)
    try:
        html = _write_files(result, path, out)
    finally:
        # Reading may have taken minutes: the verdict is printed even where it could not be written.
        click.echo(verdict)
    if form != "json":
        say(f"report: {shown(html)}")
    if show:
        browse(html)


def browse(page: Path) -> None:
    """Open a page in the user's browser, or say that there is none."""
    import webbrowser

    if not webbrowser.open(page.resolve().as_uri()):
        click.echo("no browser was found to open it with", err=True)


def write_report(path: Path, out: Path | None = None) -> str:
    """Analyse a run, write report.html and result.json, and give the verdict as text for the terminal."""
    # Behind the job's own output, a line that goes again is all that is said meanwhile.
    with Progress(quiet=not sys.stderr.isatty()) as progress:
        result = analyse(path, progress=_getting_ready(progress), page=True)
    return f"{_verdict(result)}\nreport: {plain(shown(_write_files(result, path, out)))}"


def analyse(
    path: Path, jobs: int | None = None, progress: Callable[[Done], None] | None = None, *, page: bool = False
) -> Result:
    """Open a run or traces and ask every rule; what shows the result is imported meanwhile where it is to be shown."""
    # The measures multiply no matrices: threads of a linear-algebra library would only be started, and forked.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from dlprof.read.kineto import prefetch
    from dlprof.read.run import TRACE, open_run
    from dlprof.record.launch.process import keep_memory

    keep_memory()
    run = open_run(path)
    if jobs != 1 and "pandas" not in sys.modules:
        prefetch.begin([rank.files[TRACE] for rank in run.largest_first if TRACE in rank.files])
    # All imports stand here, behind the traces' beginning: what they take, another core decodes in.
    from dlprof.analysis.diagnosis import diagnose
    from dlprof.analysis.rules import RULES

    if page:
        from dlprof.report import html, terminal  # noqa: F401

    return diagnose(run, RULES, jobs, progress)


def _verdict(result: Result) -> str:
    from dlprof.report import terminal

    return terminal.render(result, width(), colour())


def width() -> int:
    """Return how many columns are written."""
    return max(60, min(shutil.get_terminal_size((88, 24)).columns, 110))


def _json(result: Result) -> str:
    from dlprof.result import to_json

    return json.dumps(to_json(result), allow_nan=False, separators=(",", ":"))


def _write_files(result: Result, path: Path, out: Path | None) -> Path:
    """Write result.json and report.html, and give the path of the latter; raise DlprofError where that cannot be."""
    from dlprof.report import html

    files = {"result.json": _json(result), "report.html": html.render(result)}
    if out is None and path.is_dir() and ((path / "run.json").is_file() or (path / "ranks").is_dir()):
        out = path
    return write_into("dlprof-report", out, files) / "report.html"


def write_into(name: str, out: Path | None, files: Mapping[str, str]) -> Path:
    """Write files into a folder, a new one of this name where none was asked for; return the folder.

    Raises DlprofError where it cannot be written, or a thousand of that name are there.
    """
    try:
        if out is None:
            out = make_first(Path(name if n == 1 else f"{name}-{n}") for n in range(1, 1000))
            if out is None:
                raise DlprofError(f"a thousand folders {name} are here already; -o names another")
        out.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            write(out / file, text)
    except OSError as e:
        raise DlprofError(
            f"the report could not be written: {e.strerror}: {e.filename}; -o names another folder"
        ) from None
    return out


def shown(path: Path) -> str:
    """Name a file as is shortest for whoever reads it here."""
    here = os.path.relpath(path)
    return str(path.resolve()) if here.startswith(os.path.join("..", "..")) else here  # noqa: PTH118


def colour() -> bool:
    """Say whether stdout shows colours."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def _getting_ready(progress: Callable[[Done], None]) -> Callable[[Done], None]:
    """Return a function that says how far it is, and gets the page ready while other processes read what is left."""

    def said(done: Done) -> None:
        progress(done)
        if 0 < done.ranks < done.of_ranks:
            from dlprof.report import html

            html.prepare()

    return said
