"""`dlprof history FOLDER`: the runs of one script over time, and the moments at which it changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dlprof.commands import form, jobs, no_limits, out, quiet, show
from dlprof.errors import DlprofError
from dlprof.read.opening import read_file

if TYPE_CHECKING:
    from dlprof.analysis.compare.history import Recorded

_DEEPEST = 3  # folders below the one that is named
_MOST = 500  # runs that are read


@click.command(short_help="Show how a script's runs changed over time, and with which settings.")
@click.argument("paths", type=click.Path(path_type=Path, exists=True), nargs=-1, required=True, metavar="FOLDER...")
@click.option("--script", help="Whose runs. [default: that of most runs]")
@out("Folder for history.html and history.json, which are else not written.")
@form
@jobs
@no_limits
@show
@quiet
def history(
    paths: tuple[Path, ...], script: str | None, out: Path | None, form: str, jobs: int | None, show: bool, quiet: bool
) -> None:
    """Show the throughput and findings of the runs below FOLDER in order of time, and what changed when they did.

    Runs are those of `dlprof wrap` and `dlprof run`, and files result.json of other folders. A run's result.json is
    read where it has one, else the run itself. Runs of other scripts, on other devices or of unknown other work are
    left out, with the reason.
    """
    from dlprof.analysis.compare.history import history as made_of
    from dlprof.commands.prove.compare import name_of
    from dlprof.commands.report import print_summary, write_summary
    from dlprof.report.compare.history import summary, to_json

    found = [run for path in paths for run in _below(path, _DEEPEST)]
    if not found:
        raise DlprofError(f"{', '.join(map(str, paths))}: no run, and no result.json")
    if len(found) > _MOST:
        raise DlprofError(f"more than {_MOST} runs: name fewer folders")
    read, broken = [], []
    for path in found:
        name = name_of(path, found)
        try:
            read.append(_recorded(name, path, jobs, quiet))
        except DlprofError as e:
            broken.append((name, str(e)))
    told = made_of(read, broken, script or "")
    if script and not told.ladder.rungs:
        raise DlprofError(f"no run of {script} has steps")
    said = summary(told)
    if out is None and not show:
        print_summary(said, to_json(told), form)
    else:
        write_summary(said, to_json(told), "history", "dlprof-history", out, form, show=show)


def _below(path: Path, deep: int) -> Iterator[Path]:
    """Yield the runs and the files result.json at a path and below it, in order of their names."""
    if path.is_file():
        yield path
        return
    if (path / "run.json").is_file() or (path / "ranks").is_dir():
        yield path
        return
    if (path / "result.json").is_file():
        yield path / "result.json"
    if deep:
        try:
            inside = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
        except OSError:  # a folder of somebody else's
            return
        for folder in inside:
            yield from _below(folder, deep - 1)


def _recorded(name: str, path: Path, jobs: int | None, quiet: bool) -> Recorded:
    """Return a run with its result and its start; raise DlprofError where it cannot be read."""
    from dlprof.analysis.compare.history import Recorded
    from dlprof.commands.prove.compare import result_of

    kept = path / "result.json"
    source = kept if path.is_dir() and kept.is_file() else path
    try:
        result = result_of(source, jobs, quiet)
    except DlprofError:
        if source is path:
            raise
        result = result_of(path, jobs, quiet)  # of an older dlprof, or damaged
    return Recorded(name, result, _start_ns(path))


def _start_ns(path: Path) -> int | None:
    """Return when a run started, by its run.json; of a file result.json when it was written."""
    if path.is_file():
        return path.stat().st_mtime_ns
    try:
        found = json.loads(read_file(path / "run.json"))["start_ns"]
    except (DlprofError, OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if isinstance(found, int) and 0 < found < 2**62 else None
