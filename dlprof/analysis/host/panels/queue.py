"""How much work is queued for the device over the traced steps, and what of it waits while the device idles."""

from __future__ import annotations

from contextlib import suppress

import pandas as pd

from dlprof.analysis.engine import Maybe, MeasureFailed
from dlprof.analysis.host.queue import FULL
from dlprof.analysis.panel import MOST_RANKS, Picture, points
from dlprof.errors import NotMeasured
from dlprof.result import Panel
from dlprof.units import duration

# Waits of less than this share of a step are not worth a table.
LEAST_SHARE = 0.01


def draw(
    queued_waits: Maybe[pd.DataFrame],
    mean_step_ns: Maybe[float],
    queue_series: Maybe[pd.DataFrame],
    device_lag: Maybe[pd.DataFrame],
) -> list[Panel]:
    """Draw the length of the queue, and list what waits in it on the rank where most does."""
    panels = []
    with suppress(NotMeasured, MeasureFailed):
        panels.append(_waits(queued_waits.get(), mean_step_ns.get()))
    with suppress(NotMeasured, MeasureFailed):
        panels.append(_length(queue_series.get(), device_lag.get()))
    return panels


def waits_table(frame: pd.DataFrame, rank: int) -> Panel:
    """List the queued work of one rank that waits while the device idles, the longest first."""
    mine = frame[frame["rank"] == rank].sort_values("ns", ascending=False, kind="stable")
    rows = tuple(
        (
            str(row["ended_by"]),
            str(row["stream"]),
            str(row["launched_by"]),
            float(row["times"]),
            float(row["ns"]),
            float(row["queued_ns"]),
            str(row["waits_for"]),
        )
        for row in mine.to_dict("records")
    )
    columns = (
        "the wait ends with",
        "stream",
        "launched by",
        "times a step",
        "device idle_ns",
        "launched before_ns",
        "waits for",
    )
    note = "The device idles although this work was launched before it ran dry."
    return Panel("table", f"Queued work that waits, a traced step of rank {rank}", rows, columns, note=note)


def _waits(queued_waits: pd.DataFrame, mean_step_ns: float) -> Panel:
    by = queued_waits.groupby("rank")["ns"].sum() if len(queued_waits) else pd.Series(dtype=float)
    if not len(by) or by.max() < LEAST_SHARE * mean_step_ns:
        raise NotMeasured("no queued work waits")
    return waits_table(queued_waits, int(str(by.idxmax())))


def _length(queue_series: pd.DataFrame, device_lag: pd.DataFrame) -> Panel:
    series, lag = queue_series, device_lag.set_index("rank")
    shown = sorted(int(r) for r in series["rank"].unique())[:MOST_RANKS]
    series = series[series["rank"].isin(shown)]
    # Each rank from its own beginning: their clocks may differ.
    begin = series.groupby("rank")["at_ns"].transform("min")
    place = series.groupby("rank").cumcount()
    table = series.assign(at=series["at_ns"] - begin, place=place).pivot(index="place", columns="rank", values="queued")
    at = (series["at_ns"] - begin).groupby(place).mean()
    table = table.set_axis(pd.Index(at.reindex(table.index)), axis=0)
    table.columns = pd.Index([f"rank {r}" for r in table.columns])
    least, most = float(lag["lag_ns"].min()), float(lag["lag_ns"].max())
    behind = duration(most) if most - least < 0.1 * max(most, 1.0) else f"{duration(least)} to {duration(most)}"
    note = (
        f"Where a step begins, the device is {behind} behind its host. With about {FULL:,} launches queued the next one"
        " waits for room; with none, the device waits for its host."
    )
    columns = ("ns", *map(str, table.columns))
    return Panel("lines", "Launches queued for the device", points(table), columns, unit="", note=note)


PICTURE = Picture(draw)
