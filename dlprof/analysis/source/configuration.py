"""Sets one value in a file of configuration (YAML, JSON, TOML), or in the line of a shell that starts the job.

The text is edited, and never written anew. It is parsed before and after: only the one value may be another.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from dlprof.analysis.source.edits import NotEditable, Recorded, Value

_SUFFIXES = (".yaml", ".yml", ".json", ".toml")
_MOST_PLACES = 16


@dataclass(frozen=True)
class Change:
    """Bytes of a file that others replace; `line`: of the file, from 1."""

    file: str
    begin: int
    end: int
    new: bytes
    line: int


def mentions(job: Recorded, key: str, names: Iterable[str] = ()) -> bool:
    """Return whether the command line may give an option of that key or those names, or a key as Hydra takes it."""

    def bare(name: str) -> str:
        return name.lstrip("+~-").replace("-", "").replace("_", "").lower()

    letters = {name[1] for name in names if len(name) == 2}
    long = {bare(key), *(bare(name) for name in names if len(name) > 2)}
    for word in job.argv[1:]:
        name, equals, _ = word.partition("=")
        last = bare(re.split(r"[.:/]", name)[-1]).removeprefix("no")
        # argparse takes the begin of a name, and several letters together.
        begins = name.startswith("--") and last and any(one.startswith(last) for one in long)
        lettered = name.startswith("-") and not name.startswith("--") and not letters.isdisjoint(name)
        if begins or lettered or (last in long and (equals or name.startswith("-"))):
            return True
    return False


def keys_of(job: Recorded, name: str) -> list[tuple[str, tuple[Any, ...], Any]]:
    """Return where the files that the script opened have a key of that name: file, keys that lead there, value."""
    files = [file for file in job.files if file.endswith(_SUFFIXES)]
    found = []
    for file in files:
        try:
            tree = _tree(file, text) if name.encode() in (text := job.read(file)) else {}
        except NotEditable as e:
            raise NotEditable(f"{file}: {e}") from None
        for keys, value in _items(tree):
            is_plain = value is None or isinstance(value, (bool, int, float, str))
            found += [(file, keys, value if is_plain else repr(value))] if keys[-1] == name else []
    return found


@lru_cache(maxsize=64)
def _tree(file: str, text: bytes) -> Any:
    """Return what a file holds; raise NotEditable where it cannot be parsed here."""
    try:
        if file.endswith(".json"):
            return json.loads(text)
        if file.endswith(".toml"):
            return import_module("tomllib").loads(text.decode())
        yaml = import_module("yaml")
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise NotEditable("aliases are not followed")
        return yaml.safe_load(text)
    except NotEditable:
        raise
    except ImportError as e:
        raise NotEditable(f"{e.name} is not installed beside dlprof") from None
    except Exception:  # noqa: BLE001 - of three parsers, on any text
        raise NotEditable("it cannot be parsed") from None


def _items(tree: Any, inside: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the keys that lead to each value, and the value."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield (*inside, key), value
        yield from _items(value, (*inside, key))


def key_changed(job: Recorded, file: str, keys: tuple[Any, ...], wanted: Value) -> Change:
    """Return the change of the value of a key; raise NotEditable where it cannot be told in the text."""
    text = job.read(file)
    before = dict(_items(_tree(file, text)))
    after = {
        path: repr(wanted if path == keys else value)
        for path, value in before.items()
        if path != keys[: len(path)] or path == keys
    }
    pattern = rf"""(?<![\w-])["']?{re.escape(keys[-1])}["']?\s*[:=]\s*([^\s,\]}}#]+)"""
    found = []
    for match in [*re.finditer(pattern.encode(), text)][:_MOST_PLACES]:
        begin, end = match.span(1)
        change = Change(file, begin, end, json.dumps(wanted).encode(), text.count(b"\n", 0, begin) + 1)
        try:
            made = _tree(file, text[:begin] + change.new + text[end:])
        except NotEditable:
            continue
        # As text: True is 1 for Python.
        got = {path: repr(value) for path, value in _items(made) if path != keys[: len(path)] or path == keys}
        found += [change] if got == after else []
    if len(found) != 1:
        raise NotEditable(f"{keys[-1]} is written in a way that is not edited in {file}")
    return found[0]


def in_shell(job: Recorded, names: Sequence[str], known: Value, wanted: Value) -> Change:
    """Return the change of an option's value in the one line of a Makefile or script that starts the job with it."""
    options = {word.partition("=")[0] for word in job.argv[1:] if word.startswith("-")}
    script = re.escape(Path(job.argv[0]).stem if job.argv else "")
    pattern = rf"(?<![\w./-])(?:{'|'.join(map(re.escape, names))})[ =]+({re.escape(str(known))})(?![\w.])"
    found = []
    for file in job.files if script and names else ():
        try:
            text = "" if file.endswith((*_SUFFIXES, ".py")) else job.read(file).decode()
            # A line goes on after a backslash.
            for line in re.finditer(r"(?:[^\n\\]|\\[\s\S])+", text):
                words = shlex.split(line[0].replace("\\\n", " "), comments=True)
                starts = any(re.search(rf"(^|[/.]){script}(\.py)?$", word) for word in words)
                if starts and options <= {word.partition("=")[0] for word in words}:
                    for match in re.finditer(pattern, line[0]):
                        begin = len(text[: line.start() + match.start(1)].encode())
                        at = text.count("\n", 0, line.start() + match.start(1)) + 1
                        found.append(Change(file, begin, begin + len(match[1].encode()), str(wanted).encode(), at))
        except (NotEditable, ValueError):  # noqa: PERF203 - not as it was, or written in another way
            continue
    if len(found) != 1:
        raise NotEditable("the command line gives it")
    return found[0]
