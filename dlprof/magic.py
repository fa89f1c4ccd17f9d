"""What `%load_ext dlprof` adds to a notebook: `%%dlprof` records a cell, `%dlprof RUN` shows a run."""

from __future__ import annotations

import functools
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from dlprof import overrides
from dlprof.commands.recording import Recording, recording_options
from dlprof.errors import DlprofError
from dlprof.plain import words_of
from dlprof.profiling import Profile
from dlprof.record import in_process
from dlprof.report import formatting
from dlprof.result import Result

# Options that need a command, which can be ended or started again.
_OF_COMMANDS = ("hang", "job", "local", "losses", "metrics", "stop_after", "tries")


class _CellError(Exception):
    """A cell has failed, which has shown its own traceback: the notebook stops there."""

    def _render_traceback_(self) -> list[str]:
        return []


def load(shell: Any) -> None:
    """Register the magics with an IPython shell."""

    def dlprof(line: str, cell: str | None = None) -> None:
        """%dlprof RUN shows a run or traces; %%dlprof [OPTIONS] records the cell, with the options of `dlprof wrap`."""
        from IPython.core.error import UsageError

        try:
            if cell is None:
                from dlprof import open as open_run

                _show(open_run(Path(line.strip()).expanduser()).result)
            else:
                _cell.main(shlex.split(line), "%%dlprof", obj=(shell, cell), standalone_mode=False)
        except (click.ClickException, DlprofError, ValueError) as e:  # of click, of reading a run, of shlex
            raise UsageError(e.format_message() if isinstance(e, click.ClickException) else str(e)) from None

    shell.register_magic_function(dlprof, "line_cell")


@click.command("%%dlprof")
@functools.partial(recording_options, without=_OF_COMMANDS)
@click.pass_obj
def _cell(of: tuple[Any, str], recording: Recording) -> None:
    """Record the cell, and show its report."""
    if recording.nsys:
        raise click.UsageError("--nsys starts a process: that is for `dlprof wrap`")
    settings = overrides.checked(recording.overrides)
    shell, cell = of
    asked = {name: value for name, value in recording.asked.items() if name not in ("capture", *_OF_COMMANDS)}
    with Profile(in_process.Block(Path, recording.out, asked, settings), quiet=True) as run:
        done = shell.run_cell(cell)
    if not done.success:
        raise _CellError
    if not recording.no_report:
        try:
            _show(run.result)
        except Exception as e:  # noqa: BLE001 - the cell has run, and the notebook goes on
            print(f"dlprof: {words_of(e)}", file=sys.stderr)


def _show(result: Result) -> None:
    from IPython.display import display

    from dlprof.report import html

    data = {"text/html": html.framed(result), "text/plain": formatting.name(result)}
    display(data, raw=True)
