"""What recorded stalls (garbage collection, checkpoints, compilation) cost the mean steady step, and where they fell.

A stall belongs to the step in which it begins, and counts no further than to its end.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof import schema
from dlprof.analysis.engine import Frame, Maybe, maybe, needs, per_rank, within_rank
from dlprof.analysis.timeline.steady import ENOUGH, light_steps, on_device_clock, standard_error, steady_steps
from dlprof.errors import NotMeasured

KINDS = ("checkpoint", "compilation", "garbage_collection")


# What a rank passes on: the most expensive compilations, and the longest of the steps that stalled.
MOST_COMPILATIONS = 200


MOST_STEPS = 10_000


@within_rank
def steady_stalls(stalls: Frame = needs(schema.STALLS), light_steps: Frame = needs(light_steps)) -> pd.DataFrame:
    """Return the stalls of the steady steps, with the step log's `step` and no longer than to its end.

    Raises NotMeasured where stalls were not recorded, or no steady step was.
    """
    if not light_steps["steady"].any():
        raise NotMeasured("no steady training step was recorded")
    begin, start = light_steps["start_ns"].to_numpy(), stalls["start_ns"].to_numpy()
    end = begin + light_steps["dur_ns"].to_numpy()
    at = np.searchsorted(begin, start, side="right") - 1
    # A row that stands for many begins where the first of them did, and is spread over the steps that follow.
    dur = stalls["dur_ns"].where(stalls["count"] > 1, np.minimum(stalls["dur_ns"], end[at] - start))
    inside = (at >= 0) & (start < end[at]) & light_steps["steady"].to_numpy()[at]
    within: pd.DataFrame = stalls.assign(step=light_steps["step"].to_numpy()[at], dur_ns=dur)[inside]
    return within


@per_rank
def stall_means(steady_stalls: Frame = needs(steady_stalls), steady_steps: Frame = needs(steady_steps)) -> pd.DataFrame:
    """Return one row a kind of KINDS, zeros where there was none of it.

    Columns: kind, mean_ns and its standard error noise_ns (of a steady step), stalls (how many), longest_ns, every (a
    steady step out of so many has one; 0: none has), steps (how many were steady), longer_ns (how much longer than by
    the stalls the mean step is for the steps that have one, or come after one that has) and its standard error
    longer_noise_ns (NaN: too few steps are neither).
    """
    n, rows = len(steady_steps), []
    for kind in KINDS:
        mine = steady_stalls[steady_stalls["kind"] == kind]
        stalled = mine.groupby("step")["dur_ns"].sum().to_numpy(dtype=float)
        # A script saves on a schedule: not how often, only how long is left to chance, once there are two to compare.
        scheduled = kind == "checkpoint" and len(stalled) > 1
        spread = stalled if scheduled else np.append(stalled, np.zeros(n - len(stalled)))
        longer, longer_noise = _longer(steady_steps, mine)
        rows.append(
            {
                "kind": kind,
                "mean_ns": float(stalled.sum() / n),
                "noise_ns": standard_error(spread) * (len(stalled) / n if scheduled else 1.0),
                "stalls": int(mine["count"].sum()),
                "longest_ns": float((mine["dur_ns"] / mine["count"]).max()) if len(mine) else 0.0,
                "every": n / min(n, mine.groupby("step")["count"].max().sum()) if len(mine) else 0.0,
                "steps": n,
                "longer_ns": longer,
                "longer_noise_ns": longer_noise,
            }
        )
    return pd.DataFrame(rows)


def _longer(steps: pd.DataFrame, stalls: pd.DataFrame) -> tuple[float, float]:
    """Return how much longer the steps with stalls, and those after them, are than the others, without the stalls.

    In ns of the mean steady step, with the standard error. A process that waited meanwhile may have the cores to itself
    or be ahead in the next step, which makes that one shorter. So both steps count.
    """
    number = steps["step"].to_numpy()
    touched = np.isin(number, [stalls["step"], stalls["step"] + 1])
    stalled = stalls.groupby("step")["dur_ns"].sum().reindex(number).fillna(0.0).to_numpy()
    left = steps["length_ns"].to_numpy() - stalled
    theirs, others = left[touched], left[~touched]
    if len(theirs) < 2 or len(others) < ENOUGH:
        return np.nan, np.nan
    noise = float(np.hypot(standard_error(theirs), standard_error(others)))
    return float(theirs.mean() - others.mean()) * touched.mean(), noise * touched.mean()


@per_rank
def stalled_steps(steady_stalls: Frame = needs(steady_stalls)) -> pd.DataFrame:
    """Return the steady steps that stalled: kind, step, ns (the sum), generation and path (of the longest stall)."""
    stalls = steady_stalls.sort_values("dur_ns", ascending=False, kind="stable")
    stalls = stalls.astype({"kind": "str", "path": "str"})
    first = {column: (column, "first") for column in ("generation", "path")}
    steps = stalls[stalls["kind"].isin(KINDS)].groupby(["kind", "step"]).agg(ns=("dur_ns", "sum"), **first)
    longest = steps.sort_values("ns", ascending=False, kind="stable").groupby("kind").head(MOST_STEPS)
    return longest.sort_index().reset_index()


def stalls_of(frame: pd.DataFrame, kind: str, rank: int) -> pd.DataFrame:
    """Return a rank's rows of one kind of stall, of `stall_means` or `stalled_steps`."""
    return frame[(frame["kind"] == kind) & (frame["rank"] == rank)]


