"""Memory grows from step to step, and will not last.

Something keeps what each step makes: losses that are kept with their graphs, outputs in a list, a cache without limit,
samples that a data set collects. No step becomes slower by it, until the memory is used up and the job dies.

Needs samples of a rank's process, its children and the host's memory, or the readings of PyTorch's CUDA allocator.
Memory grows where its floor rises throughout, in the second half still as in the first: what fills does not. In a job
of seconds it counts only where it grows so fast and so evenly that ten times as long would use all of it up. Memory
mapped from files does not count, nor what forked workers copy of their parent's memory as they touch it.

Saving: none. The finding predicts when memory will be used up at this rate. It is reported where that is within two
days, and no more than 48 times as far as it was seen to grow: an allocator that finds no use for freed memory, in
pieces, grows for minutes as well, and then no more.

What to change: keep numbers, not tensors (`loss.item()` every k steps, `loss.detach()`); bound the caches of data sets.
Which lines allocated it, `dlprof wrap --memory` records on a GPU, `tracemalloc` or memray on the host.
"""

from __future__ import annotations

from typing import Any

from dlprof.analysis.engine import Frame, Maybe, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change
from dlprof.analysis.machine.samples import sample_series
from dlprof.analysis.memory.memory import memory_ends, memory_series
from dlprof.analysis.panel import points
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.errors import NotMeasured
from dlprof.result import Panel
from dlprof.units import count, digits, duration, size

HORIZON_S = 48 * 3600  # a choice: about as long as clusters let one job run; what lasts longer will not end this one
FORESEEN = 48  # and no further than this many times what was seen: as two days are predicted from an hour
MOST_POINTS = 200  # enough for any screen

_WHAT = {"device": "PyTorch's memory on the GPU", "process": "the process's memory", "workers": "its workers' memory"}

_CURES = {
    "device": (
        "keep numbers, not tensors: `total += loss.detach()`, or `loss.item()` every k steps; no outputs in lists",
        "`dlprof wrap --memory` records which lines allocated what is held, for pytorch.org/memory_viz",
    ),
    "process": (
        "find what each step appends to (losses with their graph, outputs, logs): keep numbers, not tensors",
        "`tracemalloc`, or memray, shows which lines allocated it",
    ),
    "workers": (
        "bound what the data set or its collate function keeps from sample to sample: each worker has its own copy",
    ),
}


def check(memory_ends: Frame = needs(memory_ends), mean_step_ns: Maybe[float] = maybe(mean_step_ns)) -> Estimate:
    grows = memory_ends[memory_ends["grows"] == 1]
    if not len(grows):
        most = memory_ends.groupby("what", sort=False)["last_bytes"].max()
        held = ", ".join(f"{_WHAT[str(what)]} is {size(n)}" for what, n in most.items() if n)
        return Estimate(scope="risk", summary=f"what is held does not grow: {held}", clear=True)
    if grows["steps"].isna().all():
        raise NotMeasured("memory grows, but how much of it is left was not read")
    first = grows.sort_values("steps", kind="stable").to_dict("records")[0]
    what, seconds = _WHAT[first["what"]], first["steps"] * mean_step_ns.get() / 1e9
    if seconds > HORIZON_S:
        summary = f"{what} grows, and would last for {digits(seconds / 3600)} h"
        return Estimate(scope="risk", summary=summary, clear=True)
    grown = first["last_bytes"] - first["first_bytes"]
    seen = grown / first["per_step"]
    if first["steps"] > FORESEEN * seen:
        raise NotMeasured(
            f"{what} grew by {size(grown)} in {count(round(seen), 'step')}, which may be what its allocator keeps; it"
            f" would last for {_when(seconds)}: record more steps"
        )
    # It costs no time: what counts is which ranks it names.
    return Estimate(scope="risk", by_rank_ns=dict.fromkeys(grows["rank"].tolist(), 1.0), seen=first)


def explain(
    estimate: Estimate,
    mean_step_ns: float = needs(mean_step_ns),
    memory_series: Maybe[Frame] = maybe(memory_series),
    sample_series: Maybe[Frame] = maybe(sample_series),
) -> Explanation:
    row, on_device = estimate.seen, estimate.seen["what"] == "device"
    when = _when(row["steps"] * mean_step_ns / 1e9)
    return Explanation(
        title=f"Memory grows, and is used up in {when}",
        summary=f"On rank {row['rank']} {_WHAT[row['what']]} grew from {size(row['first_bytes'])} to"
        f" {size(row['last_bytes'])}, by {size(row['per_step'])} a step of {duration(mean_step_ns)};"
        f" {size(row['left_bytes'])} are left {'on the GPU' if on_device else 'on the host'}, enough for"
        f" {row['steps']:,.0f} steps.",
        verdict=f"Memory grows from step to step, and is used up in {when}.",
        changes=tuple(map(change, _CURES[row["what"]])),
        evidence=_read((memory_series if on_device else sample_series).get(), row),
        sure="Extrapolated from the steady steps."
        + ("" if on_device else " A container, or a queue's limit, may leave less than the host has."),
    )


def _when(seconds: float) -> str:
    for least, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * least:
            return f"{seconds / least:.{0 if seconds >= 10 * least else 1}f} {unit}"
    return f"{seconds:.0f} s"


def _read(series: Frame, row: dict[Any, Any]) -> Panel:
    """Draw the readings of what grows: the allocator's by step, samples by time."""
    mine = series[series["rank"] == row["rank"]]
    if row["what"] == "device":
        x, held = "step", mine.set_index("step")[["allocated_bytes"]]
    else:
        mine = mine[mine["metric"] == row["metric"]]
        x, held = "time_ns", mine.set_index(mine["at_ns"] - mine["at_ns"].min())[["value"]]
    title = f"{_WHAT[row['what']][0].upper()}{_WHAT[row['what']][1:]}, rank {row['rank']}"
    return Panel("lines", title, points(held.iloc[:: -(-len(held) // MOST_POINTS) or 1]), (x, "held"), unit="bytes")


RULE = Rule("Memory that grows", check, explain)
