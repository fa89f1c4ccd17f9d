"""How much work is queued for the device over the traced steps, and what of it waits while the device idles."""

from __future__ import annotations

import pandas as pd

from dlprof.analysis.engine import Frame, Maybe, by_rank, maybe, needs
from dlprof.analysis.estimate import worst
from dlprof.analysis.host.queue import FULL, device_lag, queue_series, queued_waits
from dlprof.analysis.panel import MOST_RANKS, Picture, points, table
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.result import Panel
from dlprof.units import duration

# Waits of less than this share of a step are not worth a table.
LEAST_SHARE = 0.01

_COLUMNS = {
    "ended_by": "the wait ends with",
    "stream": "stream",
    "launched_by": "launched by",
    "times": "times a step",
    "ns": "device idle_ns",
    "queued_ns": "launched before_ns",
    "waits_for": "waits for",
}


def draw(
    queued_waits: Maybe[Frame] = maybe(queued_waits),
    mean_step_ns: float = needs(mean_step_ns),
    queue_series: Maybe[Frame] = maybe(queue_series),
    device_lag: Maybe[Frame] = maybe(device_lag),
) -> list[Panel]:
    """Draw the length of the queue, and list what waits in it on the rank where most does."""
    panels = []
    waits, series, lag = (need.or_none() for need in (queued_waits, queue_series, device_lag))
    if waits is not None and len(waits):
        by = by_rank(waits, "ns")
        if max(by.values()) >= LEAST_SHARE * mean_step_ns:
            panels.append(waits_table(waits, worst(by)))
    if series is not None and lag is not None:
        panels.append(_length(series, lag["lag_ns"]))
    return panels


def waits_table(queued_waits: pd.DataFrame, rank: int) -> Panel:
    """List the queued work of one rank that waits while the device idles, the longest first."""
    mine = queued_waits[queued_waits["rank"] == rank].sort_values("ns", ascending=False, kind="stable")
    note = "The device idles although this work was launched before it ran dry."
    return table(f"Queued work that waits, a traced step of rank {rank}", mine, _COLUMNS, note=note)


def _length(series: pd.DataFrame, lag_ns: pd.Series[float]) -> Panel:
    series = series[series["rank"].isin(sorted(series["rank"].unique())[:MOST_RANKS])]
    # Each rank from its own beginning: their clocks may differ.
    by_rank = series.groupby("rank")
    place, at = by_rank.cumcount(), series["at_ns"] - by_rank["at_ns"].transform("min")
    lines = series.assign(place=place).pivot(index="place", columns="rank", values="queued")
    lines.index = pd.Index(at.groupby(place).mean())
    least, most = float(lag_ns.min()), float(lag_ns.max())
    behind = duration(most) if most - least < 0.1 * max(most, 1.0) else f"{duration(least)} to {duration(most)}"
    note = (
        f"Where a step begins, the device is {behind} behind its host. With about {FULL:,} launches queued the next one"
        " waits until one has begun; with none, the device waits for its host."
    )
    columns = ("ns", *(f"rank {rank}" for rank in lines.columns))
    return Panel("lines", "Launches queued for the device", points(lines), columns, unit="", note=note)


PICTURE = Picture(draw)
