"""Results as result.json holds them (format 2), and back; format 1 is read too."""

from __future__ import annotations

import getpass
import inspect
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from dlprof.errors import DlprofError
from dlprof.result import SAVING, Result

FORMAT = 2
_READ = (1, FORMAT)

# Names of facts, and of a class of size, as an older dlprof wrote them.
_OLDER = {
    "clocks brought together, ahead by": "hosts' clocks run ahead by (corrected for)",
    "ends of a collective then differ by": "after that, the ends of one collective differ by",
    "none that dlprof knows": "no DataLoader",
    "kernels' time in products whose unit no name tells": "kernels' time in products of unknown unit",
    "not told": "unknown size",
}

_LATER = (
    "changes",
    "scaling",
    "blame",
    "together",
    "steps",
    "work",
    "exchanges",
    "tried",
    "foreign_load",
    "memory",
    "profiles",
    "gpu_logs",
    "members",
    "modules",
    "footprint",
    "device_work",
    "lines",
    "host_limited",
    "budget",
)  # fields that a result may lack


def plain(value: Any) -> Any:
    """Return structs and dataclasses as plain data, NumPy's numbers as Python's."""
    return msgspec.to_builtins(value, enc_hook=lambda number: number.item())


def to_json(result: Result) -> dict[str, Any]:
    """Return the result as plain data, in the layout of result.json."""
    return {"format": FORMAT, "saving": SAVING, **plain(result)}


def schema() -> dict[str, Any]:
    """Return the JSON schema of result.json; dlprof/result.schema.json holds it, for other programs."""
    made = schema_of(Result)
    whole = made["$defs"]["Result"]
    whole["properties"] |= {"format": {"const": FORMAT}, "saving": {"type": "string"}}
    whole["required"] = ["format", *whole["required"]]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"dlprof result {FORMAT}", **made}


def schema_of(kind: type) -> dict[str, Any]:
    """Return the JSON schema of a struct, with docstrings as `help` shows them, whichever msgspec made it."""
    made: dict[str, Any] = _cleaned(msgspec.json.schema(kind))
    return made


def _cleaned(part: Any) -> Any:
    if isinstance(part, list):
        return [_cleaned(one) for one in part]
    if not isinstance(part, dict):
        return part
    return {
        name: inspect.cleandoc(one) if name == "description" and isinstance(one, str) else _cleaned(one)
        for name, one in part.items()
    }


# Far above any figure of a result in ns, bytes or operations; its square is still finite.
_ABSURD = 1e30


def _sane(data: Any) -> bool:
    if isinstance(data, int | float):
        return abs(data) < _ABSURD  # False for NaN
    if isinstance(data, Mapping):
        return all(map(_sane, data.values()))
    return not isinstance(data, list | tuple) or all(map(_sane, data))


def from_json(data: Any) -> Result:
    """Return the result of the plain data of result.json; raise DlprofError where it is invalid, or a newer format."""
    if not isinstance(data, Mapping):
        raise DlprofError("result.json is not a dlprof result: it holds no object")
    if data.get("format") not in _READ:
        raise DlprofError(
            f"result.json has format {data.get('format')!r}; this dlprof reads formats 1 to {FORMAT}: upgrade it"
        )
    if not _sane(data):
        raise DlprofError("result.json is not a dlprof result: it holds an impossible figure")
    missing = [name for name in Result.__struct_fields__ if name not in data and name not in _LATER]
    if missing:
        raise DlprofError(f"result.json is not a dlprof result: without {', '.join(missing)}")
    try:
        result = msgspec.convert(_upgraded(data) if data["format"] == 1 else data, Result)
    except msgspec.ValidationError as e:
        raise DlprofError(f"result.json is not a dlprof result: {e}") from None
    facts = tuple(msgspec.structs.replace(f, name=_OLDER.get(f.name, f.name)) for f in result.facts)
    exchanges = tuple(msgspec.structs.replace(e, size=_OLDER.get(e.size, e.size)) for e in result.exchanges)
    return msgspec.structs.replace(result, facts=facts, exchanges=exchanges)


def _upgraded(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return format 1 as format 2: its advice, sentences only, as changes, and each setting as its own fact."""
    outcomes, facts = data["outcomes"], data["facts"]
    if _objects(outcomes):
        outcomes = [{**o, "changes": _sentences(o.get("advice", ()))} for o in outcomes]
    if _objects(facts):
        facts = [single for fact in facts for single in _single(fact)]
    return {**data, "outcomes": outcomes, "facts": facts}


def _objects(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, Mapping) for one in value)


def _sentences(advice: Any) -> Any:
    return [{"text": text} for text in advice] if isinstance(advice, list | tuple) else advice


def _single(fact: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Split a fact of several settings: "bucket_cap_mb=25, static_graph=False" of ddp into two."""
    pairs = [one.partition("=") for one in str(fact.get("value")).split(", ")]
    if len(pairs) < 2 or not all(name.isidentifier() and sign for name, sign, _ in pairs):
        return [fact]
    return [{**fact, "name": f"{fact.get('name')}.{name}", "value": value} for name, _, value in pairs]


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
