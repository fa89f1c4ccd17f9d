"""What recorded stalls (garbage collection, checkpoints, compilation) cost the mean steady step, and where they fell.

A stall belongs to the step in which it begins, and counts as far as that step goes.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Maybe, per_rank, within_rank
from dlprof.analysis.timeline.steady import ENOUGH, standard_error
from dlprof.analysis.timeline.steps import on_device_clock
from dlprof.errors import NotMeasured

KINDS = ("checkpoint", "compilation", "garbage_collection")

# What travels of the compilations: where there are more functions and reasons, the dearest.
MOST_COMPILATIONS = 200

# What travels of the steps that stalled: where there are more, the longest.
MOST_STEPS = 10_000


@within_rank
def steady_stalls(stalls: pd.DataFrame, light_steps: pd.DataFrame) -> pd.DataFrame:
    """Return the stalls of the steady steps, with the light layer's `step` and no longer than to its end.

    Raises NotMeasured where stalls were not recorded, or no steady step was.
    """
    if not light_steps["steady"].any():
        raise NotMeasured("no steady training step was recorded")
    begin = light_steps["start_ns"].to_numpy()
    end = begin + light_steps["dur_ns"].to_numpy()
    start = stalls["start_ns"].to_numpy()
    at = np.searchsorted(begin, start, side="right") - 1
    inside = (at >= 0) & (start < end[at]) & light_steps["steady"].to_numpy()[at]
    found = stalls[inside]
    at = at[inside]
    dur = found["dur_ns"].to_numpy()
    # What stands for many begins where the first of them did, and is spread over the steps that follow.
    clipped = np.where(found["count"] > 1, dur, np.minimum(dur, end[at] - found["start_ns"].to_numpy()))
    within: pd.DataFrame = found.assign(step=light_steps["step"].to_numpy()[at], dur_ns=clipped)
    return within


@per_rank
def stall_means(steady_stalls: pd.DataFrame, light_steps: pd.DataFrame) -> pd.DataFrame:
    """Return one row a kind of KINDS, zeros where there was none of it.

    Columns: kind, mean_ns and its standard error noise_ns (of a steady step), stalls (how many), longest_ns, every (a
    steady step out of so many has one; 0: none has), steps (how many were steady), beside_ns (how much longer than by
    the stalls the mean step is for the steps that have one, or come after one that has) and its standard error
    beside_noise_ns (NaN: too few steps are neither).
    """
    steps = light_steps
    steps = steps[steps["steady"]]
    n = len(steps)
    rows = []
    for kind in KINDS:
        mine = steady_stalls[steady_stalls["kind"] == kind]
        stalled = mine.groupby("step")["dur_ns"].sum().to_numpy(dtype=float)
        # A script saves on a schedule: not how often, only how long is left to chance, once there are two to compare.
        scheduled = kind == "checkpoint" and len(stalled) > 1
        spread = stalled if scheduled else np.append(stalled, np.zeros(n - len(stalled)))
        beside, beside_noise = _beside(steps, mine)
        rows.append(
            {
                "kind": kind,
                "mean_ns": float(stalled.sum() / n),
                "noise_ns": standard_error(spread) * (len(stalled) / n if scheduled else 1.0),
                "stalls": int(mine["count"].sum()),
                "longest_ns": float((mine["dur_ns"] / mine["count"]).max()) if len(mine) else 0.0,
                "every": n / min(n, mine.groupby("step")["count"].max().sum()) if len(mine) else 0.0,
                "steps": n,
                "beside_ns": beside,
                "beside_noise_ns": beside_noise,
            }
        )
    return pd.DataFrame(rows)


def _beside(steps: pd.DataFrame, stalls: pd.DataFrame) -> tuple[float, float]:
    """Return how much longer steps are that stall, and those after them, than the others, their stalls not counted.

    Of the mean steady step, ns, with its standard error. Who waited meanwhile may have the cores to itself or be ahead
    in the step after, which makes that one shorter: both count.
    """
    number = steps["step"].to_numpy()
    touched = np.isin(number, stalls["step"]) | np.isin(number, stalls["step"] + 1)
    stalled = stalls.groupby("step")["dur_ns"].sum().reindex(number).fillna(0.0).to_numpy()
    left = steps["length_ns"].to_numpy() - stalled
    if touched.sum() < 2 or (~touched).sum() < ENOUGH:
        return float("nan"), float("nan")
    longer = float(left[touched].mean() - left[~touched].mean())
    noise = float(np.hypot(standard_error(left[touched]), standard_error(left[~touched])))
    share = float(touched.mean())
    return longer * share, noise * share


@per_rank
def stalled_steps(steady_stalls: pd.DataFrame) -> pd.DataFrame:
    """Return the steady steps that stalled: kind, step, ns (together), and generation and path of the longest stall."""
    stalls = steady_stalls.sort_values("dur_ns", ascending=False, kind="stable")
    parts = []
    for kind in KINDS:
        groups = stalls[stalls["kind"] == kind].groupby("step")
        frame = groups.agg(ns=("dur_ns", "sum"), generation=("generation", "first")).reset_index()
        frame["path"] = groups["path"].first().astype("str").to_numpy()
        parts.append(frame.assign(kind=kind).nlargest(MOST_STEPS, "ns").sort_values("step"))
    together = pd.concat(parts, ignore_index=True)
    return together[["kind", "step", "ns", "generation", "path"]]


@per_rank
def compilations(stalls: pd.DataFrame, steady_stalls: pd.DataFrame) -> pd.DataFrame:
    """Return what torch.compile compiled: path (the function), reason, again (1: not for the first time), count, ns.

    Over the whole job; `steady` and `steady_ns` are those of the steady steps. The most expensive first. Reasons that
    differ in their numbers only are one, told as the first was.
    """
    found = stalls
    found = found[(found["kind"] == "compilation").to_numpy()]
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
    together = frame.groupby(["path", alike.rename("alike")]).agg(reason=("reason", "first"), **sums)
    together = together.reset_index("path").sort_values("ns", ascending=False, kind="stable", ignore_index=True)
    return together.head(MOST_COMPILATIONS)


@within_rank
def by_phase(
    steady_stalls: Maybe[pd.DataFrame], light_steps: Maybe[pd.DataFrame], stall_means: Maybe[pd.DataFrame]
) -> dict[tuple[str, str], float]:
    """Return what stalls cost the mean steady step: (kind, phase of the training thread) → ns; empty if not recorded.

    Behind a stall the device goes on with what is queued: on its clock the stalled steps, and those after them, tell
    how much longer the stalls make the mean step. Where that was not recorded, a stall costs as long as it is.
    """
    try:
        stalls = steady_stalls.get()
    except NotMeasured:
        return {}
    stalls = stalls[stalls["kind"].isin(KINDS)]
    n = int(light_steps.get()["steady"].sum())
    felt = _felt_shares(light_steps.get(), stall_means)
    sums: dict[tuple[str, str], float] = {}
    for kind, phase, ns in zip(stalls["kind"], stalls["phase"], stalls["dur_ns"], strict=True):
        sums[kind, phase] = sums.get((kind, phase), 0.0) + felt.get(kind, 1.0) * float(ns) / n
    return sums


def _felt_shares(light_steps: pd.DataFrame, stall_means: Maybe[pd.DataFrame]) -> dict[str, float]:
    """Return for each kind of stall which share of its time the device's steps are longer by; 1 where not listed."""
    if not on_device_clock(light_steps[light_steps["steady"]]):
        return {}
    means = stall_means.get()
    known = means[means["beside_ns"].notna() & (means["mean_ns"] > 0)]
    share = ((known["mean_ns"] + known["beside_ns"]) / known["mean_ns"]).clip(0.0, 1.0)
    return dict(zip(known["kind"], share, strict=True))


def stalled(stalls: Maybe[pd.DataFrame], kind: str) -> iv.Intervals:
    """Return the time in which something of a kind held up the training thread; empty if not recorded."""
    if not stalls:
        return iv.EMPTY
    mine = stalls.get()
    # What stands for many has no place in time.
    mine = mine[(mine["kind"] == kind) & (mine["count"] == 1)]
    start = mine["start_ns"].to_numpy()
    return iv.merge(np.column_stack((start, start + mine["dur_ns"].to_numpy())))
