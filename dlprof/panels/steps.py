"""How long each step took."""

from __future__ import annotations

import pandas as pd

from dlprof.engine import Measured
from dlprof.errors import NotMeasured
from dlprof.measures.steps import step_series
from dlprof.overview import MOST_RANKS, Picture, points
from dlprof.result import Panel


def draw(run: Measured) -> list[Panel]:
    """Draw the duration of each step, a line a rank."""
    series = run.frame(step_series)
    series = series[series["kind"] == "train"]
    if series["step"].nunique() < 2:
        raise NotMeasured("fewer than two steps")
    table = series.pivot_table(index="step", columns="rank", values="dur_ns", aggfunc="first")
    if table.shape[1] > MOST_RANKS:
        table = pd.DataFrame({"mean of ranks": table.mean(axis=1), "slowest rank": table.max(axis=1)})
    else:
        table.columns = pd.Index([f"rank {r}" for r in table.columns])
    slowed = series.groupby("step")["profiled"].max().astype(int) > 0
    note = ""
    if slowed.any() and not slowed.all():
        stretches = slowed.index.to_series().groupby((slowed != slowed.shift()).cumsum()).agg(["first", "last"])
        found = [(a, b) for a, b in stretches.itertuples(index=False, name=None) if slowed[a]]
        told = [f"{a}" if a == b else f"{a} to {b}" for a, b in found]
        note = f"{'Step' if told == [str(found[0][0])] else 'Steps'} {' and '.join(told)}: slowed by what was recorded."
    return [
        Panel("lines", "Steps over the run", points(table), ("step", *map(str, table.columns)), unit="ns", note=note)
    ]


PICTURE = Picture((step_series,), draw)
