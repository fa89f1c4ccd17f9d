"""The command line: the group of commands, and the place where a mistake becomes one line and exit code 1."""

from __future__ import annotations

import errno
import gc
import io
import sys
from typing import Any

import click

from dlprof import __version__
from dlprof.commands import COMMANDS, command, say
from dlprof.errors import DlprofError


class _Failure(click.ClickException):
    """One line on stderr, exit code 1."""

    exit_code = 1

    def show(self, file: Any = None) -> None:  # noqa: ARG002 - click's signature
        say(f"dlprof: {self.message}", err=True)


class _Group(click.Group):
    """The commands, each imported when it is asked for: a report need not load what recording takes."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        if cmd_name in COMMANDS:
            return command(cmd_name)
        self.commands = {name: command(name) for name in COMMANDS}  # click looks here for what may have been meant
        return None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DlprofError as e:
            raise _Failure(str(e)) from None
        except OSError as e:
            # click ends quietly where the reader of our output has gone (dlprof report ... | head). All else is a
            # full disk or the like: no fault of ours, and not worth a traceback.
            if e.errno == errno.EPIPE:
                raise
            raise _Failure(str(e)) from None


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="dlprof")
def cli() -> None:
    """Where does the time of a training step go, and what would you gain by changing what?

    \b
    dlprof wrap train.py --lr 0.1                      record any script, unedited, and get the verdict
    dlprof wrap -- torchrun --nproc-per-node 2 t.py    the same for any launcher
    dlprof report traces/                              the verdict on traces from anywhere
    """  # noqa: D301 - \b keeps these lines apart in click's help


def main() -> None:
    """Run the command line."""
    # A short-lived process that makes many objects and little garbage: looking for it costs a tenth of a report's time,
    # half of that at the end, when the interpreter goes through all that pandas has made.
    gc.set_threshold(400_000)
    try:
        _main()
    finally:
        gc.freeze()


def _main() -> None:
    for stream in (sys.stdout, sys.stderr):
        # A name in a trace may hold what no encoding has, and a terminal may know ASCII only: written as an escape.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    cli(prog_name="dlprof")


if __name__ == "__main__":
    main()
