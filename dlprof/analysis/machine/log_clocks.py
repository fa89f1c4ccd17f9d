"""Whose clock the times of a GPU log are of: which of them lie on the run's, and by how much the others are moved."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import NamedTuple

import numpy as np
import pandas as pd

from dlprof import schema
from dlprof.analysis.engine import RANK, Frame, Maybe, RankFacts, maybe, needs, within_rank
from dlprof.analysis.timeline.steady import light_steps

# How the source of each tool's log begins, and which of its options brings a metric.
OPTIONS: dict[str, dict[str, str]] = {
    "nvidia-smi": {
        "busy_share": "--query-gpu=utilization.gpu",
        "power_w": "--query-gpu=power.draw,enforced.power.limit,power.default_limit",
        "memory_used_bytes": "--query-gpu=memory.used,memory.total",
        "sm_clock_mhz": "--query-gpu=clocks.sm,clocks.max.sm",
        "clock_reasons_bits": "--query-gpu=clocks_event_reasons.active",
    },
    "amd-smi": {
        "busy_share": "amd-smi metric --usage",
        "power_w": "amd-smi metric --power",
        "memory_used_bytes": "amd-smi metric --mem-usage",
        "sm_clock_mhz": "amd-smi metric --clock",
    },
    "rocm-smi": {
        "busy_share": "rocm-smi --showuse",
        "power_w": "rocm-smi --showpower",
        "memory_used_bytes": "rocm-smi --showmeminfo vram",
        "sm_clock_mhz": "rocm-smi --showclocks",
    },
}

_SECOND = 1_000_000_000
_DAY = 86_400 * _SECOND
_QUARTER, _HOUR = 900 * _SECOND, 3600 * _SECOND
_ZONES = 14  # hours that a clock is ahead of UTC, or behind it, at most

# Times since 1970 are larger than this, times since a start or of a trace without a base are smaller.
_UNIX = 10**18

# A log belongs to a run where it covers this share of the shorter one of the two.
_COVERS = 0.5


class Clock(NamedTuple):
    """What is known of a log's clock.

    `shift_ns` moves its times to Unix time. `how`: "zone" (the log says it), "fitted" (the one zone in which it lies
    where the run does), "machine" (taken for this machine's zone), "none" (it has no times).
    """

    shift_ns: int
    how: str
    words: str = ""


@within_rank
def run_span(
    light_steps: Maybe[Frame] = maybe(light_steps), spans: Maybe[Frame] = maybe(schema.SPANS)
) -> tuple[int, int]:
    """Return when the rank's steps, else its trace, began and ended, Unix ns; (0, 0) where that is not known."""
    steps, traced = light_steps.or_none(), spans.or_none()
    frame = steps if steps is not None and len(steps) else traced
    if frame is None or not len(frame):
        return 0, 0
    begin, end = int(frame["start_ns"].min()), int((frame["start_ns"] + frame["dur_ns"]).max())
    return (begin, end) if begin > _UNIX else (0, 0)


@within_rank
def log_clocks(
    samples: Frame = needs(schema.SAMPLES), run_span: tuple[int, int] = needs(run_span), rank: RankFacts = needs(RANK)
) -> dict[str, Clock]:
    """Return the clock of each source of the samples that is of another tool's log."""
    found: dict[str, Clock] = {}
    for name, facts in rank.trace_facts.items():
        if not name.startswith("log ") or not isinstance(facts, dict):
            continue
        mine = samples.loc[samples["source"].isin(facts["sources"]), "at_ns"]
        if len(mine):
            clock = _clock(str(facts["times"]), int(mine.min()), int(mine.max()), run_span)
            found |= dict.fromkeys(facts["sources"], clock)
    return found


def _clock(times: str, begin: int, end: int, run: tuple[int, int]) -> Clock:
    if times == "none":
        return Clock(0, "none", "it has no times")
    if times == "zone":
        return Clock(0, "zone")
    days = 0
    if times == "day":
        if not run[0]:
            return Clock(0, "none", "its times have no date")
        days = run[0] // _DAY * _DAY
    else:
        here = -_offset(begin)
        if _covers(begin + here, end + here, run) or not run[0]:
            return Clock(here, "machine", "its times have no zone, and are taken for this machine's")
    zones = [
        day + n * _QUARTER for n in range(-_ZONES * 4, _ZONES * 4 + 1) for day in ((-_DAY, 0, _DAY) if days else (0,))
    ]
    fits = [zone for zone in zones if _covers(begin + days + zone, end + days + zone, run)]
    whole = [zone for zone in fits if zone % _HOUR == 0] or fits
    if len(whole) == 1:
        return Clock(
            days + whole[0], "fitted", f"its times have no zone: {_named(-whole[0])} is where it lies with the run"
        )
    if days:
        return Clock(0, "none", "its times have no date, and fit the run in several zones or in none")
    return Clock(-_offset(begin), "machine", "its times have no zone, and do not lie with the run's in this machine's")


def _covers(begin: int, end: int, run: tuple[int, int]) -> bool:
    both = min(end, run[1]) - max(begin, run[0])
    return both >= _COVERS * max(min(end - begin, run[1] - run[0]), 1)


def _offset(at: int) -> int:
    """Return by how many ns this machine's clock is ahead of UTC at a time of its own."""
    local = datetime.fromtimestamp(at // _SECOND, timezone.utc).replace(tzinfo=None).astimezone()
    offset = local.utcoffset()
    return 0 if offset is None else int(offset.total_seconds()) * _SECOND


def _named(zone: int) -> str:
    minutes = abs(zone % _DAY - (_DAY if zone % _DAY > _DAY // 2 else 0)) // (60 * _SECOND)
    sign = "−" if zone % _DAY > _DAY // 2 else "+"
    return f"UTC{sign}{minutes // 60}" + (f":{minutes % 60:02d}" if minutes % 60 else "")


@within_rank
def placed_samples(
    samples: Frame = needs(schema.SAMPLES), log_clocks: dict[str, Clock] = needs(log_clocks)
) -> pd.DataFrame:
    """Return the table "samples" with the times of logs moved to Unix time; what has no times stays as it is."""
    moved = {source: clock.shift_ns for source, clock in log_clocks.items() if clock.shift_ns}
    if not moved:
        return samples
    shift = samples["source"].astype(str).map(moved).fillna(0).to_numpy().astype(np.int64)
    return samples.assign(at_ns=samples["at_ns"] + shift)
