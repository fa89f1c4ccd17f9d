"""How much of the device's memory PyTorch's allocator took, and how often it had to ask the device again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from dlprof.analysis.engine import Maybe, RankFacts, per_rank
from dlprof.analysis.timeline.steady import ENOUGH, standard_error
from dlprof.errors import NotMeasured

# What travels of the series: enough for any screen.
MOST_ROWS = 500


@per_rank
def memory_use(memory: pd.DataFrame, rank: RankFacts) -> pd.DataFrame:
    """Return one row: peak_allocated_bytes, peak_reserved_bytes, kept_bytes, total_bytes (NaN: unknown), retries, ooms
    and late.

    `kept_bytes` is the least that a step left allocated: parameters, the optimizer's state and what else stays.
    `late` counts the allocations from the device in the second half of the readings, when the allocator's cache should
    serve all. Peaks are since the script last reset them, at any reading. −1: not told.
    """
    frame = _readings(memory)
    device = rank.facts.get("device") or {}
    total = device.get("memory_bytes") if device.get("type") == "cuda" else None
    asked = frame["device_allocs"].to_numpy()
    halfway = asked[len(asked) // 2]
    return pd.DataFrame(
        {
            "peak_allocated_bytes": [int(frame[["peak_allocated_bytes", "allocated_bytes"]].to_numpy().max())],
            "peak_reserved_bytes": [int(frame[["peak_reserved_bytes", "reserved_bytes"]].to_numpy().max())],
            "kept_bytes": [int(frame["allocated_bytes"].min())],
            "total_bytes": [np.nan if total is None else float(total)],
            "retries": [int(frame["retries"].max())],
            "ooms": [int(frame["ooms"].max())],
            "late": [int(asked[-1] - halfway) if halfway >= 0 else -1],
        }
    )


# A leak lifts the floor of what is held, a cache or a buffer only its height, and only once: the readings are cut into
# so many parts of as many steps each, and of so many readings at least, and the least of each part is looked at. Only
# where they would be too few into parts of as many readings: an old job is read less often.
PARTS = 6
_A_PART = 3

# Growing is what goes on: the second half of the readings grows by at least this share of what the first half did.
_GOES_ON = 0.5

# What each step keeps comes evenly: each part grows by at least this share of their mean.
_EACH_PART = 1 / 3

# And by so much of what was held, or the interpreter's own bookkeeping would count.
_VISIBLE = 0.02

_HELD = {"process": ("processes", "anonymous_bytes", "rss_bytes")} | {
    "workers": ("processes", "children_anonymous_bytes", "children_rss_bytes")
}


@per_rank
def memory_growth(
    light_steps: pd.DataFrame, memory: Maybe[pd.DataFrame], samples: Maybe[pd.DataFrame], rank: RankFacts
) -> pd.DataFrame:
    """Return one row for each memory that was read while training was steady: whether, and how fast, it grows.

    Columns: what (device: PyTorch's allocator; process; workers: all its children), metric (of the samples, ""
    for the device), grows (1: the floor rises in each part of the time, and goes on), first_bytes and last_bytes (the
    floor of the first and the last part), per_step (bytes), left_bytes (that the device, or the rank's host, had at
    last; NaN: not read here). Raises NotMeasured where too little was read.
    """
    steps = _untouched(light_steps)
    rows = []
    if memory:
        frame = _within(_readings(memory.get()), steps)
        device = rank.facts.get("device") or {}
        total = device.get("memory_bytes") if device.get("type") == "cuda" else None
        rows.append(_growth("device", "", steps, frame["at_ns"], frame["allocated_bytes"]))
        if rows[-1] is not None:
            rows[-1]["left_bytes"] = np.nan if total is None else total - rows[-1]["last_bytes"]
    if samples:
        read = _within(samples.get(), steps)
        left = read[(read["source"] == "host") & (read["metric"] == "memory_available_bytes")]["value"].tail(_A_PART)
        for what, (source, *metrics) in _HELD.items():
            there = [m for m in metrics if (read["metric"] == m).any()]
            if there:
                mine = read[(read["source"] == source) & (read["metric"] == there[0])]
                if what == "process":
                    mine = _beyond(mine, samples.get())
                row = _growth(what, there[0], steps, mine["at_ns"], mine["value"])
                rows.append(None if row is None else row | {"left_bytes": float(left.min()) if len(left) else np.nan})
    found = [row for row in rows if row is not None]
    if not found:
        raise NotMeasured(f"fewer than {PARTS * _A_PART} readings of memory while training was steady")
    return pd.DataFrame(found)


def _untouched(light_steps: pd.DataFrame) -> pd.DataFrame:
    """Return steps from the first steady one to the last, before or after those that the profiler's memory swells."""
    at = np.flatnonzero(light_steps["steady"].to_numpy())
    profiled = np.flatnonzero(light_steps["profiled"].to_numpy() != 0)
    if not len(at):
        raise NotMeasured("no steady training step was recorded")
    if len(profiled):
        at = max(at[at > profiled[-1]], at[at < profiled[0]], key=len)
    return light_steps.iloc[at[0] : at[-1] + 1] if len(at) else light_steps.iloc[:0]


