"""The command line: the group of commands, and the place where a mistake becomes one line and exit code 1."""

from __future__ import annotations

import errno
import gc
import io
import os
import sys
from typing import Any

import click

from dlprof.commands import COMMANDS, EXAMPLES, GROUPS, HELP_ALL, SHOW_ALL, command, say
from dlprof.commands.configured import CONFIG, defaults
from dlprof.errors import DlprofError, RefusedError
from dlprof.marks import __version__
from dlprof.plain import tell

_WORDS = "dlprof.words"  # in the context's meta: the command and its words


class _Failure(click.ClickException):
    """One line on stderr, exit code 1."""

    def show(self, file: Any = None) -> None:  # noqa: ARG002 - click's signature
        say(f"dlprof: {self.message}", err=True)


class _Refusal(_Failure):
    """One line on stderr before anything has begun, exit code 2."""

    exit_code = 2


class _Group(click.Group):
    """The commands, each imported when it is asked for: a report need not load what recording takes."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        if cmd_name in COMMANDS:
            return command(cmd_name)
        self.commands = {name: command(name) for name in COMMANDS}  # click looks here for what may have been meant
        return None

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Return the command's name, the command and its words; pyproject.toml may have defaults for it."""
        name, found, rest = super().resolve_command(ctx, args)
        if not ctx.resilient_parsing and name != "doctor" and rest[:1] not in (["-h"], ["--help"], ["--help-all"]):
            ctx.meta[_WORDS] = args
            ctx.default_map = {str(name): defaults(str(name))}
        return name, found, rest

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the first command of each group and the names of the others; --help-all: all, with their examples."""
        for group, names in GROUPS.items():
            shown = list(names) if ctx.meta.get(SHOW_ALL) else list(names)[:1]
            with formatter.section(group.capitalize()):
                formatter.write_dl([(EXAMPLES[name], command(name).get_short_help_str(80)) for name in shown], 45)
                if others := [name for name in names if name not in shown]:
                    formatter.write_text(f"also: {', '.join(others)}")

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (DlprofError, OSError, click.UsageError) as e:
            words = ctx.meta.get(_WORDS, [])
            if words[:1] == ["wrap"] and ctx.default_map != {"wrap": {}} and not isinstance(e, OSError | RefusedError):
                # The job has not begun. What stands in a file never keeps it from that.
                tell(f"{e}; the defaults of pyproject.toml are left out")
                os.environ[CONFIG] = ""
                return self.main(words, "dlprof")
            if isinstance(e, click.UsageError):
                raise
            # click ends quietly where the reader of our output has gone (dlprof report ... | head). Another OSError is
            # a full disk or the like: not worth a traceback.
            if isinstance(e, OSError) and e.errno == errno.EPIPE:
                raise
            raise (_Refusal if isinstance(e, RefusedError) else _Failure)(str(e)) from None


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="dlprof")
def cli() -> None:
    """Where does the time of a training step go, and what would you gain by changing what?"""


cli.params.append(HELP_ALL)


def main() -> None:
    """Run the command line."""
    # A short-lived process that makes many objects and little garbage: looking for it costs a tenth of a report's time,
    # half of that at the end, when the interpreter goes through all that pandas has made.
    gc.set_threshold(400_000)
    for stream in (sys.stdout, sys.stderr):
        # A name in a trace may hold what no encoding has, and a terminal may know ASCII only: written as an escape.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        cli(prog_name="dlprof")
    finally:
        gc.freeze()


if __name__ == "__main__":
    main()
