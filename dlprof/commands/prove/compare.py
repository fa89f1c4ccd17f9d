"""`dlprof compare A B`: what got faster or slower from one run to another; of more runs, what each change gave."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dlprof.commands import PATH, form, jobs, no_limits, out, quiet, rarely, say, show
from dlprof.errors import DlprofError
from dlprof.files import compact
from dlprof.read.opening import open_file, read_file

if TYPE_CHECKING:
    from dlprof.result import Result


@click.command(short_help="Show what got faster or slower from run to run.")
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@click.argument("more", type=PATH, nargs=-1)
@out("Folder for compare.html and compare.json (of more than two runs ladder.html and ladder.json).")
@form
@show
@quiet
@rarely
@jobs
@no_limits
def compare(
    a: Path, b: Path, more: tuple[Path, ...], out: Path | None, form: str, jobs: int | None, show: bool, quiet: bool
) -> None:
    """Show what got faster or slower from A to B, and whether what A's report had predicted came true.

    A and B: runs, folders of torch-profiler traces, single traces, or files result.json. Prints the differences with
    their noise, and writes compare.html and compare.json into a new folder dlprof-compare. Of more than two runs it
    shows what each gained over the one before it and over the first, in samples a second. One that cannot be compared
    with these is left out, with the reason.
    """
    if more:
        compare_runs((a, b, *more), out, form, jobs, show=show, quiet=quiet)
        return
    from dlprof.analysis.compare import code, comparison
    from dlprof.commands.report import browse, colour, shown, width, write_into
    from dlprof.report.compare import page as compare_page
    from dlprof.report.compare import text as compare_text

    before, after = result_of(a, jobs, quiet), result_of(b, jobs, quiet)
    compared = comparison.compare(before, after, code.changed(before, after, a, b))
    data = compact(comparison.to_json(compared))
    verdict = data if form == "json" else compare_text.render(compared, width(), colour())
    try:
        page = write_into("dlprof-compare", out, {"compare.json": data, "compare.html": compare_page.render(compared)})
    finally:
        click.echo(verdict)
    if form != "json":
        say(f"page: {shown(page)}")
    if show:
        browse(page)


def compare_runs(
    paths: Sequence[Path], out: Path | None, form: str, jobs: int | None, *, show: bool, quiet: bool
) -> None:
    """Print and write what each of several runs gained; raise DlprofError if fewer than two can be compared."""
    from dlprof.analysis.compare.ladder import ladder
    from dlprof.commands.report import write_summary
    from dlprof.report.compare.page import summary, to_json

    read, broken = [], []
    for path in paths:
        name = name_of(path, paths)
        try:
            read.append((name, result_of(path, jobs, quiet)))
        except DlprofError as e:
            broken.append((name, str(e)))
    made = ladder(read, broken)
    if len(made.rungs) < 2:
        raise DlprofError(
            "; ".join(["fewer than two of these runs can be compared", *(f"{n}: {w}" for n, w in made.left_out)])
        )
    write_summary(summary(made), to_json(made), "ladder", "dlprof-compare", out, form, show=show)


def name_of(path: Path, among: Sequence[Path]) -> str:
    """Name a run by its folder, with the folder above where several are called the same."""
    whole = path.resolve()
    of = whole.parent if whole.is_file() else whole
    same = sum((p.resolve().parent if p.is_file() else p.resolve()).name == of.name for p in among) > 1
    return f"{of.parent.name}/{of.name}" if same else of.name


def result_of(path: Path, jobs: int | None, quiet: bool) -> Result:
    """Return the result of a run or of traces, or the one that a file result.json holds."""
    import msgspec

    from dlprof.commands.progress import Progress
    from dlprof.commands.report import analyse
    from dlprof.result.stored import from_json

    if path.is_file() and path.suffix == ".json" and _is_result(path):
        try:
            return from_json(msgspec.json.decode(read_file(path)))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise DlprofError(f"{path}: cannot be read: {e}") from None
        except DlprofError as e:
            raise DlprofError(str(e) if str(path) in str(e) else f"{path}: {e}") from None
    with Progress(f"{path.name}: ", quiet=quiet) as progress:
        return analyse(path, jobs, progress)


def _is_result(path: Path) -> bool:
    """Return by a file's head whether it is a result of ours, and no trace of a hundred megabytes."""
    with open_file(path) as file:
        head = file.read(256).translate(None, b" \t\r\n")
    return head.startswith(b'{"format":') and b'"saving":' in head