def _beyond(mine: pd.DataFrame, samples: pd.DataFrame) -> pd.DataFrame:
    """Leave out the first readings, in which a process only fills again what it had held before, as for the profiler.

    An interpreter keeps what it has freed. All of them where it never gets so far, or too few would be left.
    """
    if not len(mine):
        return mine
    same = (samples["source"] == mine["source"].iloc[0]) & (samples["metric"] == mine["metric"].iloc[0])
    before = samples[same & (samples["at_ns"] < mine["at_ns"].iloc[0])]["value"]
    at = np.flatnonzero(mine["value"].to_numpy() >= before.max()) if len(before) else np.empty(0, dtype=np.int64)
    left: pd.DataFrame = mine.iloc[at[0] :] if len(at) and len(mine) - at[0] >= PARTS * _A_PART else mine
    return left


def _within(frame: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    if not len(steps):
        return frame.iloc[:0]
    at, last = frame["at_ns"].to_numpy(), steps.iloc[-1]
    within: pd.DataFrame = frame[(at >= steps["start_ns"].iloc[0]) & (at <= last["start_ns"] + last["dur_ns"])]
    return within


def _growth(
    what: str, metric: str, steps: pd.DataFrame, at_ns: pd.Series[int], bytes_: pd.Series[float]
) -> dict[str, Any] | None:
    """Return a row of memory_growth; None: there are too few readings."""
    if len(at_ns) < PARTS * _A_PART:
        return None
    at, held = np.searchsorted(steps["start_ns"].to_numpy(), at_ns.to_numpy()), bytes_.to_numpy(dtype=float)
    parts = np.split(np.arange(len(at)), np.searchsorted(at, np.linspace(at[0], at[-1], PARTS + 1)[1:-1]))
    if min(map(len, parts)) < _A_PART:
        parts = np.array_split(np.arange(len(at)), PARTS)
    lowest = np.array([part[np.argmin(held[part])] for part in parts])
    floor = held[lowest]
    half = PARTS // 2
    early, late = floor[half] - floor[0], floor[-1] - floor[half - 1]
    rises = bool((np.diff(floor) > _EACH_PART * (floor[-1] - floor[0]) / (PARTS - 1)).all())
    rises = rises and late >= _GOES_ON * early
    grown, passed = float(floor[-1] - floor[0]), int(at[lowest[-1]] - at[lowest[0]])
    return {
        "what": what,
        "metric": metric,
        "grows": int(rises and passed > 0 and grown > _VISIBLE * floor[0]),
        "first_bytes": float(floor[0]),
        "last_bytes": float(floor[-1]),
        "per_step": grown / passed if passed else 0.0,
    }


@per_rank
def retry_cost(memory: pd.DataFrame, light_steps: pd.DataFrame) -> pd.DataFrame:
    """Return one row: what steps cost in which the allocator had to empty its cache and ask again.

    Columns: retries and ooms (failed allocations) while training was steady; readings with a retry since the one before
    and without (two counts of steady steps: retried, plain); ns, what the first last longer, spread over all steady
    steps, and its standard error noise_ns (NaN: none, or too few, are plain).
    """
    readings = _readings(memory)
    steps = light_steps
    steps = steps[steps["steady"]]
    if not len(steps):
        raise NotMeasured("no steady training step was recorded")
    if (readings["retries"] < 0).any():
        raise NotMeasured("this PyTorch does not count what its allocator retries")
    upto = readings["step"].to_numpy()
    more = np.diff(readings["retries"].to_numpy(), prepend=0)
    # A reading is of the step that had just ended, so a step belongs to the first reading that is not before it.
    at = np.searchsorted(upto, steps["step"].to_numpy())
    known = at < len(upto)
    dur = steps["length_ns"].to_numpy()[known]
    retried = more[at[known]] > 0
    within = np.unique(at[known])
    failed = np.diff(readings["ooms"].to_numpy(), prepend=0)
    n, plain = int(retried.sum()), dur[~retried]
    enough = len(plain) >= ENOUGH
    cost = float((dur[retried] - plain.mean()).sum() / len(dur)) if enough else np.nan
    noise = float(np.hypot(standard_error(dur[retried]), standard_error(plain))) * n / len(dur) if enough else np.nan
    return pd.DataFrame(
        {
            "retries": [int(more[within].clip(min=0).sum())],
            "ooms": [int(failed[within].clip(min=0).sum())],
            "retried": [n],
            "plain": [len(plain)],
            "ns": [max(cost, 0.0) if enough else np.nan],
            "noise_ns": [noise],
        }
    )


@per_rank
def memory_series(memory: pd.DataFrame) -> pd.DataFrame:
    """Return the readings in order, thinned: step, allocated_bytes, reserved_bytes."""
    frame = _readings(memory)
    stride = -(-len(frame) // MOST_ROWS)
    thinned: pd.DataFrame = frame[["step", "allocated_bytes", "reserved_bytes"]].iloc[::stride]
    return thinned


def _readings(memory: pd.DataFrame) -> pd.DataFrame:
    if not len(memory):
        raise NotMeasured("the allocator was never asked")
    return memory
