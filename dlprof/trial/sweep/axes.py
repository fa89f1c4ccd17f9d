"""What a sweep goes through: NAME=VALUES words of the command line, and the grid that they make."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from dlprof import overrides
from dlprof.errors import DlprofError
from dlprof.overrides import Value
from dlprof.result.sweep import Axis

# Points that one sweep may have: at half a minute each and twice, an hour and a half.
MOST_POINTS = 100

_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:(\*|\.\.)(\d+))?")
_NAME = re.compile(r"[A-Za-z][\w.-]*")


def axis(word: str) -> Axis:
    """Return the axis of NAME=VALUES: values by commas, and ranges A..B, A..B..STEP, A..B*FACTOR; raise DlprofError."""
    name, sign, text = word.partition("=")
    if not sign or not _NAME.fullmatch(name):
        raise DlprofError(f"{word!r} is no axis; write loader.num_workers=0,1,2,4 or batch=8..64*2")
    values = tuple(dict.fromkeys(v for part in text.split(",") for v in _values(part.strip())))
    if not values:
        raise DlprofError(f"{word!r} has no values")
    return Axis(name, values)


def _values(text: str) -> Iterator[str]:
    m = _RANGE.fullmatch(text)
    if not m:
        if text:
            yield text
        return
    first, last, by = int(m[1]), int(m[2]), int(m[4] or 1)
    if first > last or by < 1 or (m[3] == "*" and (by < 2 or first < 1)):
        raise DlprofError(f"{text!r} is no range; write 0..8, 0..16..4 or 1..64*2")
    at, many = first, 0
    while at <= last:
        yield str(at)
        many += 1
        if many > MOST_POINTS:
            raise DlprofError(f"{text!r} has more than {MOST_POINTS} values")
        at = at * by if m[3] == "*" else at + by


def grid(axes: Sequence[Axis]) -> list[dict[str, str]]:
    """Return all combinations, the last axis first; raise DlprofError where there are too many, or a name is double."""
    names = [a.name for a in axes]
    if len(set(names)) < len(names):
        raise DlprofError("an axis is named twice")
    points = [
        dict(zip(names, values, strict=True))
        for values in itertools.islice(itertools.product(*(a.values for a in axes)), MOST_POINTS + 1)
    ]
    if len(points) > MOST_POINTS:
        raise DlprofError(f"the grid has more than {MOST_POINTS} points")
    return points


def placeholders(axes: Sequence[Axis], command: Sequence[str]) -> set[str]:
    """Return the axes that stand as {NAME} in the command; the others must be settings of --set: raise DlprofError."""
    found = {a.name for a in axes if any(f"{{{a.name}}}" in word for word in command)}
    for a in axes:
        if a.name not in found:
            try:
                for value in a.values:
                    overrides.parse([f"{a.name}={value}"])
            except DlprofError as e:
                raise DlprofError(f"{e}; or write {{{a.name}}} where the command takes it") from None
    return found


def filled(command: Sequence[str], values: Mapping[str, str]) -> tuple[str, ...]:
    """Return the command with each {NAME} replaced by its value."""
    words = []
    for word in command:
        for name, value in values.items():
            word = word.replace(f"{{{name}}}", value)
        words.append(word)
    return tuple(words)


def settings(values: Mapping[str, str], of_command: set[str]) -> dict[str, Value]:
    """Return the values of a point that are overrides."""
    return overrides.parse(f"{name}={value}" for name, value in values.items() if name not in of_command)
