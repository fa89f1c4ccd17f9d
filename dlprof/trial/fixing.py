"""What a user does to keep what a trial found: a patch of the job's files, and words for what no patch makes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dlprof.analysis.source.patches import Patch
from dlprof.overrides import Value
from dlprof.result import Result, is_line
from dlprof.result.tried import Tried
from dlprof.trial.copies import made_by
from dlprof.trial.planning import named
from dlprof.trial.search import Trial


@dataclass(frozen=True)
class Fix:
    """The patch, the lines that it changes ("train.py:14"), and what to do besides, a sentence each."""

    patch: Patch
    words: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()


def fixed(trial: Trial, result: Result, found: Tried) -> Fix:
    """Return how to keep the best that a trial found. What an edit was seen not to make is left to words."""
    settings = found.best.settings if found.best else {}
    patch = trial.patch_of({name: value for name, value in settings.items() if name not in found.no_effect})
    left = {name: value for name, value in settings.items() if name not in made_by(patch, settings)}
    left |= {name: settings[name] for name in found.no_effect if name in settings}
    return Fix(patch, tuple(_words(left, patch, result)), tuple(_lines(patch.text)))


def _words(settings: Mapping[str, Value], patch: Patch, result: Result) -> Iterator[str]:
    why = {name: why for names, _, why in patch.left_out for name in names.split(", ")}
    changes = [p.change for p in result.changes] + [c for o in result.found for c in o.changes]
    said: dict[str, list[str]] = {}
    for name, value in settings.items():
        group, _, setting = name.partition(".")
        if group == "env":
            yield f"{setting}={value} before the command"
            continue
        if is_line(setting):
            text = next((c.text for c in changes if setting in {s.name for s in c.settings}), setting)
            yield f"{text} ({why.get(setting, 'the edit was not seen to take effect')})"
            continue
        change = next((c for c in changes if (named(c) or {}).get(name) == str(value)), None)
        because = f" (no edit makes it: {why[setting]})" if setting in why else ""
        said.setdefault(f"{change.text if change else f'{name}={value}'}{because}", []).append(f"--set {name}={value}")
    for text, words in said.items():
        yield f"{text}; until then: dlprof wrap {' '.join(words)}"


def _lines(patch: str) -> Iterator[str]:
    """Yield the lines that a patch puts in, by the numbers that they then have."""
    file, number = "", 0
    for line in patch.split("\n"):
        if line.startswith("+++ b/"):
            file = line[6:].rstrip("\t")
        elif begins := re.match(r"@@ -\d+(?:,\d+)? \+(\d+)", line):
            number = int(begins[1])
        elif line[:1] in ("+", " "):
            if line[0] == "+":
                yield f"{file}:{number}"
            number += 1
