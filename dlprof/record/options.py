"""The options of the script's command line, as its argparse parsers know them: names, and which switches are on.

No value of an option is kept. Options of click, typer, hydra and absl are not seen.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any

from dlprof import redaction
from dlprof.record.attribution import passing
from dlprof.record.observed import Observed

_MOST = 500


def watch(observed: Observed, put: Callable[..., object]) -> None:
    """Put a wrapper in place of what parses a command line, by `put` of hooks.py."""
    original = argparse.ArgumentParser.parse_known_args

    @functools.wraps(original)
    def parse_known_args(self: Any, args: Any = None, *more: Any, **others: Any) -> Any:
        with passing:
            found = original(self, args, *more, **others)
        try:
            observed.options |= _options(self, args, found[0])
            observed.news = True
        except Exception:  # noqa: BLE001 - the script's own classes: its options are then not named
            observed.options.clear()
        return found

    put(argparse.ArgumentParser, "parse_known_args", parse_known_args)


def _options(parser: argparse.ArgumentParser, args: Any, namespace: Any) -> dict[str, dict[str, Any]]:
    """Return the options of a parser that reads the command line, or a part of it, by name."""
    line = sys.argv[1:]
    if args is not None and not (set(args) <= set(line) and (args or not line)):
        return {}
    found = {}
    for action in parser._actions[:_MOST]:
        names = [name for name in action.option_strings if redaction.is_option(name) and not redaction.is_secret(name)]
        value = getattr(namespace, action.dest, None)
        if names and action.dest.isidentifier() and action.dest != "help":
            name = next((name for name in names if name.startswith("--")), names[0])
            is_on = value is True or (action.nargs == 0 and isinstance(value, (int, str)) and bool(value))
            found[name] = {"name": name, "dest": action.dest, "switch": action.nargs == 0, "on": is_on}
    return found
