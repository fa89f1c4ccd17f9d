"""Sets one value in a file of configuration (YAML, JSON, TOML), or in the line of a shell that starts the job.

The text is edited, and never written anew. It is parsed before and after: only the one value may be another.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from dlprof.analysis.source.edits import NotEditable, Recorded, Value

SUFFIXES = (".yaml", ".yml", ".json", ".toml")
_MOST_BYTES = 256 << 10
_MOST_PLACES = 16


@dataclass(frozen=True)
class Change:
    """Bytes of a file that others replace; `line`: of the file, from 1."""

    file: str
    begin: int
    end: int
    new: bytes
    line: int


def mentions(job: Recorded, name: str) -> bool:
    """Return whether the command line has an option, or an override as Hydra takes it, of that name."""
    bare = name.replace("_", "").lower()
    for word in job.argv[1:]:
        said = re.split(r"[.:/]", word.partition("=")[0].lstrip("+~-"))[-1].replace("-", "").replace("_", "").lower()
        if (word.startswith("-") or "=" in word) and said in (bare, f"no{bare}"):
            return True
    return False


def in_configuration(job: Recorded, path: tuple[str, ...], values: tuple[Value, Value] | None) -> list[Change]:
    """Return the places that hold the value of a key, in all files that the script opened; raise NotEditable.

    `path`: the names that lead to the key; a file may hold the last ones of them, or be held in a part of its own.
    `values`: the present one and the wanted one; without them the places are not edited.
    """
    found = []
    for file in job.files:
        if not file.endswith(SUFFIXES):
            continue
        try:
            text = job.read(file)
            tree = _tree(file, text) if path[-1].encode() in text else {}
        except NotEditable as e:
            raise NotEditable(f"{file}: {e}") from None
        for keys in _paths(tree, path):
            if values is None:
                found.append(Change(file, 0, 0, b"", 0))
            else:
                found.append(_replaced(file, text, tree, keys, *values))
    return found


def _tree(file: str, text: bytes) -> Any:
    """Return what a file holds; raise NotEditable where it cannot be parsed here."""
    if len(text) > _MOST_BYTES:
        raise NotEditable("it is too large")
    try:
        if file.endswith(".json"):
            return json.loads(text)
        if file.endswith(".toml"):
            return import_module("tomllib").loads(text.decode())
        yaml = import_module("yaml")
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise NotEditable("it has aliases")
        return yaml.safe_load(text)
    except ImportError as e:
        raise NotEditable(f"{e.name} is not installed") from None
    except NotEditable:
        raise
    except Exception:  # noqa: BLE001 - of three parsers, on any text
        raise NotEditable("it cannot be parsed") from None


def _paths(tree: Any, path: tuple[str, ...], inside: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to what may have that path."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        keys = (*inside, key)
        if key == path[-1] and all(a == b for a, b in zip(reversed(keys), reversed(path), strict=False)):
            yield keys
        yield from _paths(value, path, keys)


def _replaced(file: str, text: bytes, tree: Any, keys: tuple[Any, ...], known: Value, wanted: Value) -> Change:
    said = f"set {'.'.join(map(str, keys))}: {json.dumps(wanted)} in {file}"
    after = deepcopy(tree)
    at = after
    for key in keys[:-1]:
        at = at[key]
    if (type(at[keys[-1]]), at[keys[-1]]) != (type(known), known):
        raise NotEditable(f"{keys[-1]} is not {known!r} in {file}")
    at[keys[-1]] = wanted
    pattern = rf"""(?<![\w-])["']?{re.escape(keys[-1])}["']?\s*[:=]\s*([^\s,\]}}#]+)"""
    found = []
    for match in [*re.finditer(pattern.encode(), text)][:_MOST_PLACES]:
        change = Change(file, *match.span(1), json.dumps(wanted).encode(), text.count(b"\n", 0, match.start(1)) + 1)
        try:
            got = _tree(file, text[: change.begin] + change.new + text[change.end :])
        except NotEditable:
            continue
        # True is 1 for Python.
        if repr(got) == repr(after):
            found.append(change)
    if len(found) != 1:
        raise NotEditable(said)
    return found[0]


def in_shell(job: Recorded, names: Sequence[str], known: Value, wanted: Value) -> Change | None:
    """Return the change of the value in the one line that starts the job with an option; None: there is no such line."""
    options = {word.partition("=")[0] for word in job.argv[1:] if word.startswith("-")}
    script = Path(job.argv[0]).stem if job.argv else ""
    pattern = rf"(?<![\w./-])(?:{'|'.join(map(re.escape, names))})[ =]+({re.escape(str(known))})(?![\w.])"
    found = []
    for file in job.files:
        if file.endswith((*SUFFIXES, ".py")) or not script:
            continue
        try:
            text = job.read(file)
            text.decode()
        except (NotEditable, UnicodeDecodeError):
            continue
        # A line goes on after a backslash.
        for line in re.finditer(rb"(?:[^\n\\]|\\[\s\S])+", text):
            said = line[0].decode()
            try:
                words = shlex.split(said.replace("\\\n", " "), comments=True)
            except ValueError:
                continue
            starts = any(re.search(rf"\b{re.escape(script)}(\.py)?$", word) for word in words)
            if not starts or not options <= {word.partition("=")[0] for word in words}:
                continue
            for match in re.finditer(pattern, said):
                begin, end = (line.start() + len(said[:at].encode()) for at in match.span(1))
                number = text.count(b"\n", 0, begin) + 1
                found.append(Change(file, begin, end, str(wanted).encode(), number))
    return found[0] if len(found) == 1 else None
