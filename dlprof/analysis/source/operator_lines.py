"""Which line of the script calls which operators, as counted in the one step whose operators the recorder sees."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dlprof.result import Place

# A loop's work may be done in a function that it calls; a third place says no more. The second has at least this share
# of the calls of the first.
_MOST, _NOTABLE = 2, 0.25


def busiest(facts: Mapping[str, Any], phase: str, after: str, names: Collection[str]) -> tuple[Place, ...]:
    """Return the line that calls operators of these names most often, and that of the next function that calls them.

    `phase`: the phase that it is in, "" between the phases; `after`: the phase that ended last before it, or that one.
    Empty where none was recorded.
    """
    found: dict[tuple[str, str], tuple[int, Place]] = {}
    for one in (facts.get("flops") or {}).get("lines") or []:
        calls = sum(n for name, n in (one.get("operators") or {}).items() if name in names)
        if one.get("phase") == phase and one.get("after") == after and calls:
            place = Place(str(one["file"]), int(one["line"]), str(one["function"]), what=str(one["source"]))
            key = (place.file, place.function)
            found[key] = max(found.get(key, (0, place)), (calls, place), key=lambda of: of[0])
    ordered = sorted(found.values(), key=lambda of: -of[0])
    return tuple(place for calls, place in ordered[:_MOST] if calls >= _NOTABLE * ordered[0][0])
