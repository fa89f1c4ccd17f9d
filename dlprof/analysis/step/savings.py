"""What a step would be without something: the ranks' own time replayed.

A step ends for all ranks when the slowest has done its own work; the others wait for it in collectives. So the own time
of a rank is the step less its waiting for others, and taking work from one rank shortens the step only as far as no
other rank then is the slowest: saving = max(own) − max(own − removed).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import numpy as np
import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.communication.waits import waits
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, across_ranks, maybe, needs
from dlprof.analysis.step.breakdown import breakdown, part
from dlprof.analysis.timeline.stalls import KINDS, stall_means, stalled_steps
from dlprof.analysis.timeline.steps import step_means
from dlprof.errors import NotMeasured


@across_ranks
def own_time(
    step_means: Frame = needs(step_means),
    waits: Maybe[Frame] = maybe(waits),
    breakdown: Maybe[Frame] = maybe(breakdown),
    job: Job = needs(JOB),
) -> pd.DataFrame:
    """Split the mean steady step into each rank's own time and its waiting for others.

    Columns: rank, step_ns, wait_ns, own_ns, known, traced (steps of it were). Ranks that wait for each other have one
    step, the mean of theirs (a rank whose trace began earlier shows a longer one). Where waiting is not known (`known`
    is False) all of a rank's own step counts as own, but for the bubble of its pipeline, in which it waits for its
    neighbours: that is in neither of the two. On a CPU the waiting of the traced steps is brought to the mean steady
    step in the proportion of the two's exposed communication; on devices, what is not the traced steps' transfer is
    waiting.
    """
    means = step_means.set_index("rank")
    step, traced = means["step_ns"], means["traced_steps"] > 0
    wait, bubble, known = 0.0 * step, 0.0 * step, False
    with suppress(NotMeasured):
        parts = pd.DataFrame({c: part(breakdown.get(), c) for c in ("communication", "pipeline_bubble")})
        communication, bubble = (parts[c].reindex(step.index, fill_value=0.0) for c in parts)
        waited = waits.get().groupby("rank")[["wait_ns", "exposed_ns"]].mean().reindex(step.index, fill_value=0.0)
        if settings.on_cpu(job):
            wait = communication * (waited["wait_ns"] / waited["exposed_ns"].replace(0, np.nan)).fillna(0.0)
        else:
            # A device transfers as fast in any step: by what the others communicate for longer, they wait for longer.
            wait = (communication - (waited["exposed_ns"] - waited["wait_ns"]).clip(lower=0.0)).clip(lower=0.0)
        step, known = 0.0 * step + step.mean(), True
    own = (step - wait - bubble).clip(lower=0.0)
    frame = pd.DataFrame({"step_ns": step, "wait_ns": wait, "own_ns": own, "known": known, "traced": traced})
    return frame.reset_index()


def saving(own_time: pd.DataFrame, removed: Mapping[int, float] | pd.Series[float]) -> float:
    """Return how much shorter the mean steady step would be, ns, with so much removed from each rank's own time.

    Where some ranks were traced and others not, nothing is known of what would be removed from these: they are taken to
    be like those.
    """
    times = own_time.set_index("rank")
    less = pd.Series(removed, dtype=float).reindex(times.index).clip(lower=0.0)
    known = less.notna() | times["traced"] | (not times["traced"].any())
    own, less = times["own_ns"][known], less[known].fillna(0.0)
    return max(0.0, float(own.max() - (own - less).clip(lower=0.0).max()))


def saving_in_pipelines(
    own_time: pd.DataFrame, removed: Mapping[int, float], pipelines: pd.DataFrame | None, breakdown: pd.DataFrame
) -> float:
    """Return the same where the ranks are stages of pipelines (None: of none).

    What holds one stage up holds up its neighbours, which count it as their bubble: that is as much shorter then.
    """
    if pipelines is None:
        return saving(own_time, removed)
    bubble = part(breakdown, "pipeline_bubble")
    own = own_time.set_index("rank")["own_ns"]
    idle, less = (pd.Series(of, dtype=float).reindex(own.index) for of in (bubble, removed))
    of_pipeline = less.groupby(pipelines.drop_duplicates("rank").set_index("rank")["ranks"].reindex(own.index))
    # Ranks of which neither is known stay unknown.
    most = pd.Series(np.fmax(less, np.minimum(of_pipeline.transform("max"), idle)), own.index)
    return saving(own_time.assign(own_ns=(own + idle.fillna(0.0)).to_numpy()), most)


def saving_input(step_series: pd.DataFrame, own_time: pd.DataFrame, removed: Mapping[int, float]) -> float:
    """Return the same for the wait for data, step by step: ranks that starve in turn cost more than their means.

    In every recorded steady step the rank that has the longest own time, its wait of that step included, sets the pace.
    `removed` is each rank's mean wait, ns; the series shows only how it spreads over the steps.
    """
    series = step_series[step_series["steady"].astype(bool)]
    fetch = series.pivot_table(index="step", columns="rank", values="fetch_ns", aggfunc="first").dropna()
    if len(fetch) < 2 or set(fetch.columns) != set(own_time["rank"]):
        return saving(own_time, removed)
    waits = fetch * (_of_ranks(removed, fetch.columns) / fetch.mean().replace(0, np.nan)).fillna(0.0)
    return _saving_of_steps(own_time, waits, waits.mean(), len(waits))


@across_ranks
def stall_savings(
    breakdown: Frame = needs(breakdown),
    stall_means: Frame = needs(stall_means),
    stalled_steps: Frame = needs(stalled_steps),
    own_time: Frame = needs(own_time),
) -> dict[str, float]:
    """Return the same for each kind of stall: kind → ns.

    In a step that stalls, the rank that has the longest own time, its stall of that step included, sets the pace; a
    rank that stalls not, or less, waits for it.
    """
    steps, savings = float(stall_means["steps"].mean()), {}
    for kind in KINDS:
        stalls = stalled_steps[stalled_steps["kind"] == kind].pivot_table("ns", "step", "rank", aggfunc="sum")
        stalls = stalls.reindex(columns=own_time["rank"]).fillna(0.0)
        felt = _of_ranks(part(breakdown, kind), stalls.columns)
        # Where device work hides a part of the stalls, each counts by as much less.
        share = (felt * steps / stalls.sum().replace(0, np.nan)).fillna(0.0).clip(upper=1.0)
        savings[kind] = _saving_of_steps(own_time, stalls * share, felt, steps)
    return savings


def _of_ranks(removed: Mapping[int, float], ranks: pd.Index) -> pd.Series[float]:
    return pd.Series(removed, dtype=float).reindex(ranks).fillna(0.0)


def _saving_of_steps(own_time: pd.DataFrame, lost: pd.DataFrame, means: pd.Series[float], steps: float) -> float:
    """Return what the job saves where `lost`, ns by step and rank, is gone from so many steps, ns of the mean one.

    `means` is what the own time of each rank has of it. Where waiting for other ranks is not known, the ranks are taken
    to have the same work otherwise.
    """
    times = own_time.set_index("rank").reindex(lost.columns)
    rest = times["own_ns"] - means
    if not times["known"].all():
        rest[:] = rest.min()
    return max(0.0, float(((lost + rest).max(axis=1) - rest.max()).sum() / steps))
