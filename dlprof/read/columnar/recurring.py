"""Finds the steps in a trace: by ranges that name them, else from one run of the optimizer to the next.

A recurring range or loop alone is no step: the layers of a model recur too, and a window may hold nothing else. Without
names, a step needs one run of the optimizer in each, and the same kernels in between.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.read.columnar.rows import Ranges, Rows
from dlprof.units import duration

# dlprof's own ranges, torch's, and what frameworks and people call a step: run_training_batch, iteration 12, step=3.
_CERTAIN = re.compile(r"(?:dlprof::step |ProfilerStep#)(\d{1,18})")
_SURES = ("dlprof::", "Profiler")  # how their names begin, the surest first
_STEP = re.compile(r"(?:^|[\W_])(?:(?:train|training|global|mini)[\W_]*)?(?:step|iter|iteration|batch)(?![a-z])", re.I)
_NO_STEP = re.compile(r"optim|zero_grad|sched|collate|valid|eval|test|micro", re.I)
_OPTIMIZER = re.compile(r"^dlprof::optimizer\b|(?:^|[\W_])optim(?:izer)?(?:[\W_]*step)?(?![a-z])", re.I)
_OPTIMIZER_KERNEL = re.compile(r"multi_tensor_apply|fused_?(?:adam|sgd|lamb)|adam|lamb_?stage|triton_for_fused", re.I)

# Ranges named "step" hold this share of the kernels that were launched, and those without a number cover this share of
# the time, or hold nearly all kernels. (DeepSpeed names its optimizer "step".) A job that starves its device has ranges
# that cover little of the time.
_HOLDS, _COVERS, _HOLDS_ALL = 0.5, 0.5, 0.8
# Between two steps lies a validation if this share of a step's kernels is launched there, more than usually. Without
# kernels: if it is longer than this share of a period, and that is rare.
_OTHER_WORK, _FOLLOWS, _RARE = 0.25, 0.5, 0.1
# If what lies between the ranges takes more than this share of the time, the last step, which lacks it, is left out.
_OPEN = 0.05
# Two steps are alike if they share at least this much of their kernels; so many steps are like the median one.
_ALIKE, _MOSTLY = 0.8, 2 / 3
# Optimizers that take turns. Two runs are apart if between them is this share of what usually is, which is what is not
# so little in comparison with the most.
_MOST_TURNS, _APART, _LITTLE = 3, 0.25, 0.1

CERTAIN, LIKELY = "named by the trace", "likely"


@dataclass(frozen=True)
class Steps:
    """Steps in order: numbers, starts on the host and durations in ns. `way` and `sure`: how they were found."""

    number: NDArray[np.int64]
    start: NDArray[np.int64]
    dur: NDArray[np.int64]
    way: str
    sure: str


@dataclass(frozen=True)
class Launched:
    """The kernels of a process in order of launch: an index into `names`, and the time of the launch in ns."""

    names: list[str]
    name: NDArray[np.int64]
    at: NDArray[np.int64]


def find(ranges: Ranges, launched: Launched) -> Steps | None:
    """Return the steps; None if nothing marks them."""
    return named(ranges, launched) or by_optimizer(ranges, launched)


def traced_steps(
    ranges: Ranges, kernels: Rows, calls: Rows, marks: str, base: int = 0
) -> tuple[pd.DataFrame, dict[str, Any], list[str]]:
    """Return the table of the traced steps, the fact of how they were found, and a warning if none were.

    Without steps, the fact is the loop that recurs, if one does. `marks`: what would mark steps, for the warning.
    `base` is added to times.
    """
    in_order = launched(kernels, calls)
    found = find(ranges, in_order)
    if found is not None:
        return table(found, base), {"steps_by": f"{found.way} ({found.sure})"}, []
    again = loop(in_order)
    return table(None), {"loop": again.fact} if again else {}, [none_found(again, marks)]


def by_optimizer(ranges: Ranges, launched: Launched) -> Steps | None:
    """Return the steps from one run of an optimizer to the next; None if there are none, or they are not alike."""
    for way, start, end in (_optimizer_ranges(ranges), _optimizer_kernels(launched)):
        steps = _between(way, start, end, launched)
        if steps is not None:
            return steps
    return None


def named(ranges: Ranges, launched: Launched) -> Steps | None:
    """Return the steps by named ranges: of the surest family, then the longest in total, then the one with fewest."""
    families: dict[tuple[int, str], list[int]] = {}  # rank (0: surest), name without digits → indices of names
    for place, (name, operator) in enumerate(zip(ranges.names, ranges.operator, strict=True)):
        family = re.sub(r"\d+", "#", name)
        if _CERTAIN.fullmatch(name):
            families.setdefault((_SURES.index(name[:8]), family), []).append(place)
        elif not operator and _STEP.search(name) and not _NO_STEP.search(name):
            families.setdefault((len(_SURES), family), []).append(place)
    best: tuple[tuple[int, float], Steps] | None = None
    for (rank, family), places in families.items():
        rows = np.flatnonzero(np.isin(ranges.name, places))
        for thread in np.unique(ranges.thread[rows]).tolist():
            steps = _family(ranges, rows[ranges.thread[rows] == thread], family, rank, launched)
            if steps is None:
                continue
            worth = (-rank, round(float(steps.dur.sum()), -7) - len(steps.number))
            if best is None or worth > best[0]:
                best = worth, steps
    return best[1] if best else None


def _family(ranges: Ranges, rows: NDArray[np.int64], family: str, rank: int, launched: Launched) -> Steps | None:
    """Return the steps by ranges of one family on one thread; None if they overlap or hold too little."""
    start, end = ranges.start[rows], ranges.end[rows]
    texts = [ranges.names[i] for i in ranges.name[rows].tolist()]
    digits = [re.findall(r"\d{1,18}", text) for text in texts]
    number = np.array([int(d[-1]) if d else -1 for d in digits], dtype=np.int64)
    counted = bool((number >= 0).all() and (np.diff(number) > 0).all())
    if rank == len(_SURES):
        outer = start >= np.append(np.iinfo(np.int64).min, np.maximum.accumulate(end)[:-1])
        passed = int(end[-1] - start[0])
        if len(rows) < 2 or not outer.all() or passed <= 0:
            return None
        covers = (end - start).sum() >= _COVERS * passed
        inside, _ = _launches(start, end, launched)
        within = (launched.at >= start[0]) & (launched.at < end[-1])
        held = float(inside.sum()) / int(within.sum()) if within.any() else float(covers)
        if held < _HOLDS or not (covers or held >= _HOLDS_ALL or (counted and len(rows) > 2)):
            return None
    if not counted:
        number = np.arange(len(rows))
    return _windows(number, start, end, f"{ranges.kind} ranges {family!r}", launched)


def _launches(
    start: NDArray[np.int64], end: NDArray[np.int64], launched: Launched
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return how many kernels were launched in each range, and between it and the next one."""
    at = np.sort(launched.at)
    first, last = np.searchsorted(at, start), np.searchsorted(at, end)
    return last - first, np.append(first[1:], last[-1:]) - last


