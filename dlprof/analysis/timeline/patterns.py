"""Steps that are long in every n-th one: roll-outs, evaluation, logging, saving on a schedule.

What comes every n-th step is part of what training costs, and no noise: its interval is known, and how much longer such
steps are. What a stall that was recorded or a loader takes of them is not counted here, since others judge that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis.engine import RANK, Frame, Maybe, RankFacts, maybe, needs, per_rank, within_rank
from dlprof.analysis.timeline.stalls import steady_stalls
from dlprof.analysis.timeline.steady import device_type, light_steps, on_device_clock, standard_error
from dlprof.errors import NotMeasured

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


@dataclass(frozen=True)
class Pattern:
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
