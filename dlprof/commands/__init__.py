"""The commands, one file each. Their modules import nothing heavy before they are called."""

from __future__ import annotations

import importlib
import keyword
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from dlprof.errors import DlprofError
from dlprof.plain import plain
from dlprof.read.limits import NO_LIMITS

F = TypeVar("F", bound=Callable[..., Any])

# Each is a function of its name in a module of its name, those of "prove" in a folder; try_ is that of try, a word of
# Python's own, and a_b that of a-b. In the order of the help, which begins with the first of each group; with the words
# of an example.
GROUPS: Mapping[str, Mapping[str, str]] = {
    "record": {
        "wrap": "train.py --lr 0.1",
        "run": "ddp_resnet --procs 2",
        "slurm": "train.py --gpus-per-node 4",
        "doctor": "",
    },
    "read": {
        "report": "traces/",
        "explain": "input_wait",
        "export": "runs/a --perfetto a.json.gz",
        "mcp": "runs/",
    },
    "watch": {
        "top": "runs/a",
        "hang": "runs/a",
        "ps": "",
        "attach": "4711",
        "window": "runs/a",
    },
    "prove": {
        "fix": "train.py --lr 0.1",
        "try": "runs/a --minutes 5",
        "sweep": "loader.num_workers=0,1,2,4 -- train.py",
        "whatif": "runs/a --input perfect --device 1.5x",
        "scale": "ddp_resnet --procs 1,2",
        "compare": "runs/before runs/after",
        "check": "runs/a --max 'input_wait<5%'",
        "check-advice": "runs/a 'use channels_last'",
    },
}
EXAMPLES = {n: f"dlprof {n} {words}".strip() for group in GROUPS.values() for n, words in group.items()}
COMMANDS = tuple(sorted(EXAMPLES))


def command(name: str) -> click.Command:
    """Return one of COMMANDS, importing no other's module."""
    module = f"{name}_" if keyword.iskeyword(name) else name.replace("-", "_")
    folder = "prove." if name in GROUPS["prove"] else ""
    found: click.Command = getattr(importlib.import_module(f"{__name__}.{folder}{module}"), module)
    found.epilog = f"Example: {EXAMPLES[name]}"
    if HELP_ALL not in found.params:  # it is loaded for the first time
        found.params.append(HELP_ALL)
        _WHOLE[name] = found.help or ""
        if any(getattr(param, "hidden", False) for param in found.params):
            first, *rest = _WHOLE[name].split("\n\n")
            found.help = "\n\n".join([first, *(part for part in rest if part.lstrip(" ").startswith("\b"))])
    return found


_WHOLE: dict[str, str] = {}  # what --help-all says of a command; --help has its first paragraph and its examples


def rarely(function: F) -> F:
    """Leave the options that stand below out of --help: --help-all has them, and completion."""
    for param in getattr(function, "__click_params__", ()):
        param.hidden = "_DLPROF_COMPLETE" not in os.environ
    return function


def _show_all(ctx: click.Context, _option: click.Parameter, given: bool) -> None:
    if given and not ctx.resilient_parsing:
        ctx.meta[SHOW_ALL] = True
        ctx.command.help = _WHOLE.get(ctx.command.name or "", ctx.command.help)
        for param in ctx.command.params:
            param.hidden = False  # type: ignore[attr-defined] # those that have no such attribute ignore it
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


SHOW_ALL = "dlprof.help_all"  # in the context's meta
HELP_ALL = click.Option(
    ["--help-all"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_all,
    help="Show all commands and options.",
)


class WithCommand(click.Command):
    """Takes everything after `--` as a command of the user's: `after_dashes` returns it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the words after the dashes, and parse those before them."""
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[_AFTER_DASHES] = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])


_AFTER_DASHES = "dlprof.command"


def after_dashes(ctx: click.Context) -> tuple[str, ...]:
    """Return the words after `--` of a command of class WithCommand."""
    words: tuple[str, ...] = ctx.meta[_AFTER_DASHES]
    return words


def new_folder(name: str) -> Path:
    """Make and return a new folder NAME, NAME-2, … here; raise DlprofError if that fails."""
    from dlprof.files import writing
    from dlprof.record.launch.folder import make_first, numbered

    with writing(f"a folder {name}", "; -o names another one"):
        made = make_first(numbered(Path(name)))
    if made is None:
        raise DlprofError(f"a thousand folders {name} are here already; -o names another")
    return made


def say(line: str, *, err: bool = False) -> None:
    """Print one line; control characters in it are escaped."""
    click.echo(plain(line), err=err)


def teller(quiet: bool) -> Callable[[str], None]:
    """Return a function that prints one line of ours on stderr, or nothing if quiet."""
    return (lambda _line: None) if quiet else (lambda line: say(f"dlprof: {line}", err=True))


def under_python(words: Sequence[str]) -> list[str]:
    """Return the words of a user's command, of which a script or -m package runs under the Python that runs dlprof."""
    return [sys.executable, *words] if words[0].endswith(".py") or words[0].startswith("-m") else list(words)


def _lift(_context: click.Context, _option: click.Parameter, given: bool) -> None:
    if given:
        os.environ[NO_LIMITS] = "1"


# What several commands have.
PATH = click.Path(path_type=Path)
run_path = click.argument("path", type=PATH)


class _Minutes(click.FloatRange):
    """A number in a range; nan is rejected."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is no number of minutes.", param, ctx)
        return number


def minutes(default: float) -> Callable[[F], F]:
    """Return the option of how long a command may measure."""
    range_ = _Minutes(0.1, 10_000)
    return click.option("--minutes", type=range_, default=default, show_default=True, help="How long it may take.")


def file(name: str, help: str) -> Callable[[F], F]:  # noqa: A002 - click's name
    """Return an option that names a file to write."""
    return click.option(name, type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help=help)


def out(help: str) -> Callable[[F], F]:  # noqa: A002 - click's name
    """Return the option of the folder that is written into."""
    return click.option("-o", "--out", type=PATH, help=help)


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
cache = click.option(
    "--cache",
    type=PATH,
    metavar="DIR",
    help="Folder for what is known of each rank. [default: .dlprof in a recorded run; of traces from elsewhere "
    "~/.cache/dlprof]",
)
quiet = click.option("--quiet", is_flag=True, help="No progress.")
show = click.option("--open", "show", is_flag=True, help="Open the page in a browser.")