def _windows(
    number: NDArray[np.int64], start: NDArray[np.int64], end: NDArray[np.int64], way: str, launched: Launched
) -> Steps | None:
    """Return steps from the start of each range to that of the next, but for what is launched between them at times."""
    until = end.copy()
    if len(start) > 1:
        period, gap = float(np.median(np.diff(start))), start[1:] - end[:-1]
        inside, between = _launches(start, end, launched)
        between = between[:-1]
        if len(launched.at):
            usual = float(np.median(between))
            follows = between - usual <= _OTHER_WORK * (float(np.median(inside)) + usual)
        else:
            follows = gap <= _FOLLOWS * period
            if (~follows).sum() > max(_RARE * len(gap), 1):
                follows[:] = True
        until[:-1] = np.where(follows, start[1:], end[:-1])
        if len(start) > 2 and follows.any() and float(gap[follows].mean()) > _OPEN * period:
            number, start, until = number[:-1], start[:-1], until[:-1]
    dur = until - start
    keep = dur > 0
    return Steps(number[keep], start[keep], dur[keep], way, CERTAIN) if keep.any() else None


Bursts = tuple[str, NDArray[np.int64], NDArray[np.int64]]


def _optimizer_ranges(ranges: Ranges) -> Bursts:
    """Return the starts and ends of ranges that name an optimizer, on the thread with most of them."""
    places = [i for i, name in enumerate(ranges.names) if _OPTIMIZER.search(name) and "zero_grad" not in name]
    rows = np.flatnonzero(np.isin(ranges.name, places))
    if len(rows):
        threads, count = np.unique(ranges.thread[rows], return_counts=True)
        rows = rows[ranges.thread[rows] == threads[count.argmax()]]
    return f"the optimizer's {ranges.kind} ranges", ranges.start[rows], ranges.end[rows]


def _optimizer_kernels(launched: Launched) -> Bursts:
    """Return the launch times of an optimizer's kernels."""
    wanted = [bool(_OPTIMIZER_KERNEL.search(name)) for name in launched.names]
    rows = np.flatnonzero(np.array([*wanted, False])[launched.name])
    return "the optimizer's kernels", launched.at[rows], launched.at[rows]


def _between(way: str, start: NDArray[np.int64], end: NDArray[np.int64], launched: Launched) -> Steps | None:
    """Return steps from the end of one run of the optimizer to the end of the next; None if they are not alike.

    What was launched before the first run is a step where it is like the others. Of several optimizers that take turns
    (of a GAN, say), a step has a run of each.
    """
    edges = _last_of_bursts(start, end, launched)
    if len(edges) < 3:  # at least two steps are needed to see that they recur
        return None
    if not len(launched.at):
        kept = np.ones(len(edges) - 1, dtype=bool)
    else:
        edges = np.append(min(int(launched.at.min()), int(edges[0])) - 1, edges)
        for turns in range(1, _MOST_TURNS + 1):
            chosen = edges[::-turns][::-1]
            alike = _alike(chosen, launched)
            if alike.sum() > 1 and alike[1:].mean() >= _MOSTLY:  # the first may be cut off
                break
        else:
            return None
        edges, kept = chosen, alike
    number = np.arange(int(kept.sum()))
    return Steps(number, edges[:-1][kept], np.diff(edges)[kept], f"{way}, with the same work between", LIKELY)


