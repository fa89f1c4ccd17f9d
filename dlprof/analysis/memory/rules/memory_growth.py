"""Memory grows from step to step, and will not last.

Something keeps what each step makes: losses that are kept with their graphs, outputs in a list, a cache without limit,
samples that a data set collects. No step becomes slower by it, until the memory is used up and the job dies.

Needs what is sampled beside the job of a rank's process, its children and the host's memory, or what PyTorch's CUDA
allocator tells a few times a second. Growing is told from filling: what the least of each part of the time was must
rise throughout, and in the second half still as in the first. Memory that is mapped from files does not count. What
forked workers copy of their parent's memory as they touch it does not show in their own figures.

Saving: none. The finding tells when memory will be used up if it goes on so, and speaks where that is within two days,
and no more than 48 times as far as it was seen to grow: an allocator that finds no use for what was freed, in pieces,
grows for minutes as well, and then no more.

What to change: keep numbers, not tensors (`loss.item()` every k steps, `loss.detach()`); bound the caches of data sets;
`dlprof wrap --memory` records which lines allocated what is held on a GPU, for pytorch.org/memory_viz; on the host
`tracemalloc` or memray tell.
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.engine import Job, Maybe
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change
from dlprof.errors import NotMeasured
from dlprof.result import Panel
from dlprof.units import count, digits, duration, size

# A choice: about as long as clusters let one job run. What lasts longer will not end this job.
HORIZON_S = 48 * 3600

# And no further than this many times what was seen: as two days are told from an hour.
FORESEEN = 48

# Enough for any screen.
MOST_POINTS = 200

_WHAT = {"device": "PyTorch's memory on the GPU", "process": "the process's memory", "workers": "its workers' memory"}

_CURES = {
    "device": (
        "keep numbers, not tensors: `total += loss.detach()`, or `loss.item()` every k steps; no outputs in lists",
        "`dlprof wrap --memory` records which lines allocated what is held, for pytorch.org/memory_viz",
    ),
    "process": (
        "find what each step appends to (losses with their graph, outputs, logs): keep numbers, not tensors",
        "`tracemalloc`, or memray, tells which lines allocated it",
    ),
    "workers": (
        "bound what the data set or its collate function keeps from sample to sample: each worker has its own copy",
    ),
}


def check(
    memory_growth: pd.DataFrame,
    mean_step_ns: Maybe[float],
    memory_series: Maybe[pd.DataFrame],
    sample_series: Maybe[pd.DataFrame],
    job: Job,
) -> Estimate:
    """Estimate when the memory is used up in which something grows."""
    frame = memory_growth
    grows = frame[frame["grows"] == 1]
    if not len(grows):
        return Estimate(scope="risk", summary=f"what is held does not grow: {_held(frame)}")
    rows = {(int(row["rank"]), str(row["what"])): row for row in grows.to_dict("records")}
    left = {key: _left(job, frame, row) for key, row in rows.items()}
    ends = {key: max(n, 0.0) / _together(job, grows, rows[key]) for key, n in left.items() if math.isfinite(n)}
    if not ends:
        raise NotMeasured("memory grows, but how much of it is left was not read")
    key = min(ends, key=lambda k: ends[k])
    row, what, steps = rows[key], _WHAT[key[1]], ends[key]
    seconds = steps * mean_step_ns.get() / 1e9
    if seconds > HORIZON_S:
        return Estimate(scope="risk", summary=f"{what} grows, and would last for {digits(seconds / 3600)} h")
    grown = float(row["last_bytes"] - row["first_bytes"])
    seen = grown / float(row["per_step"])
    if steps > FORESEEN * seen:
        raise NotMeasured(
            f"{what} grew by {size(grown)} in {count(round(seen), 'step')}, which may be what its allocator keeps; it"
            f" would last for {_when(seconds)}: record more steps"
        )
    return Estimate(
        scope="risk",
        # It costs no time: what counts is which ranks it names.
        by_rank_ns=dict.fromkeys((rank for rank, _ in rows), 1.0),
        explain=lambda: _explain(mean_step_ns.get(), memory_series, sample_series, row, left[key], steps),
    )


def _explain(
    mean_step_ns: float,
    memory_series: Maybe[pd.DataFrame],
    sample_series: Maybe[pd.DataFrame],
    row: dict[Any, Any],
    left: float,
    steps: float,
) -> Explanation:
    step, what = mean_step_ns, str(row["what"])
    when = _when(steps * step / 1e9)
    return Explanation(
        title=f"Memory grows, and is used up in {when}",
        summary=f"On rank {row['rank']} {_WHAT[what]} grew from {size(row['first_bytes'])} to"
        f" {size(row['last_bytes'])}, by {size(row['per_step'])} a step of {duration(step)}; {size(left)} are left"
        f" {'on the GPU' if what == 'device' else 'on the host'}, enough for {steps:,.0f} steps.",
        verdict=f"Memory grows from step to step, and is used up in {when}.",
        changes=tuple(map(change, _CURES[what])),
        evidence=_evidence(memory_series, sample_series, int(row["rank"]), row),
        sure="The rate of the steady steps, taken to go on."
        + ("" if what == "device" else " A container, or a queue's limit, may leave less than the host has."),
    )


def _held(frame: pd.DataFrame) -> str:
    most = frame.groupby("what", sort=False)["last_bytes"].max()
    return ", ".join(f"{_WHAT[str(w)]} is {size(float(n))}" for w, n in most.items() if n)


def _left(job: Job, frame: pd.DataFrame, row: dict[Any, Any]) -> float:
    """Return the bytes left to what grows; a host's are read with its first rank."""
    if row["what"] == "device":
        return float(row["left_bytes"])
    return float(frame.loc[_on_host(job, frame, row["rank"]), "left_bytes"].min())


def _together(job: Job, grows: pd.DataFrame, row: dict[Any, Any]) -> float:
    """Return the bytes a step by which all grows that shares the same memory."""
    if row["what"] == "device":
        return float(row["per_step"])
    return float(grows.loc[_on_host(job, grows, row["rank"]), "per_step"].sum())


def _on_host(job: Job, frame: pd.DataFrame, rank: int) -> pd.Series[bool]:
    """Return which rows are of the memory of a rank's host."""
    host = settings.host(job, rank)
    return (frame["what"] != "device") & (frame["rank"].map(lambda r: settings.host(job, r)) == host)


def _when(seconds: float) -> str:
    for least, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * least:
            return f"{seconds / least:.{0 if seconds >= 10 * least else 1}f} {unit}"
    return f"{seconds:.0f} s"


def _evidence(
    memory_series: Maybe[pd.DataFrame], sample_series: Maybe[pd.DataFrame], rank: int, row: dict[Any, Any]
) -> Panel:
    title = f"{_WHAT[row['what']].capitalize()}, rank {rank}".replace("Pytorch", "PyTorch").replace("gpu", "GPU")
    if row["what"] == "device":
        series = memory_series.get()
        mine = series[series["rank"] == rank][["step", "allocated_bytes"]]
        x = "step"
    else:
        series = sample_series.get()
        mine = series[(series["rank"] == rank) & (series["metric"] == row["metric"])][["at_ns", "value"]]
        mine = mine.assign(at_ns=mine["at_ns"] - mine["at_ns"].min())
        x = "time_ns"
    mine = mine.iloc[:: -(-len(mine) // MOST_POINTS) or 1]
    rows = tuple((int(at), float(held)) for at, held in mine.to_numpy())
    return Panel("lines", title, rows, (x, "held"), unit="bytes")


RULE = Rule("memory_growth", "Memory that grows", check)
