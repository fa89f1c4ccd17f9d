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

_PHASES = (
    ("fetch", "input_wait", ("dlprof::fetch", "enumerate(DataLoader)")),
    ("optimizer", "optimizer_host", ("dlprof::optimizer", "Optimizer.step#")),
    ("backward", "host", ("dlprof::backward",)),
    ("forward", "host", ("dlprof::forward", "DistributedDataParallel.forward")),
)


@per_rank
def excerpt(rank: RankData) -> pd.DataFrame:
    """Give the middle one of the steady traced steps: lane (thread, device), step, start_ns, dur_ns, name, category.

    The middle one, not the shortest or longest, and by its place, so that all ranks show the same step.
    """
    t = timing(rank)
    if not len(t.windows) or t.unit != "step":
        raise NotMeasured("no step was traced")
    chosen = len(t.windows) // 2
    begin, end = (int(x) for x in t.windows[chosen])
    step = int(t.numbers[chosen]) if len(t.numbers) else 0
    thread = host.on_training_thread(rank)
    rows: list[tuple[str, int, int, str, str]] = []
    left = np.array([[begin, end]], dtype=np.int64)
    for name, category, ranges in _PHASES:
        got = iv.intersect(left, host.cover(thread, host.is_named(thread, *ranges)))
        left = iv.subtract(left, got)
        rows += [("thread", int(s), int(e - s), name, category) for s, e in _coarse(got, end - begin)]
    on_device = device.has_device(rank)
    work = device.device_work(rank) if on_device else thread
    starts = work["start_ns"].to_numpy()
    work = work[(starts >= begin) & (starts < end) & host.is_kind(work, "op", *device.WORK)]
    lane = "device" if on_device else "work"
    parts = breakdown.partition(rank)
    for category in ("computation", "communication", "copy"):
        pieces = _coarse(iv.clip(parts.get(category, iv.EMPTY), begin, end), end - begin)
        names = _longest(work, pieces) if category != "communication" or on_device else ["collective"] * len(pieces)
        rows += [(lane, int(s), int(e - s), n, category) for (s, e), n in zip(pieces, names, strict=True)]
    frame = pd.DataFrame(rows, columns=["lane", "start_ns", "dur_ns", "name", "category"])
    return frame.assign(step=step, begin_ns=begin)


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