def _last_of_bursts(start: NDArray[np.int64], end: NDArray[np.int64], launched: Launched) -> NDArray[np.int64]:
    """Return the ends of bursts of events, between which kernels are launched; without kernels, time passes."""
    if len(start) < 2:
        return end
    end = np.maximum.accumulate(end)
    at = np.sort(launched.at)
    between = np.searchsorted(at, start[1:]) - np.searchsorted(at, end[:-1], side="right")
    between = between if len(at) else start[1:] - end[:-1]
    large = between[between > between.max() * _LITTLE]
    apart = between > _APART * float(np.median(large)) if len(large) else np.zeros(len(between), dtype=bool)
    last: NDArray[np.int64] = end[np.append(apart, True)]
    return last


def _alike(edges: NDArray[np.int64], launched: Launched) -> NDArray[np.bool_]:
    """Return which steps launched the kernels that the median step did, each as often."""
    step = np.searchsorted(edges, launched.at, side="left") - 1
    inside = (step >= 0) & (step < len(edges) - 1)
    counts = np.zeros((len(edges) - 1, len(launched.names)), dtype=np.int64)
    np.add.at(counts, (step[inside], launched.name[inside]), 1)
    usual = np.median(counts, axis=0)
    same: NDArray[np.bool_] = np.minimum(counts, usual).sum(axis=1) >= _ALIKE * np.maximum(
        counts.sum(axis=1), usual.sum()
    ).clip(1)
    return same


@dataclass(frozen=True)
class Loop:
    """What recurs in a sequence of kernels: how many kernels, how often, and how long a turn takes.

    In ns: `period` the mean turn, `median`, and `noise`, the mean's standard error.
    """

    kernels: int
    often: int
    period: float
    median: float
    noise: float

    @property
    def fact(self) -> dict[str, float]:
        """The loop as a fact of a trace."""
        times = {"period_ns": self.period, "median_ns": self.median, "noise_ns": self.noise}
        return {"kernels": self.kernels, "often": self.often, **times}


def loop(launched: Launched, tried: int = 50) -> Loop | None:
    """Return the recurring loop in a sequence of kernels; None: there is none."""
    name, n = launched.name, len(launched.name)
    count = np.bincount(name, minlength=len(launched.names))
    for code in np.argsort(count, kind="stable")[: len(count)].tolist():
        if count[code] < 3:
            continue
        tried -= 1
        apart, often = np.unique(np.diff(np.flatnonzero(name == code)), return_counts=True)
        length = int(apart[often.argmax()])
        same = name[:-length] == name[length:]
        if 2 <= length <= n // 3 and same.mean() >= _ALIKE:
            turns = np.diff(launched.at[::length])
            median = float(np.median(launched.at[length:] - launched.at[:-length]))
            return Loop(length, n // length, float(turns.mean()), median, float(turns.std() / np.sqrt(len(turns))))
        if tried <= 0:
            break
    return None


def launched(kernels: Rows, calls: Rows) -> Launched:
    """Return the kernels in order of launch; a kernel without a recorded launch counts at its own start."""
    at = kernels.start.copy()
    known = np.flatnonzero(calls.launch >= 0)
    if len(known) and len(at):
        known = known[np.argsort(calls.launch[known], kind="stable")]
        ids = calls.launch[known]
        place = np.minimum(np.searchsorted(ids, kernels.launch), len(ids) - 1)
        linked = ids[place] == kernels.launch
        at = np.where(linked, calls.start[known][place], at)
        if linked.mean() >= 0.9:  # the others were launched before the trace began
            kept = np.flatnonzero(linked)
            order = kept[np.argsort(at[kept], kind="stable")]
            return Launched(kernels.names, kernels.name[order], at[order])
    order = np.argsort(at, kind="stable")
    return Launched(kernels.names, kernels.name[order], at[order])


def table(found: Steps | None, base: int = 0) -> pd.DataFrame:
    """Return the table of traced steps; `base` is added to times."""
    if found is None:
        return schema.empty("traced_steps")
    return pd.DataFrame({"step": found.number, "start_ns": found.start + base, "dur_ns": found.dur})


def none_found(found: Loop | None, marks: str) -> str:
    """Return a warning that no step was found, with any recurring loop, and what `marks` steps."""
    if found is None:
        return f"nothing marks its steps, and no loop recurs in it: the figures are of the whole time ({marks})"
    return (
        f"nothing marks its steps: a loop of {found.kernels:,} kernels recurs {found.often} × in it, every"
        f" {duration(found.median)}, but no optimizer runs there, and the layers of a model recur too: the figures are"
        f" of the whole time ({marks})"
    )
