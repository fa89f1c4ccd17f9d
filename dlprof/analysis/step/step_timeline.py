"""One step as a picture: what the training thread and the device did, merged to what a screen can show."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Maybe, per_rank, within_rank
from dlprof.analysis.timeline import device, host
from dlprof.analysis.timeline.steps import Timing
from dlprof.errors import NotMeasured
from dlprof.units import short

# Pieces of one category closer than this share of the step are drawn as one.
GRAIN = 1 / 600

# Workers of a rank's loader, and streams of its device, that have a lane.
MOST_WORKERS = 4
MOST_STREAMS = 4

# What a stream may do, and the kinds of spans that are it.
_ROLES = {"computation": ("kernel",), "communication": ("communication",), "copies": ("copy", "set")}

# What stands before the name of every function of the backward pass.
_EVALUATES = "autograd::engine::evaluate_function: "

Row = tuple[str, int, int, str, str]

_PHASES = (
    ("fetch", "input_wait", ("dlprof::fetch", "enumerate(DataLoader)")),
    ("optimizer", "optimizer_host", ("dlprof::optimizer", "Optimizer.step#")),
    ("backward", "host", ("dlprof::backward",)),
    ("forward", "host", ("dlprof::forward", "DistributedDataParallel.forward")),
)


@per_rank
def excerpt(
    timing: Timing,
    in_phases: Maybe[list[iv.Intervals]],
    device_work: Maybe[pd.DataFrame],
    partition: Maybe[dict[str, iv.Intervals]],
    has_device: bool,
    on_training_thread: Maybe[pd.DataFrame],
    fetches: Maybe[pd.DataFrame],
) -> pd.DataFrame:
    """Return two steady traced steps: shown (middle, slowest), lane, step, step_ns, begin_ns, start_ns, dur_ns, name,
    category.

    The middle one, not the shortest or longest, and by its place, so that all ranks show the same step; and this
    rank's slowest, where that is longer. Lanes: thread; of a device's streams `computation 7`,
    `communication 20`, `copies 22`, by what each does most; without a device work and communication; worker N.
    """
    if not len(timing.windows) or timing.unit != "step":
        raise NotMeasured("no step was traced")
    lengths = timing.windows[:, 1] - timing.windows[:, 0]
    middle, slowest = len(timing.windows) // 2, int(np.argmax(lengths))
    shown = {"middle": middle}
    if lengths[slowest] > lengths[middle]:
        shown["slowest"] = slowest
    parts = []
    for which, chosen in shown.items():
        begin, end = (int(x) for x in timing.windows[chosen])
        rows = _on_thread(in_phases.get(), begin, end)
        rows += (
            _on_streams(device_work.get(), partition.get(), begin, end)
            if has_device
            else _working(on_training_thread.get(), partition.get(), begin, end)
        )
        rows += _in_workers(fetches, begin, end)
        frame = pd.DataFrame(rows, columns=["lane", "start_ns", "dur_ns", "name", "category"])
        step = int(timing.numbers[chosen]) if len(timing.numbers) else 0
        parts.append(frame.assign(shown=which, step=step, step_ns=end - begin, begin_ns=begin))
    return pd.concat(parts, ignore_index=True)


def _on_thread(in_phases: list[iv.Intervals], begin: int, end: int) -> list[Row]:
    rows: list[Row] = []
    left = np.array([[begin, end]], dtype=np.int64)
    for (name, category, _), cover in zip(_PHASES, in_phases, strict=True):
        got = iv.intersect(left, iv.clip(cover, begin, end))
        left = iv.subtract(left, got)
        rows += [("thread", int(s), int(e - s), name, category) for s, e in _coarse(got, end - begin)]
    return rows


@within_rank
def in_phases(on_training_thread: pd.DataFrame) -> list[iv.Intervals]:
    """Return when the training thread is in each of the phases that are drawn."""
    return [host.cover(on_training_thread, host.is_named(on_training_thread, *ranges)) for _, _, ranges in _PHASES]


def _in_workers(fetches: Maybe[pd.DataFrame], begin: int, end: int) -> list[Row]:
    """Return the batches that the first workers made meanwhile, as far as each was told by itself."""
    if not fetches:
        return []
    fetched = fetches.get()
    start, dur = fetched["start_ns"].to_numpy(), fetched["dur_ns"].to_numpy()
    single = (fetched["count"] == 1).to_numpy() & (dur >= 0) & fetched["worker"].between(0, MOST_WORKERS - 1).to_numpy()
    mine = fetched[single & (start < end) & (start + dur > begin)]
    return [
        (f"worker {worker}", int(max(s, begin)), int(min(s + d, end) - max(s, begin)), "makes a batch", "worker")
        for worker, s, d in zip(mine["worker"], mine["start_ns"], mine["dur_ns"], strict=True)
    ]


def _on_streams(device_work: pd.DataFrame, partition: dict[str, iv.Intervals], begin: int, end: int) -> list[Row]:
    """Return what each of the busiest streams ran, hidden or not: those that compute first, those that copy last."""
    start, dur = device_work["start_ns"].to_numpy(), device_work["dur_ns"].to_numpy()
    # What ran when the step began has a name, too.
    shown = np.flatnonzero((start < end) & (start + dur > begin))
    late, over = np.maximum(start[shown], begin), (start + dur)[shown]
    has_role = {role: host.is_kind(device_work, *kinds)[shown] for role, kinds in _ROLES.items()}
    called = device_work["name"].cat
    names, known = called.codes.to_numpy()[shown], called.categories
    bubble = partition.get("pipeline_bubble", iv.EMPTY)
    streams = []
    lanes = device_work["lane"].cat.codes.to_numpy()[shown]
    for code in np.unique(lanes):
        mine = {role: np.flatnonzero(has & (lanes == code)) for role, has in has_role.items()}
        spans = {role: _Named(late[at], over[at] - late[at], names[at], known) for role, at in mine.items()}
        ran = {role: iv.clip(iv.union(late[at], over[at]), begin, end) for role, at in mine.items()}
        busy = {role: iv.total(pieces) for role, pieces in ran.items()}
        role = max(busy, key=lambda role: busy[role])
        name = str(device_work["lane"].cat.categories[code]).removeprefix("device").removeprefix(":")
        streams.append((list(_ROLES).index(role), -sum(busy.values()), f"{role} {name}", spans, ran))
    rows: list[Row] = []
    busiest = sorted(streams, key=lambda stream: stream[1])[:MOST_STREAMS]
    for _, _, lane, spans, ran in sorted(busiest, key=lambda stream: stream[:3]):
        for role, category, cover in (
            ("computation", "computation", ran["computation"]),
            ("communication", "communication", iv.subtract(ran["communication"], bubble)),
            ("communication", "pipeline_bubble", iv.intersect(ran["communication"], bubble)),
            ("copies", "copy", ran["copies"]),
        ):
            pieces = _coarse(cover, end - begin)
            longest = _longest(spans[role], pieces)
            rows += [(lane, int(s), int(e - s), n, category) for (s, e), n in zip(pieces, longest, strict=True)]
    return rows


def _working(on_training_thread: pd.DataFrame, partition: dict[str, iv.Intervals], begin: int, end: int) -> list[Row]:
    """Return what the training thread computes, and beside it the communication that nothing hides."""
    work = on_training_thread
    first, last = np.searchsorted(work["start_ns"].to_numpy(), (begin, end))
    work = work.iloc[first:last]
    work = work[host.is_kind(work, "op", *device.WORK)]
    name = work["name"].cat
    named = _Named(work["start_ns"].to_numpy(), work["dur_ns"].to_numpy(), name.codes.to_numpy(), name.categories)
    rows: list[Row] = []
    for category, lane, called in (
        ("computation", "work", ""),
        ("communication", "communication", "collective"),
        ("pipeline_bubble", "communication", "waits for another stage"),
    ):
        pieces = _coarse(iv.clip(partition.get(category, iv.EMPTY), begin, end), end - begin)
        names = [called] * len(pieces) if called else _longest(named, pieces)
        rows += [(lane, int(s), int(e - s), n, category) for (s, e), n in zip(pieces, names, strict=True)]
    return rows


def _coarse(a: iv.Intervals, length: int) -> iv.Intervals:
    """Merge pieces that lie closer than the grain, and drop those shorter than a quarter of it."""
    if not len(a):
        return a
    grain = max(int(length * GRAIN), 1)
    merged = iv.union(a[:, 0], a[:, 1] + grain)
    merged = np.column_stack((merged[:, 0], merged[:, 1] - grain))
    return merged[(merged[:, 1] - merged[:, 0]) * 4 >= grain]


class _Named(NamedTuple):
    """Spans in order of their start, and the name of each by its number among all names."""

    start: NDArray[np.int64]
    dur: NDArray[np.int64]
    code: NDArray[np.integer[Any]]
    names: pd.Index[str]


def _longest(spans: _Named, pieces: iv.Intervals) -> list[str]:
    """Name the longest span that begins in each piece, and say how many more do."""
    start, dur, code, name = spans
    names = []
    for i, j in np.searchsorted(start, pieces).tolist():
        longest = str(name[code[i + int(np.argmax(dur[i:j]))]]).removeprefix(_EVALUATES) if j > i else ""
        names.append(short(longest, 200) + (f" and {j - i - 1:,} more" if j > i + 1 else ""))
    return names
