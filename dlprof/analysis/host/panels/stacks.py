"""The Python functions that py-spy saw most."""

from __future__ import annotations

from dataclasses import dataclass, field

import pandas as pd

from dlprof.analysis.host.stacks import DOING, MOST_FRAMES, shown
from dlprof.analysis.panel import PHASES, Picture
from dlprof.errors import NotMeasured
from dlprof.result import Panel

# Functions of one kind among the hottest: of the user's, of libraries.
MOST_OWN = 6
MOST_LIBRARY = 2

# Seen less often than this, a function is there by chance, or does not matter.
LEAST_SEEN = 5
LEAST_SHARE = 0.01

# What a frame of each kind stands on, in the colour of what the training thread was doing.
_CATEGORY = {"rest": "host", **PHASES, "worker": "worker"}


def draw(flame: pd.DataFrame, hottest: pd.DataFrame) -> list[Panel]:
    """Show the Python functions seen most, the user's own first, and how they call each other, over all ranks."""
    return [_flame(flame), *_hottest(hottest)]


@dataclass
class _Call:
    """A function as it was called, of all ranks together."""

    name: str
    category: str
    samples: int = 0
    calls: dict[str, _Call] = field(default_factory=dict)


def _flame(flame: pd.DataFrame) -> Panel:
    """Draw who calls whom: what the training thread was doing, and upon it its functions, the widest first."""
    roots = {doing: _Call(DOING[doing], _CATEGORY[doing]) for doing in DOING}
    for _, frame in flame.groupby("rank"):
        made: list[_Call] = []
        for doing, parent, name, samples, own in zip(
            *(frame[c] for c in ("doing", "parent", "name", "samples", "own")), strict=True
        ):
            under = made[parent] if parent >= 0 else roots[doing]
            call = under.calls.setdefault(name, _Call(_named(name), "own" if own else "library"))
            call.samples += int(samples)
            made.append(call)
            if parent < 0:
                roots[doing].samples += int(samples)
    rows: list[tuple[int, int, int, str, str]] = []
    left = [(0, 0, root) for root in roots.values() if root.samples]
    at = 0
    for place, (_, _, root) in enumerate(left):
        left[place] = (0, at, root)
        at += root.samples
    while left:
        depth, at, call = left.pop()
        rows.append((depth, at, call.samples, call.name, call.category))
        for inner in sorted(call.calls.values(), key=lambda c: -c.samples):
            left.append((depth + 1, at, inner))
            at += inner.samples
    note = "Wide is where Python was seen most; a function stands under the one that called it."
    return Panel("flame", "Where Python was seen", tuple(sorted(rows)[:MOST_FRAMES]), unit="samples", note=note)


def _named(name: str) -> str:
    function, _, file = name.rpartition(" (")
    return shown(function, file.rstrip(")"), 0)


def _hottest(hottest: pd.DataFrame) -> list[Panel]:
    samples = hottest.groupby(["rank", "doing"])["samples"].first().groupby("doing").sum()
    functions = hottest.groupby(["doing", "function", "file", "own"], as_index=False).agg(
        line=("line", "first"), alone=("alone", "sum"), total=("total", "sum")
    )
    rows = []
    for doing in DOING:
        mine = functions[functions["doing"] == doing]
        # A function that only calls others of the user's says nothing here.
        mine = mine[mine["alone"] >= max(LEAST_SEEN, LEAST_SHARE * int(samples.get(doing, 0)))]
        own = mine[mine["own"].astype(bool)].nlargest(MOST_OWN, ["alone", "total"])
        library = mine[~mine["own"].astype(bool)].nlargest(MOST_LIBRARY, ["alone", "total"])
        for row in pd.concat([own, library]).itertuples():
            of = float(samples[doing])
            where = shown(str(row.function), str(row.file), int(str(row.line)))
            shares = (float(str(row.alone)) / of, float(str(row.total)) / of)
            rows.append((DOING[doing], where, "yours" if row.own else "library", *shares))
    kinds = ", ".join(f"{DOING[doing]} {samples[doing]:,}" for doing in DOING if doing in samples)
    seen = int(samples.sum())
    note = (
        f"py-spy saw {seen:,} stacks: {kinds}. Shares are of those of the same kind."
        " In it: in the function, and for yours in library code that it calls."
    )
    if not rows:
        raise NotMeasured("too few stacks were seen")
    columns = ("while", "function", "whose", "in it_share", "with what it calls_share")
    return [Panel("table", "Hottest Python functions", tuple(rows), columns, note=note)]


PICTURE = Picture(draw)
