"""What more workers, or cheaper batches, would give a run: the recorded batches replayed with them.

What takes longer of making a batch, reading its samples or collating them, bounds what making that cheaper can give:
the same model where it costs nothing, and the other of the two is as it was. Collating computes; what a fetch waits for
storage is its samples'. What one rank waited for another that had no core is gone with what took it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from dlprof.analysis.engine import Maybe
from dlprof.analysis.input.fetch_replay import Forecast, Pace, replayed
from dlprof.analysis.input.loader import gained
from dlprof.analysis.input.paces import Paces
from dlprof.analysis.step.savings import saving_input
from dlprof.errors import NotMeasured

# A replay that does not give back the run as it was, within so much of the step, says nothing of another.
TRUSTED = 0.2

# So many workers a rank are looked at: 16, where fetching only waits, or more where a rank has cores for two of each.
MOST_WORKERS = 16

# Workers are added while a step gets shorter by this share of it: what is proposed is the fewest that come so near to
# the best. A hundredth is below any run's own noise.
WORTH = 0.01

# Ranks that are looked at one by one.
MOST_RANKS = 8


@dataclass(frozen=True)
class Plan:
    """What more workers would give: the worst rank's forecasts, the chosen one of them, and what the run gains, ns."""

    forecasts: tuple[Forecast, ...]
    chosen: Forecast
    gain_ns: float

    @property
    def now(self) -> Forecast:
        """The forecast with as many workers as there are."""
        return self.forecasts[0]


def forecasts(paces: Paces, rank: int, upto: int | None = None) -> tuple[Forecast, ...]:
    """Return the mean step of a rank as it is, then with 1, 2, … workers, as far as more of them may still help.

    Where `upto` is told, only with that number.

    What the model says differs from what was measured is taken off all of them. Raises NotMeasured where that is more
    than TRUSTED of the step, and as `Paces.of` does.
    """
    recorded, measured = paces.of(rank), paces.step_ns(rank)
    now = replayed(recorded, recorded.workers)
    off = now.step_ns - measured
    if abs(off) > TRUSTED * measured:
        raise NotMeasured(f"the recorded batches explain a step of {now.step_ns / 1e6:.1f} ms only")
    if upto is not None:
        return tuple(replace(f, step_ns=f.step_ns - off) for f in (now, replayed(recorded, upto)))
    given = [now]
    best, since = np.inf, 0
    for n in range(1, max(MOST_WORKERS, int(2 * recorded.cores / recorded.ranks), recorded.workers) + 1):
        given.append(now if n == recorded.workers else replayed(recorded, n))
        since = 0 if given[-1].step_ns < best * (1 - WORTH) else since + 1
        best = min(best, given[-1].step_ns)
        # Two that gained nothing may be the two that make one round of an uneven number; three are enough.
        if n > recorded.workers and since >= 3:
            break
    return tuple(replace(f, step_ns=f.step_ns - off) for f in given)


def proposed(given: tuple[Forecast, ...]) -> Forecast:
    """Return the fewest workers that come within WORTH of the best."""
    best = min(f.step_ns for f in given)
    return min((f for f in given if f.step_ns <= best * (1 + WORTH)), key=lambda f: f.workers)


def planned(
    paces: Paces,
    own_time: pd.DataFrame,
    fetch_gains: Maybe[pd.DataFrame],
    wait: Mapping[int, float],
    worst: int,
) -> Plan | None:
    """Choose the workers that the rank which waits most needs, and predict what all ranks gain by them.

    `wait`: each rank's exposed wait for data in the mean steady step, ns. None where the batches were not recorded.
    """
    try:
        given = forecasts(paces, worst)
        chosen = proposed(given)
        freed = {worst: _freed(given, chosen.workers)}
        for rank in sorted((r for r in wait if r != worst and wait[r]), key=lambda r: -wait[r])[: MOST_RANKS - 1]:
            freed[rank] = _freed(forecasts(paces, rank, upto=chosen.workers), chosen.workers)
    except NotMeasured:
        return None
    # Ranks beyond those that were looked at wait less than they, and are taken to be like the worst.
    gone = {r: gained(fetch_gains, r, w, freed.get(r, freed[worst])) for r, w in wait.items()}
    return Plan(given, chosen, saving_input(paces.step_series, own_time, gone))


def step_with_cheaper(paces: Paces, own_time: pd.DataFrame, part: str) -> float:
    """Return the mean step on a CPU if a part of making batches cost nothing, ns; raises as `Paces.of` does.

    Ranks compute what they did, on the cores that fetching leaves them. Where a rank computes not, it is transfer, the
    same for all of them, or waiting for others that had less of the cores: the least that any rank has of it stays.
    """
    waits = own_time.set_index("rank")["wait_ns"]
    recorded = {rank: paces.of(rank) for rank in paces.job.ranks}
    stands = {r: max(float(p.own.mean()) * (1 - p.own_cpu) - float(waits[r]), 0.0) for r, p in recorded.items()}
    stays = min(stands.values())

    def bare(pace: Pace) -> Pace:
        computes = float(pace.own.mean()) * pace.own_cpu
        own = max(computes + stays, 1.0)
        return replace(pace.without(part), own=np.array([own]), own_cpu=computes / own)

    def least(changed: Pace) -> float:
        fetch, workers = float(changed.fetch.mean()), changed.workers
        return max(float(changed.own[0]), fetch / workers) if workers else float(changed.own[0]) + fetch

    slowest = sorted((bare(p) for p in recorded.values()), key=least)[-MOST_RANKS:]
    return max(replayed(changed, changed.workers).step_ns for changed in slowest)


def freed_by_cheaper(paces: Paces, rank: int, part: str) -> float:
    """Return the share of a rank's wait that is gone where a part of making batches costs nothing."""
    recorded = paces.of(rank)
    return _freed_by(recorded, recorded.without(part))


def freed_by_equal_workers(paces: Paces, rank: int, slow: int) -> float:
    """Return the share of a rank's wait that is gone when one worker fetches as the others do."""
    recorded = paces.of(rank)
    by = paces.workers_in_turn(rank)
    others = np.flatnonzero(by != slow)
    # In the place of each fetch of the slow worker stands one of the others', in their order.
    place = np.arange(len(by))
    place[by == slow] = np.resize(others, int((by == slow).sum()))
    return _freed_by(recorded, replace(recorded, fetch=recorded.fetch[place], fetch_cpu=recorded.fetch_cpu[place]))


def _freed_by(recorded: Pace, changed: Pace) -> float:
    now, then = (replayed(p, p.workers) for p in (recorded, changed))
    return min(max((now.step_ns - then.step_ns) / now.wait_ns, 0.0), 1.0) if now.wait_ns else 0.0


def _freed(given: tuple[Forecast, ...], workers: int) -> float:
    """Return share of the wait that is gone with so many workers; what computing is then slower counts against it."""
    then = next((f for f in given[1:] if f.workers == workers), given[0])
    wait = given[0].wait_ns
    return min(max((given[0].step_ns - then.step_ns) / wait, 0.0), 1.0) if wait else 0.0
