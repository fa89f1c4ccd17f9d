"""Defaults of options from the table `[tool.dlprof]` of the nearest pyproject.toml."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from dlprof.commands import COMMANDS, command
from dlprof.errors import DlprofError

CONFIG = "DLPROF_CONFIG"  # another file; "": none


def found() -> tuple[str, dict[str, Any]]:
    """Return the path of the nearest file with that table, from this folder upwards, and the table; "" and {} if none.

    Raises DlprofError if it cannot be read.
    """
    named = os.environ.get(CONFIG)
    if named == "" or os.environ.get("DLPROF_TRIAL"):  # a trial says itself how each run is recorded
        return "", {}
    for path in [Path(named)] if named else _upwards():
        try:
            text = path.read_bytes()
            if b"dlprof" not in text:
                continue
            if sys.version_info >= (3, 11):
                import tomllib
            else:
                import tomli as tomllib
            table = tomllib.loads(text.decode()).get("tool", {}).get("dlprof", {})
            if not all(isinstance(options, dict) for options in table.values()):
                raise DlprofError(f"{path}: options stand in tables such as [tool.dlprof.wrap]")
        except (AttributeError, OSError, RecursionError, ValueError) as e:
            raise DlprofError(f"{path} cannot be read: {e}") from None
        if table:
            return str(path), table
    return "", {}


def _upwards() -> Iterable[Path]:
    """Yield each pyproject.toml from here upwards, but none of a folder into which everybody may write, as /tmp."""
    with contextlib.suppress(OSError):  # this folder may be gone
        for folder in ((here := Path.cwd()), *here.parents):
            if (path := folder / "pyproject.toml").is_file() and folder.stat().st_mode & 0o1002 != 0o1002:
                yield path


def defaults(name: str) -> dict[str, Any]:
    """Return what the file sets of a command's options, for click's default_map; raise DlprofError if it is wrong."""
    path, table = found()
    for other in table:
        _check(other, COMMANDS, f"{path}: [tool.dlprof] has no command")
    options = {o: p for p in command(name).params if isinstance(p, click.Option) for o in p.opts}
    given = dict[str, Any]()
    for key, value in table.get(name, {}).items():
        at = f"{path}: [tool.dlprof.{name}]"
        _check(word := f"--{key.replace('_', '-')}", options, f"{at} has no option")
        option = options[word]
        # A folder of somebody else's traces may hold such a file: it must name no file to write and no cluster to join.
        if option.is_eager or isinstance(option.type, click.Path) or option.name in ("dask", "no_limits"):
            raise DlprofError(f"{at} cannot set {word}: it stands on the command line alone")
        values = value if option.multiple and isinstance(value, list) else [value]
        if any(isinstance(v, (list, dict)) or isinstance(v, bool) != option.is_flag for v in values):
            raise DlprofError(f"{at} {key}: {'true or false' if option.is_flag else 'a text or a number'}")
        values = values if option.is_flag else list(map(str, values))
        try:
            option.type_cast_value(click.Context(command(name)), values if option.multiple else values[0])
        except click.BadParameter as e:
            raise DlprofError(f"{at} {key}: {e.message}") from None
        given[str(option.name)] = values if option.multiple else values[0]
    return given


def _check(word: str, words: Iterable[str], unknown: str) -> None:
    if word not in words:
        near = difflib.get_close_matches(word, words, 3) or sorted(words)
        raise DlprofError(f"{unknown} {word}; there are: {', '.join(near)}")
