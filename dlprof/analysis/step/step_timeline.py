"""One step as a picture: what the training thread and the device did, merged to what a screen can show."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Frame, Maybe, maybe, needs, per_rank, within_rank
from dlprof.analysis.input.loader import fetches
from dlprof.analysis.step.partition import BUBBLE, partition
from dlprof.analysis.timeline import device, host
from dlprof.analysis.timeline.device import device_work, has_device
from dlprof.analysis.timeline.host import on_training_thread
from dlprof.analysis.timeline.steps import Timing, timing
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

_PHASES = (
    ("fetch", "input_wait", ("dlprof::fetch", "enumerate(DataLoader)")),
    ("optimizer", "optimizer_host", ("dlprof::optimizer", "Optimizer.step#")),
    ("backward", "host", ("dlprof::backward",)),
    ("forward", "host", ("dlprof::forward", "DistributedDataParallel.forward")),
)

Row = tuple[str, int, int, str, str]  # as the columns of `excerpt` from lane on


@within_rank
def in_phases(on_training_thread: Frame = needs(on_training_thread)) -> list[iv.Intervals]:
    """Return when the training thread is in each of the phases that are drawn."""
    return [host.cover(on_training_thread, host.is_named(on_training_thread, *ranges)) for _, _, ranges in _PHASES]


@per_rank
def excerpt(
    timing: Timing = needs(timing),
    in_phases: Maybe[list[iv.Intervals]] = maybe(in_phases),
    device_work: Maybe[Frame] = maybe(device_work),
    partition: Maybe[dict[str, iv.Intervals]] = maybe(partition),
    has_device: bool = needs(has_device),
    on_training_thread: Maybe[Frame] = maybe(on_training_thread),
    fetches: Maybe[Frame] = maybe(fetches),
) -> pd.DataFrame:
    """Return two steady traced steps: shown (middle, slowest), step, step_ns, begin_ns; lane, start_ns, dur_ns, name,
    category.

    The middle one, not the shortest or longest, and by its place, so that all ranks show the same step; and this
    rank's slowest, where that is longer. Lanes: thread; of a device's streams `computation 7`, `communication 20`,
    `copies 22`, by what each does most; without a device work and communication; worker N.
    """
    if not len(timing.windows) or timing.unit != "step":
        raise NotMeasured("no step was traced")
    lengths = timing.windows[:, 1] - timing.windows[:, 0]
    middle, slowest = len(lengths) // 2, int(np.argmax(lengths))
    parts = []
    for which, chosen in {"middle": middle, "slowest": slowest}.items():
        if which == "slowest" and lengths[slowest] <= lengths[middle]:
            continue
        begin, end = (int(x) for x in timing.windows[chosen])
        rows = _on_thread(in_phases.get(), begin, end)
        if has_device:
            rows += _on_streams(device_work.get(), partition.get().get(BUBBLE, iv.EMPTY), begin, end)
        else:
            rows += _working(on_training_thread.get(), partition.get(), begin, end)
        rows += _in_workers(fetches.get(), begin, end) if fetches else []
        frame = pd.DataFrame(rows, columns=["lane", "start_ns", "dur_ns", "name", "category"])
        step = int(timing.numbers[chosen]) if len(timing.numbers) else 0
        parts.append(frame.assign(shown=which, step=step, step_ns=end - begin, begin_ns=begin))
    return pd.concat(parts, ignore_index=True)


def _on_thread(in_phases: list[iv.Intervals], begin: int, end: int) -> list[Row]:
    rows: list[Row] = []
    left = np.array([[begin, end]], dtype=np.int64)
    for (name, category, _), cover in zip(_PHASES, in_phases, strict=True):
        pieces = _coarse(iv.intersect(left, cover), end - begin)
        rows += _rows("thread", pieces, [name] * len(pieces), category)
        left = iv.subtract(left, cover)
    return rows


def _in_workers(fetches: pd.DataFrame, begin: int, end: int) -> list[Row]:
    """Return the batches that the first workers made meanwhile, of those that were recorded one by one."""
    start, stop = fetches["start_ns"], fetches["start_ns"] + fetches["dur_ns"]
    alone = (fetches["count"] == 1) & (fetches["dur_ns"] >= 0) & fetches["worker"].between(0, MOST_WORKERS - 1)
    mine = alone & (start < end) & (stop > begin)
    spans = zip(fetches["worker"][mine], start[mine].clip(lower=begin), stop[mine].clip(upper=end), strict=True)
    return [(f"worker {worker}", int(s), int(e - s), "makes a batch", "worker") for worker, s, e in spans]


def _on_streams(device_work: pd.DataFrame, bubble: iv.Intervals, begin: int, end: int) -> list[Row]:
    """Return what each of the busiest streams ran, hidden or not: those that compute first, those that copy last."""
    start = device_work["start_ns"].to_numpy()
    over = start + device_work["dur_ns"].to_numpy()
    inside = np.flatnonzero((start < end) & (over > begin))
    # What ran when the step began has a name, too.
    late, over = np.maximum(start[inside], begin), over[inside]
    shown = device_work[["lane", "kind", "name"]].iloc[inside].assign(start_ns=late, dur_ns=over - late)
    lanes = shown["lane"].cat
    of_role = {role: host.is_kind(shown, *kinds) for role, kinds in _ROLES.items()}
    streams = []
    for code in np.unique(lanes.codes).tolist():
        here = {role: np.flatnonzero(of & (lanes.codes.to_numpy() == code)) for role, of in of_role.items()}
        ran = {role: iv.clip(iv.union(late[at], over[at]), begin, end) for role, at in here.items()}
        busy = {role: iv.total(pieces) for role, pieces in ran.items()}
        role = max(busy, key=lambda role: busy[role])
        name = f"{role} {str(lanes.categories[code]).removeprefix('device').removeprefix(':')}"
        streams.append((list(_ROLES).index(role), -sum(busy.values()), name, here, ran))
    rows: list[Row] = []
    busiest = sorted(streams, key=lambda stream: stream[1])[:MOST_STREAMS]
    for _, _, lane, here, ran in sorted(busiest, key=lambda stream: stream[:3]):
        for role, category, cover in (
            ("computation", "computation", ran["computation"]),
            ("communication", "communication", iv.subtract(ran["communication"], bubble)),
            ("communication", BUBBLE, iv.intersect(ran["communication"], bubble)),
            ("copies", "copy", ran["copies"]),
        ):
            pieces = _coarse(cover, end - begin)
            rows += _rows(lane, pieces, _longest(shown.iloc[here[role]], pieces), category) if len(pieces) else []
    return rows


def _working(on_training_thread: pd.DataFrame, partition: dict[str, iv.Intervals], begin: int, end: int) -> list[Row]:
    """Return what the training thread computes, and apart from it the communication that nothing hides."""
    first, last = np.searchsorted(on_training_thread["start_ns"].to_numpy(), (begin, end))
    work = on_training_thread.iloc[first:last]
    work = work[host.is_kind(work, "op", *device.WORK)]
    rows: list[Row] = []
    for category, lane, name in (
        ("computation", "work", ""),
        ("communication", "communication", "collective"),
        (BUBBLE, "communication", "waits for another stage"),
    ):
        pieces = _coarse(iv.clip(partition.get(category, iv.EMPTY), begin, end), end - begin)
        rows += _rows(lane, pieces, [name] * len(pieces) if name else _longest(work, pieces), category)
    return rows


def _rows(lane: str, pieces: iv.Intervals, names: Iterable[str], category: str) -> list[Row]:
    return [(lane, s, e - s, name, category) for (s, e), name in zip(pieces.tolist(), names, strict=True)]


def _coarse(a: iv.Intervals, length: int) -> iv.Intervals:
    """Merge pieces that lie closer than the grain, and drop those shorter than a quarter of it."""
    grain = max(int(length * GRAIN), 1)
    merged = iv.union(a[:, 0], a[:, 1] + grain) - (0, grain)
    return merged[(merged[:, 1] - merged[:, 0]) * 4 >= grain]


def _longest(spans: pd.DataFrame, pieces: iv.Intervals) -> list[str]:
    """Name the longest of the spans, in order of their start, that begins in each piece, and count the others."""
    start, dur, name = spans["start_ns"].to_numpy(), spans["dur_ns"].to_numpy(), spans["name"].array
    names = []
    for i, j in np.searchsorted(start, pieces).tolist():
        longest = str(name[i + int(np.argmax(dur[i:j]))]).removeprefix(_EVALUATES) if j > i else ""
        names.append(short(longest, 200) + (f" and {j - i - 1:,} more" if j > i + 1 else ""))
    return names
