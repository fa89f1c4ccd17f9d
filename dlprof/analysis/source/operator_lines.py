"""Which line of the script calls which operators, as counted in the one step whose operators the recorder sees."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dlprof.result import Place


def busiest(facts: Mapping[str, Any], phase: str, after: str, names: Collection[str]) -> Place | None:
    """Return the line that calls operators of these names most often; None: none was recorded.

    `phase`: the phase that it is in, "" between the phases; `after`: the phase that ended last before it, or that one.
    """
    best, most = None, 0
    for one in (facts.get("flops") or {}).get("lines") or []:
        if one.get("phase") == phase and one.get("after") == after:
            calls = sum(n for name, n in (one.get("operators") or {}).items() if name in names)
            if calls > most:
                best, most = one, calls
    if best is None:
        return None
    return Place(str(best["file"]), int(best["line"]), str(best["function"]), what=str(best["source"]))
