"""One step as a picture: what the training thread and the device did, merged to what a screen can show."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import intervals as iv
from dlprof.engine import RankData, per_rank
from dlprof.errors import NotMeasured
from dlprof.measures import breakdown
from dlprof.timeline import device, host
from dlprof.timeline.steps import timing
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
def excerpt(rank: RankData) -> pd.DataFrame:
    """Return two steady traced steps: shown (middle, slowest), lane, step, step_ns, begin_ns, start_ns, dur_ns, name,
    category.

    The middle one, not the shortest or longest, and by its place, so that all ranks show the same step; and this
    rank's slowest, where that is longer. Lanes: thread; of a device's streams `computation 7`,
    `communication 20`, `copies 22`, by what each does most; without a device work and communication; worker N.
    """
    t = timing(rank)
    if not len(t.windows) or t.unit != "step":
        raise NotMeasured("no step was traced")
    lengths = t.windows[:, 1] - t.windows[:, 0]
    middle, slowest = len(t.windows) // 2, int(np.argmax(lengths))
    shown = {"middle": middle}
    if lengths[slowest] > lengths[middle]:
        shown["slowest"] = slowest
    parts = []
    for which, chosen in shown.items():
        begin, end = (int(x) for x in t.windows[chosen])
        working = _on_streams if device.has_device(rank) else _working
        rows = [*_on_thread(rank, begin, end), *working(rank, begin, end), *_in_workers(rank, begin, end)]
        frame = pd.DataFrame(rows, columns=["lane", "start_ns", "dur_ns", "name", "category"])
        step = int(t.numbers[chosen]) if len(t.numbers) else 0
        parts.append(frame.assign(shown=which, step=step, step_ns=end - begin, begin_ns=begin))
    return pd.concat(parts, ignore_index=True)


def _on_thread(rank: RankData, begin: int, end: int) -> list[Row]:
    rows: list[Row] = []
    left = np.array([[begin, end]], dtype=np.int64)
    for (name, category, _), cover in zip(_PHASES, rank.once(_phases), strict=True):
        got = iv.intersect(left, iv.clip(cover, begin, end))
        left = iv.subtract(left, got)
        rows += [("thread", int(s), int(e - s), name, category) for s, e in _coarse(got, end - begin)]
    return rows


def _phases(rank: RankData) -> list[iv.Intervals]:
    thread = host.on_training_thread(rank)
    return [host.cover(thread, host.is_named(thread, *ranges)) for _, _, ranges in _PHASES]


def _in_workers(rank: RankData, begin: int, end: int) -> list[Row]:
    """Return the batches that the first workers made meanwhile, as far as each was told by itself."""
    if not rank.has("fetches"):
        return []
    fetches = rank.table("fetches")
    start, dur = fetches["start_ns"].to_numpy(), fetches["dur_ns"].to_numpy()
    single = (fetches["count"] == 1).to_numpy() & (dur >= 0) & fetches["worker"].between(0, MOST_WORKERS - 1).to_numpy()
    mine = fetches[single & (start < end) & (start + dur > begin)]
    return [
        (f"worker {worker}", int(max(s, begin)), int(min(s + d, end) - max(s, begin)), "makes a batch", "worker")
        for worker, s, d in zip(mine["worker"], mine["start_ns"], mine["dur_ns"], strict=True)
    ]


def _on_streams(rank: RankData, begin: int, end: int) -> list[Row]:
    """Return what each of the busiest streams ran, hidden or not: those that compute first, those that copy last."""
    work = device.device_work(rank)
    start, dur = work["start_ns"].to_numpy(), work["dur_ns"].to_numpy()
    # What ran when the step began has a name, too.
    shown = np.flatnonzero((start < end) & (start + dur > begin))
    late, over = np.maximum(start[shown], begin), (start + dur)[shown]
    has_role = {role: host.is_kind(work, *kinds)[shown] for role, kinds in _ROLES.items()}
    called = work["name"].cat
    names, known = called.codes.to_numpy()[shown], called.categories
    bubble = breakdown.partition(rank).get("pipeline_bubble", iv.EMPTY)
    streams = []
    lanes = work["lane"].cat.codes.to_numpy()[shown]
    for code in np.unique(lanes):
        mine = {role: np.flatnonzero(has & (lanes == code)) for role, has in has_role.items()}
        spans = {role: _Named(late[at], over[at] - late[at], names[at], known) for role, at in mine.items()}
        ran = {role: iv.clip(iv.union(late[at], over[at]), begin, end) for role, at in mine.items()}
        busy = {role: iv.total(pieces) for role, pieces in ran.items()}
        role = max(busy, key=lambda role: busy[role])
        name = str(work["lane"].cat.categories[code]).removeprefix("device").removeprefix(":")
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


def _working(rank: RankData, begin: int, end: int) -> list[Row]:
    """Return what the training thread computes, and beside it the communication that nothing hides."""
    work = host.on_training_thread(rank)
    first, last = np.searchsorted(work["start_ns"].to_numpy(), (begin, end))
    work = work.iloc[first:last]
    work = work[host.is_kind(work, "op", *device.WORK)]
    name = work["name"].cat
    named = _Named(work["start_ns"].to_numpy(), work["dur_ns"].to_numpy(), name.codes.to_numpy(), name.categories)
    parts = breakdown.partition(rank)
    rows: list[Row] = []
    for category, lane, called in (
        ("computation", "work", ""),
        ("communication", "communication", "collective"),
        ("pipeline_bubble", "communication", "waits for another stage"),
    ):
        pieces = _coarse(iv.clip(parts.get(category, iv.EMPTY), begin, end), end - begin)
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
