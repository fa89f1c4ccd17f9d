"""The Python functions that py-spy saw most."""

from __future__ import annotations

import pandas as pd

from dlprof.engine import Measured
from dlprof.errors import NotMeasured
from dlprof.measures.stacks import DOING, hottest, shown
from dlprof.overview import Picture
from dlprof.result import Panel
from dlprof.units import percent

# Functions of one kind among the hottest: of the user's, of libraries.
MOST_OWN = 8
MOST_LIBRARY = 3

# Seen less often than this, a function is there by chance, or does not matter.
LEAST_SEEN = 5
LEAST_SHARE = 0.01

_DOING = {
    "rest": "between the phases",
    "compute": "forward, backward, optimizer",
    "fetch": "waiting for the loader",
    "worker": "loader worker",
}


def draw(run: Measured) -> list[Panel]:
    """Show the Python functions seen most, the user's own first, over all ranks."""
    frame = run.frame(hottest)
    samples = frame.groupby(["rank", "doing"])["samples"].first().groupby("doing").sum()
    functions = frame.groupby(["doing", "function", "file", "own"], as_index=False).agg(
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
            shares = (percent(float(str(row.alone)) / of), percent(float(str(row.total)) / of))
            rows.append((_DOING[doing], where, "yours" if row.own else "library", *shares))
    kinds = ", ".join(f"{_DOING[doing]} {samples[doing]:,}" for doing in DOING if doing in samples)
    seen = int(samples.sum())
    note = (
        f"py-spy saw {seen:,} stacks: {kinds}. Shares are of those of the same kind."
        " In it: in the function, and for yours in library code that it calls."
    )
    if not rows:
        raise NotMeasured("too few stacks were seen")
    columns = ("while", "function", "whose", "in it", "with what it calls")
    return [Panel("table", "Hottest Python functions", tuple(rows), columns, note=note)]


PICTURE = Picture((hottest,), draw)
