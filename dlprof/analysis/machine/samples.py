"""What was sampled beside the ranks: as it went over the run, and its means while training was steady."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis.engine import Maybe, RankFacts, per_rank
from dlprof.analysis.timeline.steady import standard_error, suspended
from dlprof.errors import NotMeasured

# What only grows → its rate: CPU seconds a second are cores, joules a second are watts, and the time that clocks were
# held down, or a thread waited for a core, is a share.
_RATES: Mapping[str, tuple[str, float]] = {
    "cpu_s": ("cpu_cores", 1),
    "children_cpu_s": ("children_cpu_cores", 1),
    "main_thread_waited_ns": ("main_thread_waited_share", 1e-9),
    "energy_j": ("mean_power_w", 1),
    **{
        f"{name}_switches": (f"{name}_switches_per_s", 1)
        for name in ("voluntary", "involuntary", "children_voluntary", "children_involuntary")
    },
    **{
        f"{name}_bytes": (f"{name}_bytes_per_s", 1)
        for name in (
            "swap_in",
            "swap_out",
            "disk_read",
            "disk_written",
            "network_received",
            "network_sent",
            "nvlink_received",
            "nvlink_sent",
            "pcie_received",
            "pcie_sent",
        )
    },
    **{f"{name}_ns": (f"{name}_share", 1e-9) for name in ("clocks_held_by_power", "clocks_held_by_heat")},
    "page_faults": ("page_faults_per_s", 1),
    "major_page_faults": ("major_page_faults_per_s", 1),
}

# What travels of each metric: enough for any screen.
MOST_POINTS = 300

# A mean of fewer readings than this says nothing.
ENOUGH = 3

# A reading speaks of no longer than so many times what usually lies between two.
MOST_SPAN = 5

# The share of the time in which the kernel had a rank's main thread wait for a core.
WAITED = "main_thread_waited_share"

# Every host runs something of its own: so much of the cores in use.
LITTLE = 0.1


@per_rank
def sample_series(samples: pd.DataFrame) -> pd.DataFrame:
    """Return the readings in order, thinned to means, what only grows as rates: source, metric, at_ns, value.

    Raises NotMeasured where nothing was sampled.
    """
    parts = []
    for (source, metric), frame in _metrics(samples):
        at, value, _ = _rated(metric, frame)
        if len(at):
            first = np.arange(0, len(at), -(-len(at) // MOST_POINTS))
            many = np.diff(np.append(first, len(at)))
            # Less the first reading: sums of times since 1970 would not fit.
            parts.append(
                pd.DataFrame(
                    {
                        "source": source,
                        "metric": _rate_of(metric),
                        "at_ns": at[0] + np.add.reduceat(at - at[0], first) // many,
                        "value": np.add.reduceat(value, first) / many,
                    }
                )
            )
    if not parts:
        raise NotMeasured("the job was too short for two readings")
    return pd.concat(parts, ignore_index=True)


@per_rank
def sample_means(
    steps: Maybe[pd.DataFrame], light_steps: Maybe[pd.DataFrame], samples: pd.DataFrame, rank: RankFacts
) -> pd.DataFrame:
    """Return each metric while training was steady, what only grows as rates.

    Columns: source, metric, mean, its standard error noise, largest, readings.

    Raises NotMeasured where nothing was sampled, or too little of the steady steps.
    """
    begin, end = _steady(steps, light_steps)
    rows = []
    for (source, metric), frame in _metrics(samples):
        at = frame["at_ns"].to_numpy()
        at, value, span = _rated(metric, frame[(at >= begin) & (at <= end)])
        # What tells of the time since the reading before it tells of the time in which the job stood.
        keep = ~suspended(rank, np.append(at[:1], at[:-1]), at)
        at, value, span = at[keep], value[keep], span[keep]
        if len(at) >= ENOUGH:
            rows.append(
                {
                    "source": source,
                    "metric": _rate_of(metric),
                    "mean": float(np.average(value, weights=span)),
                    "noise": standard_error(value),
                    "largest": float(value.max()),
                    "readings": len(at),
                }
            )
    if not rows:
        raise NotMeasured(f"fewer than {ENOUGH} readings while training was steady")
    return pd.DataFrame(rows)


def held(samples: pd.DataFrame, begin: int, end: int) -> pd.DataFrame:
    """Return what was sampled of a stretch of time, what only grows as rates: source, metric, at_ns, value.

    Each value holds from `at_ns` to the next; the one that holds when the stretch begins stands at its beginning, but
    for one that was read long before.
    """
    parts = []
    for (source, metric), frame in _metrics(samples):
        at, value, span = _rated(metric, frame)
        # What grows is known when it is read, and speaks of the time before.
        since = at - (span * 1e9).astype(np.int64) if metric in _RATES else at
        usual = float(np.median(np.diff(at))) if len(at) > 1 else 0.0
        recent = int(np.searchsorted(since, begin - 2 * usual))
        first = max(int(np.searchsorted(since, begin, side="right")) - 1, recent)
        chosen = slice(first, int(np.searchsorted(since, end)))
        parts.append(
            pd.DataFrame(
                {
                    "source": source,
                    "metric": _rate_of(metric),
                    "at_ns": np.maximum(since[chosen], begin),
                    "value": value[chosen],
                }
            )
        )
    if not parts:
        raise NotMeasured("nothing was sampled")
    return pd.concat(parts, ignore_index=True)


def _metrics(samples: pd.DataFrame) -> list[tuple[tuple[str, str], pd.DataFrame]]:
    groups = samples.groupby(["source", "metric"], observed=True, sort=True)
    metrics = [((str(source), str(metric)), frame) for (source, metric), frame in groups]
    told = {name for name, _ in metrics}
    # A GPU may tell a rate and what has gone over its links since it began: the rate is its own.
    return [((s, m), frame) for (s, m), frame in metrics if m not in _RATES or (s, _RATES[m][0]) not in told]


def _rate_of(metric: str) -> str:
    return _RATES[metric][0] if metric in _RATES else metric


def _rated(metric: str, frame: pd.DataFrame) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Return when a metric was read, what it was, and the seconds that it speaks of; of what grows, between readings.

    Any other speaks of the time since the reading before it: in a long job readings become rarer. But where one was
    missed, not of all that time.
    """
    at, value = frame["at_ns"].to_numpy(), frame["value"].to_numpy()
    if metric not in _RATES:
        gap = np.diff(at) / 1e9
        gap = gap[gap > 0]
        usual = float(np.median(gap)) if len(gap) else 1.0
        since = np.diff(at, prepend=at[:1]) / 1e9
        return at, value, np.clip(np.where(since > 0, since, usual), None, MOST_SPAN * usual)
    span = np.diff(at) / 1e9
    grown = np.diff(value) * _RATES[metric][1]
    # What begins again at 0, or was read by another process since, says nothing of the time between.
    sound = (span > 0) & (grown >= 0)
    return at[1:][sound], (grown[sound] / span[sound]), span[sound]


def _steady(steps: Maybe[pd.DataFrame], light_steps: Maybe[pd.DataFrame]) -> tuple[int, int]:
    """Return when the first steady step began and the last one ended."""
    if not steps:
        raise NotMeasured("no record of every step")
    marked = light_steps.get()
    marked = marked[marked["steady"]]
    if not len(marked):
        raise NotMeasured("no steady training step was recorded")
    return int(marked["start_ns"].min()), int((marked["start_ns"] + marked["dur_ns"]).max())


def outside(means: pd.DataFrame) -> float:
    """Return what share of the cores in use programs outside the job have; 0 where it is little, or not known."""
    sums = means.groupby(["source", "metric"])["mean"].sum()
    ours = sum(float(sums.get(("processes", metric), 0.0)) for metric in ("cpu_cores", "children_cpu_cores"))
    used = float(sums.get(("host", "cpu_cores"), 0.0))
    return share if used > 0 and (share := 1 - ours / used) >= LITTLE else 0.0
