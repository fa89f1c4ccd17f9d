"""The profiles of other tools: a flame graph of each, and its hottest functions."""

from __future__ import annotations

import pandas as pd

from dlprof.analysis.engine import Frame, Maybe, maybe, needs
from dlprof.analysis.host.profiles import counted_functions, flame_rows, profile_flame, profile_functions
from dlprof.analysis.host.stacks import DOING, is_own, shown
from dlprof.analysis.panel import PHASES, Picture, table
from dlprof.result import Panel
from dlprof.units import quantity

MOST_OWN = 12
MOST_LIBRARY = 6
MOST_COUNTED = 20

# Functions with less of the whole are left out.
LEAST_SHARE = 0.002

_ELSEWHERE = {"": "in none of a step's phases"}
_ROOTS = {**_ELSEWHERE, **{doing: name for doing, name in DOING.items() if doing != "rest"}}
_CATEGORIES = {"": "host", **PHASES, "worker": "worker"}

_COLUMNS = {"function": "function", "own": "whose", "alone": "in it_share", "total": "with what it calls_share"}
_COUNTED = {
    "function": "function",
    "own": "whose",
    "calls": "calls",
    "own_ns": "in it alone_ns",
    "total_ns": "with what it calls_ns",
    "share": "in it alone_share",
}


def draw(
    profile_flame: Frame = needs(profile_flame),
    profile_functions: Frame = needs(profile_functions),
    counted_functions: Maybe[Frame] = maybe(counted_functions),
) -> list[Panel]:
    """Show each profile: the tree of calls over all ranks that have it, and its functions, the user's own first."""
    panels = []
    counted = counted_functions.or_none()
    for name, flame in profile_flame.groupby("profile", sort=False):
        functions = profile_functions[profile_functions["profile"] == name]
        unit, tool = str(flame["unit"].iloc[0]), str(functions["tool"].iloc[0]) or "another tool"
        whole = float(functions.groupby("rank")["of"].first().sum())
        exact = None if counted is None else counted[counted["profile"] == name]
        estimated = exact is not None and len(exact) > 0
        note = f"{name}, of {tool}: {quantity(whole, unit)}. A function stands under the one that called it."
        if estimated:
            note += " The file knows who calls whom and no stacks: the widths are estimated from that."
        several = flame["doing"].nunique() > 1
        rows = flame_rows(flame, _ROOTS, _CATEGORIES, rooted=several)
        panels.append(Panel("flame", f"Where Python was: {name}", rows, unit=unit, note=note))
        if estimated and exact is not None:
            panels.append(_counted(str(name), exact))
        else:
            panels.append(_hottest(str(name), functions, whole))
    return panels


def _hottest(name: str, functions: pd.DataFrame, whole: float) -> Panel:
    by = ["function", "file", "own"]
    rows = functions.groupby(by, as_index=False).agg({"line": "first", "alone": "sum", "total": "sum"})
    rows = rows.sort_values(["own", "alone", "total"], ascending=False, kind="stable")
    rows = rows[(rows["alone"] >= LEAST_SHARE * whole) | (rows["total"] >= LEAST_SHARE * whole)]
    nth = rows.groupby("own").cumcount()
    rows = rows[nth < rows["own"].map({True: MOST_OWN, False: MOST_LIBRARY})]
    rows = rows.assign(
        function=[shown(*row) for row in rows[["function", "file", "line"]].itertuples(index=False)],
        own=rows["own"].map({True: "yours", False: "library"}),
        alone=rows["alone"] / whole,
        total=rows["total"] / whole,
    )
    note = "In it: in the function, and for yours in library code that it calls."
    return table(f"Hottest Python functions: {name}", rows, _COLUMNS, note=note)


def _counted(name: str, rows: pd.DataFrame) -> Panel:
    rows = rows.head(MOST_COUNTED).assign(share=rows["own_ns"] / rows["of_ns"])
    rows = rows.assign(
        own=["yours" if is_own(file) else "library" for file in rows["file"]],
        function=[shown(*row) for row in rows[["function", "file", "line"]].itertuples(index=False)],
    )
    note = "As cProfile counted them. It slows Python functions more than built-in ones: small functions look too slow."
    return table(f"Functions: {name}", rows, _COUNTED, note=note)


PICTURE = Picture(draw)
