"""What a step would be without something: the ranks' own time replayed.

A step ends for all ranks when the slowest has done its own work; the others wait for it in collectives. So the own time
of a rank is the step less its waiting for others, and taking work from one rank shortens the step only as far as no
other rank then is the slowest: saving = max(own) − max(own − removed).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import settings
from dlprof.analysis.engine import Job, Maybe, across_ranks
from dlprof.analysis.step.breakdown import part
from dlprof.errors import NotMeasured


@across_ranks
def own_time(
    step_means: pd.DataFrame, waits: Maybe[pd.DataFrame], breakdown: Maybe[pd.DataFrame], job: Job
) -> pd.DataFrame:
    """Split the mean steady step into each rank's own time and its waiting for others.

    Columns: rank, step_ns, wait_ns, own_ns, known. Ranks that wait for each other have one step, the mean of theirs (a
    rank whose trace began earlier shows a longer one). Where waiting cannot be told (`known` is False) all of a rank's
    own step counts as own, but for the bubble of its pipeline, in which it waits for its neighbours: that is in neither
    of the two. On a CPU the waiting of the traced steps is brought to the mean steady step in the proportion of the
    two's exposed communication; on devices, what is not the traced steps' transfer is waiting.
    """
    means = step_means[["rank", "step_ns"]].set_index("rank")["step_ns"]
    try:
        waited = waits.get().groupby("rank")[["wait_ns", "exposed_ns"]].mean().reindex(means.index).fillna(0.0)
        communication = pd.Series(part(breakdown.get(), "communication"), dtype=float).reindex(means.index).fillna(0.0)
        if settings.on_cpu(job):
            fraction = (waited["wait_ns"] / waited["exposed_ns"].replace(0, np.nan)).fillna(0.0)
            wait = (fraction * communication).to_numpy()
        else:
            # A device transfers as fast in any step: by what the others communicate for longer, they wait for longer.
            transfer = (waited["exposed_ns"] - waited["wait_ns"]).clip(lower=0.0)
            wait = (communication - transfer).clip(lower=0.0).to_numpy()
        means = means * 0.0 + float(means.mean())
        known = True
    except NotMeasured:
        wait, known = np.zeros(len(means)), False
    return pd.DataFrame(
        {
            "rank": means.index,
            "step_ns": means.to_numpy(),
            "wait_ns": wait,
            "own_ns": np.maximum(means.to_numpy() - wait - _bubble(breakdown, means.index), 0.0),
            "known": known,
        }
    )


def _bubble(breakdown: Maybe[pd.DataFrame], ranks: pd.Index[int]) -> NDArray[np.float64]:
    try:
        bubble = pd.Series(part(breakdown.get(), "pipeline_bubble"), dtype=float)
    except NotMeasured:
        return np.zeros(len(ranks))
    return np.array([bubble.get(rank, 0.0) for rank in ranks])


def saving(own_time: pd.DataFrame, removed: Mapping[int, float] | pd.Series[float]) -> float:
    """Return how much shorter mean steady step were, in ns, were each rank's own time shorter by what is removed."""
    own = own_time["own_ns"].to_numpy()
    less = np.array([removed.get(rank, 0.0) for rank in own_time["rank"].tolist()])
    return max(0.0, float(own.max() - np.maximum(own - np.maximum(np.nan_to_num(less), 0.0), 0.0).max()))


def saving_input(step_series: pd.DataFrame, own_time: pd.DataFrame, removed: Mapping[int, float]) -> float:
    """Return the same for the wait for data, step by step: ranks that starve in turn cost more than their means tell.

    In every recorded steady step the rank that has the longest own time, its wait of that step included, sets the pace.
    `removed` is each rank's mean wait, ns; the series tells only how it spreads over the steps. Where waiting for other
    ranks is not known, the ranks are taken to have the same work but for the wait for data.
    """
    series = step_series
    series = series[series["steady"].astype(bool)]
    fetch = series.pivot_table(index="step", columns="rank", values="fetch_ns", aggfunc="first").dropna()
    times = own_time.set_index("rank")
    own = times["own_ns"]
    if len(fetch) < 2 or set(fetch.columns) != set(own.index):
        return saving(own_time, removed)
    mean = fetch.mean()
    wait = fetch * (
        pd.Series(removed, dtype=float).reindex(fetch.columns).fillna(0.0) / mean.replace(0, np.nan)
    ).fillna(0)
    rest = own.reindex(fetch.columns) - wait.mean()
    if not times["known"].all():
        rest[:] = rest.min()
    return max(0.0, float((wait + rest).max(axis=1).mean() - rest.max()))


def saving_stalls(
    stalled_steps: pd.DataFrame,
    stall_means: pd.DataFrame,
    own_time: pd.DataFrame,
    kind: str,
    removed: Mapping[int, float],
) -> float:
    """Return the same for a kind of stall, step by step: ranks that stall in turn cost more than their means tell.

    `removed` is each rank's mean stall, ns. In a step that stalls, the rank that has the longest own time, its stall of
    that step included, sets the pace; a rank that stalls not, or less, waits for it.
    """
    stalls = stalled_steps
    stalls = stalls[stalls["kind"] == kind]
    steps = stall_means["steps"].mean()
    times = own_time.set_index("rank")
    own = times["own_ns"]
    gone = pd.Series(removed, dtype=float).reindex(own.index).fillna(0.0)
    rest = own - gone
    if not times["known"].all():
        rest[:] = rest.min()
    table = stalls.pivot_table(index="step", columns="rank", values="ns", aggfunc="sum", observed=True)
    table = table.reindex(columns=own.index).fillna(0.0)
    # Where device work hides a part of the stalls, each counts by as much less.
    measured = table.sum() / steps
    table = table * (gone / measured.replace(0, np.nan)).fillna(0.0).clip(upper=1.0)
    return max(0.0, float(((table + rest).max(axis=1) - rest.max()).sum() / steps))
