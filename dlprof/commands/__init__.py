"""Every command there is, one file each. Their modules import nothing heavy before they are called."""

from __future__ import annotations

import importlib
import os

import click

from dlprof.plain import plain
from dlprof.read.opening import NO_LIMITS

# In the order of the help. Each is a function of its name in a module of its name.
COMMANDS = ("check", "compare", "doctor", "explain", "export", "report", "rules", "run", "wrap")


def command(name: str) -> click.Command:
    """Return one of COMMANDS, importing no other's module."""
    found: click.Command = getattr(importlib.import_module(f"{__name__}.{name}"), name)
    return found


def say(line: str, *, err: bool = False) -> None:
    """Print one line; control characters in it are escaped."""
    click.echo(plain(line), err=err)


def _lift(_context: click.Context, _option: click.Parameter, asked: bool) -> None:
    if asked:
        os.environ[NO_LIMITS] = "1"


# The options that several commands have.
form = click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", help="What to print.")
jobs = click.option(
    "--jobs", type=click.IntRange(min=1), help="Processes that read at once. [default: all cores that memory allows]"
)
no_limits = click.option(
    "--no-limits",
    is_flag=True,
    expose_value=False,
    callback=_lift,
    help="Read files of any size; without it, what exceeds the limits is skipped with a warning.",
)
quiet = click.option("--quiet", is_flag=True, help="No progress.")
show = click.option("--open", "show", is_flag=True, help="Open the page in a browser.")
