"""The facts in which two runs differ: settings, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from dlprof.plain import command_line
from dlprof.result import Result

# Sections of facts that somebody chose or installed; those of the others were measured.
SETTINGS = ("Job", "Device", "Software", "Loader", "Model", "Optimizer", "Pipeline", "Precision", "Environment")
# Different in any two runs.
_NAMES = (("Job", "folder"), ("Job", "ended"))
_COMMAND = ("Job", "command")


@dataclass(frozen=True)
class Setting:
    """One fact that differs; "" where a run does not have it."""

    section: str
    name: str
    a: str
    b: str


def differing(a: Result, b: Result) -> tuple[tuple[Setting, ...], tuple[Setting, ...]]:
    """Return the facts that differ: settings, and what was measured."""
    of_a, of_b = ({(f.section, f.name): f.value for f in r.facts} for r in (a, b))
    of_a[_COMMAND], of_b[_COMMAND] = _words_apart(a.run.command, b.run.command)
    differ = [
        Setting(*key, of_a.get(key, ""), of_b.get(key, ""))
        for key in dict.fromkeys((*of_a, *of_b))
        if of_a.get(key) != of_b.get(key) and key not in _NAMES
    ]
    chosen = tuple(s for s in differ if s.section in SETTINGS)
    return chosen, tuple(s for s in differ if s.section not in SETTINGS)


def _words_apart(a: Sequence[str], b: Sequence[str]) -> tuple[str, str]:
    """Return the words of each of two commands that the other one does not have at that place."""
    codes = [code for code in SequenceMatcher(None, a, b, autojunk=False).get_opcodes() if code[0] != "equal"]
    only_a = [word for _, start, end, _, _ in codes for word in a[start:end]]
    only_b = [word for _, _, _, start, end in codes for word in b[start:end]]
    return command_line(only_a), command_line(only_b)
