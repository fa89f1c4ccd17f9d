"""`dlprof compare A B`: what got faster or slower from one run to another, and whether a predicted gain came true."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dlprof.commands import PATH, form, jobs, no_limits, out, quiet, say, show
from dlprof.errors import DlprofError
from dlprof.files import compact
from dlprof.read.opening import open_file, read_file

if TYPE_CHECKING:
    from dlprof.result import Result


@click.command(short_help="Show what got faster or slower from A to B.")
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@out("Folder for compare.html and compare.json.")
@form
@jobs
@no_limits
@show
@quiet
def compare(a: Path, b: Path, out: Path | None, form: str, jobs: int | None, show: bool, quiet: bool) -> None:
    """Show what got faster or slower from A to B, and whether what A's report had predicted came true.

    A and B: runs, folders of torch-profiler traces, single traces, or files result.json. Prints the differences with
    their noise, and writes compare.html and compare.json into a new folder dlprof-compare.
    """
    from dlprof.analysis.compare import comparison
    from dlprof.commands.report import browse, colour, shown, width, write_into
    from dlprof.report import compare_page, compare_text

    compared = comparison.compare(_result(a, jobs, quiet), _result(b, jobs, quiet))
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


def _result(path: Path, jobs: int | None, quiet: bool) -> Result:
    """Return the result of a run or of traces, or the one that a file result.json holds."""
    import msgspec

    from dlprof.commands.report import analyse
    from dlprof.commands.terminal.progress import Progress
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
