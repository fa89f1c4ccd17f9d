"""Removes the names of users, hosts and folders from a result, so that it can be shared."""

from __future__ import annotations

import getpass
import json
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dlprof.result import Result
from dlprof.result.stored import from_json, to_json

# Folders of a path from the root or a home; the last part of the path stays.
_FOLDERS = re.compile(r"(?<![\w./:~])~?(?:/[^\s/'\":,;()<>|\[\]]+)+/")
_HOMES = re.compile(r"/(?:home|Users)/([^\s/'\":,;()<>|]+)")
# Names that identify nobody.
_NOBODY = frozenset(("root", "user", "ubuntu", "localhost"))


def shareable(result: Result) -> Result:
    """Return the result with hosts named host1, host2, …, users named user, and paths cut to their last part."""
    data = to_json(result)
    users = set(_HOMES.findall(json.dumps(data, ensure_ascii=False)))
    with suppress(KeyError, OSError):  # often the user who ran it
        users.add(getpass.getuser())
    names = dict.fromkeys(users - _NOBODY, "user")
    hosts = dict.fromkeys(host for host in result.run.hosts if host not in _NOBODY)
    names |= {host: f"host{number}" for number, host in enumerate(hosts, 1)}
    longest = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    # A host's domain goes with it.
    known = re.compile(rf"(?<![\w-])({longest})(?:\.[a-z][\w.-]*)?(?![\w-])") if names else None

    def renamed(text: str) -> str:
        text = _FOLDERS.sub("…/", text)
        return known.sub(lambda found: names[found[1]], text) if known else text

    return from_json(_each(data, renamed))


def _each(data: Any, change: Callable[[str], str]) -> Any:
    """Return the data with every string changed, but for field names."""
    if isinstance(data, str):
        return change(data)
    if isinstance(data, dict):
        return {key: _each(value, change) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_each(value, change) for value in data]
    return data