@per_rank
def compilations(stalls: Frame = needs(schema.STALLS), steady_stalls: Frame = needs(steady_stalls)) -> pd.DataFrame:
    """Return what torch.compile compiled: path (the function), reason, again (1: not for the first time), count, ns.

    Over the whole job; `steady` and `steady_ns` are those of the steady steps. The most expensive first. Reasons that
    differ in their numbers only are one, with the first one's words.
    """
    found = stalls[(stalls["kind"] == "compilation").to_numpy()]
    steady = found.index.isin(steady_stalls.index)
    frame = pd.DataFrame(
        {
            "path": found["path"].astype("str"),
            # Dynamo puts before it which of its compilations did not fit.
            "reason": found["reason"].astype("str").str.replace(r"^\d+/\d+: ", "", regex=True),
            "count": 1,
            "ns": found["dur_ns"],
            "steady": steady.astype(int),
            "steady_ns": found["dur_ns"] * steady,
        }
    )
    alike = frame["reason"].str.replace(r"\d+", "#", regex=True)
    sums = {c: (c, "sum") for c in ("count", "ns", "steady", "steady_ns")}
    grouped = frame.groupby(["path", alike.rename("alike")]).agg(reason=("reason", "first"), **sums)
    grouped = grouped.reset_index("path").sort_values("ns", ascending=False, kind="stable", ignore_index=True)
    return grouped.head(MOST_COMPILATIONS)


@within_rank
def by_phase(
    steady_stalls: Maybe[Frame] = maybe(steady_stalls),
    steady_steps: Maybe[Frame] = maybe(steady_steps),
    stall_means: Maybe[Frame] = maybe(stall_means),
) -> dict[tuple[str, str], float]:
    """Return what stalls cost the mean steady step: (kind, phase of the training thread) → ns; empty if not recorded.

    Behind a stall the device goes on with what is queued: on its clock the stalled steps, and those after them, show
    how much longer the stalls make the mean step. Where that was not recorded, a stall costs as long as it is.
    """
    stalls = steady_stalls.or_none()
    if stalls is None:
        return {}
    means, cost = stall_means.get().set_index("kind"), stalls["dur_ns"].astype(float)
    kind = stalls["kind"].astype("str")
    if on_device_clock(steady_steps.get()):
        longer = 1 + means["longer_ns"] / means["mean_ns"].where(means["mean_ns"] > 0)
        cost *= kind.map(longer.clip(0.0, 1.0)).fillna(1.0)
    sums = (cost / means["steps"].iloc[0]).groupby([kind, stalls["phase"].astype("str")]).sum()
    return {(str(k), str(phase)): float(ns) for (k, phase), ns in sums.items() if k in KINDS}


@per_rank
def pauses_in_fetch(by_phase: dict[tuple[str, str], float] = needs(by_phase)) -> pd.DataFrame:
    """Return what garbage collection takes of the mean steady step while a batch is fetched, ns (one row): ns."""
    return pd.DataFrame({"ns": [by_phase.get(("garbage_collection", "fetch"), 0.0)]})
