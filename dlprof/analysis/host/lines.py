"""Where the named functions (`--lines`) spend their time, line by line."""

from __future__ import annotations

import pandas as pd

from dlprof.analysis.engine import per_rank
from dlprof.errors import NotMeasured

# What travels of a rank: so many functions, those with the most time first, and so many lines of each.
MOST_FUNCTIONS = 12
MOST_LINES = 200

_FUNCTION = ["role", "function", "file"]


@per_rank
def line_times(lines: pd.DataFrame) -> pd.DataFrame:
    """Return the table "lines" without what never ran: the function that took longest first, its lines in order.

    Of a function too long to travel whole, the lines that took longest. Raises NotMeasured where nothing was counted.
    """
    rows = lines.astype({"role": str, "function": str, "file": str, "source": str})
    functions = [part for _, part in rows.groupby(_FUNCTION) if part["hits"].any()]
    if not functions:
        raise NotMeasured("no function that --lines names was called while its lines were counted")
    functions.sort(key=lambda part: -int(part["dur_ns"].sum()))
    return pd.concat([_longest(part) for part in functions[:MOST_FUNCTIONS]], ignore_index=True)


def _longest(part: pd.DataFrame) -> pd.DataFrame:
    return part.nlargest(MOST_LINES, "dur_ns").sort_values("line") if len(part) > MOST_LINES else part
