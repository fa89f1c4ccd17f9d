"""One step as a picture: what the training thread and the device did, merged to what a screen can show."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof import intervals as iv
from dlprof.engine import RankData, per_rank
from dlprof.errors import NotMeasured
from dlprof.measures import breakdown, device, host
from dlprof.measures.steps import timing

# Pieces of one category closer than this share of the step are drawn as one.
GRAIN = 1 / 600

# A step so much longer than the middle one is drawn beside it.
SLOW = 1.1

# Workers of a rank's loader that have a lane.
MOST_WORKERS = 4

Row = tuple[str, int, int, str, str]

_PHASES = (
    ("fetch", "input_wait", ("dlprof::fetch", "enumerate(DataLoader)")),
    ("optimizer", "optimizer_host", ("dlprof::optimizer", "Optimizer.step#")),
    ("backward", "host", ("dlprof::backward",)),
    ("forward", "host", ("dlprof::forward", "DistributedDataParallel.forward")),
)


@per_rank
def excerpt(rank: RankData) -> pd.DataFrame:
    """Give two steady traced steps: shown (middle, slowest), lane, step, begin_ns, start_ns, dur_ns, name, category.

    The middle one, not the shortest or longest, and by its place, so that all ranks show the same step; and this
    rank's slowest, where it is another and stands out. Lanes: thread, worker N (of the loader), device (without one:
    work), communication.
    """
    t = timing(rank)
    if not len(t.windows) or t.unit != "step":
        raise NotMeasured("no step was traced")
    lengths = t.windows[:, 1] - t.windows[:, 0]
    middle, slowest = len(t.windows) // 2, int(np.argmax(lengths))
    shown = {"middle": middle}
    if lengths[slowest] >= SLOW * lengths[middle]:
        shown["slowest"] = slowest
    parts = []
    for which, chosen in shown.items():
        begin, end = (int(x) for x in t.windows[chosen])
        rows = [*_on_thread(rank, begin, end), *_in_workers(rank, begin, end), *_working(rank, begin, end)]
        frame = pd.DataFrame(rows, columns=["lane", "start_ns", "dur_ns", "name", "category"])
        step = int(t.numbers[chosen]) if len(t.numbers) else 0
        parts.append(frame.assign(shown=which, step=step, begin_ns=begin))
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
    """Give the batches that the first workers made meanwhile, as far as each was told by itself."""
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


def _working(rank: RankData, begin: int, end: int) -> list[Row]:
    """Give what the device did, without one the training thread: communication beside the rest, hidden or not."""
    on_device = device.has_device(rank)
    work = device.device_work(rank) if on_device else host.on_training_thread(rank)
    first, last = np.searchsorted(work["start_ns"].to_numpy(), (begin, end))
    work = work.iloc[first:last]
    work = work[host.is_kind(work, "op", *device.WORK)]
    parts = dict(breakdown.partition(rank))
    if on_device:
        parts["communication"] = iv.subtract(
            device.device_sets(rank).communication, parts.get("pipeline_bubble", iv.EMPTY)
        )
    rows: list[Row] = []
    for category, lane in (
        ("computation", "device" if on_device else "work"),
        ("copy", "device" if on_device else "work"),
        ("communication", "communication"),
        ("pipeline_bubble", "communication"),
    ):
        pieces = _coarse(iv.clip(parts.get(category, iv.EMPTY), begin, end), end - begin)
        if category == "communication" and on_device:
            names = _longest(work[host.is_kind(work, "communication")], pieces)
        elif lane == "communication":
            names = ["collective" if category == "communication" else "waits for another stage"] * len(pieces)
        else:
            names = _longest(work, pieces)
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


def _longest(spans: pd.DataFrame, pieces: iv.Intervals) -> list[str]:
    """Name the longest span that begins in each piece."""
    start, dur = spans["start_ns"].to_numpy(), spans["dur_ns"].to_numpy()
    code, name = spans["name"].cat.codes.to_numpy(), spans["name"].cat.categories
    names = []
    for s, e in pieces:
        i, j = np.searchsorted(start, s), np.searchsorted(start, e)
        names.append(str(name[code[i + int(np.argmax(dur[i:j]))]])[:200] if j > i else "")
    return names
