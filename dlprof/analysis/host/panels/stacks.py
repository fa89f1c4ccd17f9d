"""The Python functions that py-spy saw most."""

from __future__ import annotations

import pandas as pd

from dlprof.analysis.engine import Frame, needs
from dlprof.analysis.host.profiles import flame_rows
from dlprof.analysis.host.stacks import DOING, flame, hottest, shown
from dlprof.analysis.panel import PHASES, Picture, table
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


_COLUMNS = {
    "doing": "while",
    "function": "function",
    "own": "whose",
    "alone": "in it_share",
    "total": "with what it calls_share",
}


def draw(flame: Frame = needs(flame), hottest: Frame = needs(hottest)) -> list[Panel]:
    """Show the Python functions seen most, the user's own first, and how they call each other, over all ranks."""
    return [_flame(flame), *_hottest(hottest)]


def _flame(flame: pd.DataFrame) -> Panel:
    """Draw who calls whom: what the training thread was doing, and upon it its functions, the widest first."""
    note = "The wider, the more often Python was seen there; a function stands below its caller."
    rows = flame_rows(flame, DOING, _CATEGORY)
    return Panel("flame", "Where Python was seen", rows, unit="samples", note=note)


def _hottest(hottest: pd.DataFrame) -> list[Panel]:
    samples = hottest.groupby(["rank", "doing"])["samples"].first().groupby("doing").sum()
    by = ["doing", "function", "file", "own"]
    functions = hottest.groupby(by, as_index=False).agg({"line": "first", "alone": "sum", "total": "sum"})
    functions = functions.assign(of=functions["doing"].map(samples), place=functions["doing"].map([*DOING].index))
    # A function that only calls others of the user's says nothing here.
    functions = functions[functions["alone"] >= (LEAST_SHARE * functions["of"]).clip(lower=LEAST_SEEN)]
    functions = functions.sort_values(["place", "own", "alone", "total"], ascending=[True, False, False, False])
    nth = functions.groupby(["doing", "own"]).cumcount()
    functions = functions[nth < functions["own"].map({True: MOST_OWN, False: MOST_LIBRARY})]
    if not len(functions):
        raise NotMeasured("too few stacks were seen")
    functions = functions.assign(
        doing=functions["doing"].map(DOING),
        function=[shown(*row) for row in functions[["function", "file", "line"]].itertuples(index=False)],
        own=functions["own"].map({True: "yours", False: "library"}),
        alone=functions["alone"] / functions["of"],
        total=functions["total"] / functions["of"],
    )
    kinds = ", ".join(f"{DOING[doing]} {samples[doing]:,}" for doing in DOING if doing in samples)
    note = (
        f"py-spy saw {samples.sum():,} stacks: {kinds}. Shares are of those of the same kind."
        " In it: in the function itself; of yours, also in library code that it calls."
    )
    return [table("Hottest Python functions", functions, _COLUMNS, note=note)]


PICTURE = Picture(draw)
