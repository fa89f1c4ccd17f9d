"""What makes some steady steps longer than others: recorded stalls (garbage collection, checkpoints, compilation), and
what comes in every n-th step: roll-outs, evaluation, logging, saving on a schedule.

A stall belongs to the step in which it begins, and counts no further than to its end. What comes every n-th step is
part of what training costs, and no noise: its interval is known, and how much longer such steps are. What a recorded
stall or a loader takes of them is not counted there, since others judge that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd
from msgspec import Struct
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis.engine import RANK, Frame, Maybe, RankFacts, maybe, needs, per_rank, within_rank
from dlprof.analysis.timeline.steady import (
    ENOUGH,
    device_type,
    light_steps,
    on_device_clock,
    standard_error,
    steady_steps,
)
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


_NO_STALLS = dict.fromkeys(("mean_ns", "noise_ns", "longest_ns", "every"), 0.0) | dict.fromkeys(
    ("longer_ns", "longer_noise_ns"), np.nan
)


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
        if mine.empty:
            rows.append({"kind": kind, "steps": n, "stalls": 0, **_NO_STALLS})
            continue
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
                "longest_ns": float((mine["dur_ns"] / mine["count"]).max()),
                "every": n / min(n, mine.groupby("step")["count"].max().sum()),
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
    stalls = stalls[stalls["kind"].isin(KINDS)]
    by = stalls.groupby(["kind", "step"])["dur_ns"]
    steps = stalls.assign(ns=by.transform("sum")).drop_duplicates(["kind", "step"])
    longest = steps.sort_values("ns", ascending=False, kind="stable").groupby("kind").head(MOST_STEPS)
    columns = ["kind", "step", "ns", "generation", "path"]
    return longest.sort_values(["kind", "step"], ignore_index=True)[columns]


@per_rank
def saved_bytes(stalls: Frame = needs(schema.STALLS)) -> pd.DataFrame:
    """Return one row: values_bytes of the tensors of all checkpoints, and storage_bytes of what they are parts of.

    No row where no checkpoint was looked at.
    """
    columns = ["values_bytes", "storage_bytes"]
    mine = stalls.loc[(stalls["kind"] == "checkpoint") & (stalls["storage_bytes"] >= 0), columns]
    return mine.sum().to_frame().T if len(mine) else mine


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


PERIODIC = "periodic_work"

# A step is long above this multiple of the median. A pattern has at least so many long steps, as three may be at equal
# distances by chance, and costs at least this share of the mean step.
LEAST_LONGER = 1.25
FEWEST = 4
LEAST_SHARE = 0.005

# At least this share of the steps at the interval is long, and at most this share of the others. The probability that
# this is chance is below the last number (up to 500 intervals are tried).
_ON_TIME, _ELSEWHERE, _CHANCE = 0.8, 0.1, 1e-5

# After so many steps, short steps share a line of the log, so single ones are not known. Several patterns are searched
# for, the costliest first, each among several counts of the longest steps.
_MOST_STEPS = 10_000
_MOST_PATTERNS = 3
_LADDER = 2 ** np.arange(1, 12) + 1

_PHASES = ("forward", "backward", "optimizer")


class Pattern(Struct, frozen=True):
    """Long steps at a fixed interval of a rank; times in ns.

    `every`: one step in so many is long. `steps`: the numbers in the step log of all of them, traced ones too; `seen`
    of them are steady. `extra_ns`: how much longer one is than the others, the mean, and `phases` where: forward,
    backward, optimizer, rest. `cost_ns`: of the mean steady step, with its standard error `noise_ns`. `forwards`: how
    many more forward passes one has. `trains`: it is training itself that is longer then (another network's turn), and
    not something that comes between.
    """

    every: int
    steps: NDArray[np.int64]
    seen: int
    extra_ns: float
    cost_ns: float
    noise_ns: float
    phases: Mapping[str, float]
    forwards: float
    trains: bool


@within_rank
def patterns(
    light_steps: Frame = needs(light_steps),
    steady_stalls: Maybe[Frame] = maybe(steady_stalls),
    rank: RankFacts = needs(RANK),
) -> tuple[Pattern, ...]:
    """Return the patterns of a rank's steady steps, the costliest first; none on a device that has no clock.

    Without its clock, a host that waits for its device now and then shows long steps that are none.
    """
    if not _is_known(light_steps, rank):
        return ()
    trains = light_steps["kind"].isin(("train", "stalled", "suspended")).to_numpy()
    turns = np.where(trains, np.cumsum(trains), -1)
    chosen = np.flatnonzero(light_steps["steady"])[:_MOST_STEPS]
    steps, turn = light_steps.iloc[chosen], turns[chosen]
    stalls = steady_stalls.or_none()
    stalled = 0.0 if stalls is None else stalls.groupby("step")["dur_ns"].sum().reindex(steps["step"]).fillna(0.0)
    waited = np.maximum(steps["fetch_ns"].to_numpy(), 0) + np.asarray(stalled, dtype=float)
    length = np.maximum(steps["length_ns"].to_numpy(dtype=float) - waited, 0.0)
    found: list[Pattern] = []
    left = np.ones(len(steps), dtype=bool)
    while len(found) < _MOST_PATTERNS:
        grid = _costliest(length, turn, left)
        if grid is None:
            break
        every, phase, on = grid
        all_of_it = light_steps["step"].to_numpy()[(turns >= 0) & (turns % every == phase)]
        found.append(_pattern(every, all_of_it, on, left & ~on, length, steps))
        left &= ~on
    return tuple(found)


def _is_known(light_steps: pd.DataFrame, rank: RankFacts) -> bool:
    return device_type(rank) in ("cpu", None) or on_device_clock(light_steps[light_steps["steady"]])


def _costliest(
    length: NDArray[np.float64], turn: NDArray[np.int64], left: NDArray[np.bool_]
) -> tuple[int, int, NDArray[np.bool_]] | None:
    """Return the interval with the most costly long steps, their place in it, and these steps; None: no such one."""
    if left.sum() < 2 * FEWEST:
        return None
    usual = float(np.median(length[left]))
    best: tuple[float, int, int, NDArray[np.bool_]] | None = None
    least = LEAST_SHARE * float(length.sum())
    for every, phase in _candidates(length, turn, left, usual):
        grid = left & (turn % every == phase)
        extra = float(np.median(length[grid])) - usual if grid.sum() >= FEWEST else 0.0
        if extra <= (LEAST_LONGER - 1) * usual:
            continue
        long = left & (length > usual + extra / 2)
        on_time, elsewhere = float(long[grid].mean()), float(long[left & ~grid].mean())
        if on_time < _ON_TIME or elsewhere > _ELSEWHERE or elsewhere ** int(long[grid].sum()) > _CHANCE:
            continue
        cost = extra * float(grid.sum())
        if cost > (best[0] if best else least):
            best = cost, every, phase, grid
    return best and best[1:]


def _candidates(
    length: NDArray[np.float64], turn: NDArray[np.int64], left: NDArray[np.bool_], usual: float
) -> Iterator[tuple[int, int]]:
    """Return intervals at which some of the longest steps come, and the place of these in it."""
    rows = np.flatnonzero(left & (length > LEAST_LONGER * usual))
    longest = rows[np.argsort(-length[rows], kind="stable")]
    seen = set()
    for n in _LADDER:
        at = np.sort(turn[longest[:n]])
        gaps, times = np.unique(np.diff(at), return_counts=True)
        for every in gaps[np.argsort(-times, kind="stable")][:2]:
            if 2 < every <= len(length) / FEWEST:
                places, times = np.unique(at % every, return_counts=True)
                seen.add((int(every), int(places[times.argmax()])))
        if n >= len(longest):
            break
    return iter(sorted(seen))


def _pattern(
    every: int,
    all_of_it: NDArray[np.int64],
    on: NDArray[np.bool_],
    others: NDArray[np.bool_],
    length: NDArray[np.float64],
    steps: pd.DataFrame,
) -> Pattern:
    usual, share = float(length[others].mean()), on.sum() / len(length)
    extra = length[on] - usual
    phases = {p: steps[f"{p}_ns"].clip(lower=0).to_numpy(dtype=float) for p in _PHASES}
    longer = {p: max(float(ns[on].mean() - ns[others].mean()), 0.0) for p, ns in phases.items()}
    mean = max(float(extra.mean()), 0.0)
    inside = sum(longer.values())
    if inside > mean:
        longer = {p: ns * mean / inside for p, ns in longer.items()}
    count = {c: steps[c].to_numpy(dtype=float) for c in ("forwards", "backwards", "optimizer_steps")}
    more = {c: float(n[on].mean() - n[others].mean()) for c, n in count.items()}
    return Pattern(
        every=every,
        steps=all_of_it,
        seen=int(on.sum()),
        extra_ns=mean,
        cost_ns=mean * share,
        noise_ns=standard_error(extra) * share,
        phases=longer | {"rest": mean - sum(longer.values())},
        forwards=more["forwards"],
        trains=more["backwards"] >= 0.5
        or more["optimizer_steps"] >= 0.5
        or longer["backward"] + longer["optimizer"] > mean / 2,
    )


@within_rank
def periodic_phases(patterns: tuple[Pattern, ...] = needs(patterns)) -> dict[str, float]:
    """Return what comes between the steps' own work every n-th step: phase → ns of the mean steady step."""
    found: dict[str, float] = {}
    for one in patterns:
        for phase, ns in one.phases.items() if not one.trains else ():
            found[phase] = found.get(phase, 0.0) + ns * one.cost_ns / max(one.extra_ns, 1.0)
    return found


@per_rank
def periodic(
    patterns: tuple[Pattern, ...] = needs(patterns),
    light_steps: Frame = needs(light_steps),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return a row for each pattern that is not training's: every, steps, extra_ns, cost_ns, noise_ns, forwards, phase.

    `steps`: how many long ones were seen. `phase`: where most of what they take longer is. Raises NotMeasured where
    the steps' length on their device is not known.
    """
    if not _is_known(light_steps, rank):
        raise NotMeasured(
            "the steps' length on the device's clock was not recorded: a host that waits shows long steps"
        )
    rows = [
        {
            "every": one.every,
            "steps": one.seen,
            "extra_ns": one.extra_ns,
            "cost_ns": one.cost_ns,
            "noise_ns": one.noise_ns,
            "forwards": one.forwards,
            "phase": max(one.phases, key=lambda phase: one.phases[phase]),
        }
        for one in patterns
        if not one.trains
    ]
    columns = ["every", "steps", "extra_ns", "cost_ns", "noise_ns", "forwards", "phase"]
    return pd.DataFrame(rows, columns=columns)
