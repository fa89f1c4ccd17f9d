"""What two runs were told to do, or turned out to do, otherwise: the facts in which they differ."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from dlprof.result import Result

# Where facts are what somebody chose or installed; in the others they are what was measured.
SETTINGS = ("Job", "Device", "Software", "Loader", "Model", "Optimizer", "Pipeline", "Precision", "Environment")
# Different in any two runs, and no choice.
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
    """Return the facts that differ: those that somebody chose, and those that were measured."""
    of_a, of_b = ({(f.section, f.name): f.value for f in r.facts} for r in (a, b))
    of_a[_COMMAND], of_b[_COMMAND] = _apart(a.run.command, b.run.command)
    differ = [
        Setting(*key, of_a.get(key, ""), of_b.get(key, ""))
        for key in dict.fromkeys((*of_a, *of_b))
        if of_a.get(key) != of_b.get(key) and key not in _NAMES
    ]
    chosen = tuple(s for s in differ if s.section in SETTINGS)
    return chosen, tuple(s for s in differ if s.section not in SETTINGS)


def _apart(a: Sequence[str], b: Sequence[str]) -> tuple[str, str]:
    """Return the words of two commands that the other one does not have in their place."""
    only_a: list[str] = []
    only_b: list[str] = []
    for what, start, end, from_, to in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if what != "equal":
            only_a += a[start:end]
            only_b += b[from_:to]
    return shlex.join(only_a), shlex.join(only_b)
