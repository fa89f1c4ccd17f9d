"""Time of modules on the host's threads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Frame, Maybe, maybe, needs, within_rank
from dlprof.analysis.modules.exchanges import CALLS, bucket_shares
from dlprof.analysis.modules.frames import COMMUNICATION, OTHER, Frames, module_frames
from dlprof.analysis.modules.rows import module_rows
from dlprof.analysis.modules.sums import Sums, shared, sums
from dlprof.analysis.step.partition import cpu_computation
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.host import is_on_device, training_lane
from dlprof.analysis.timeline.steps import Timing, timing


@dataclass(frozen=True)
class Pieces:
    """The host's time in pieces, each in the innermost frame of its lane or in calls outside of all frames.

    The pieces of one lane do not overlap. `outermost` says which of these calls are counted.
    """

    lane: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    module: NDArray[np.int64]
    part: NDArray[np.int64]
    outside: iv.Intervals  # the training thread's time in no piece, and in none of any other thread


@within_rank
def host_pieces(
    spans: Frame = needs(schema.SPANS),
    is_on_device: NDArray[np.bool_] = needs(is_on_device),
    module_frames: Frames = needs(module_frames),
    module_rows: Frame = needs(module_rows),
    timing: Timing = needs(timing),
) -> Pieces:
    """Return the host's time in pieces."""
    lanes, starts, ends, inner = [], [], [], []
    for code, (at, of) in module_frames.by_lane.items():
        keep = np.flatnonzero((of[:-1] >= 0) & (at[1:] > at[:-1]))
        lanes.append(np.full(len(keep), code))
        starts.append(at[keep])
        ends.append(at[keep + 1])
        inner.append(of[keep])
    lane, start, end, frame = map(np.concatenate, (lanes, starts, ends, inner))
    module, part = module_frames.module[frame], module_frames.part[frame]
    calls = outside_calls(spans, is_on_device, module_rows)
    more = []
    for code in np.unique(calls.lane):
        mine = calls.lane == code
        framed = iv.union(start[lane == code], end[lane == code])
        for of in np.unique(calls.part[mine]):
            chosen = mine & (calls.part == of)
            left = iv.subtract(iv.union(calls.start[chosen], calls.end[chosen]), framed)
            more.append((np.full(len(left), code), left[:, 0], left[:, 1], np.full(len(left), of)))
    if more:
        others = [np.concatenate([one[i] for one in more]) for i in range(4)]
        lane, start, end = (np.concatenate(both) for both in zip((lane, start, end), others[:3], strict=True))
        part = np.concatenate((part, others[3]))
        module = np.concatenate((module, np.full(len(others[3]), -1)))
    outside = iv.subtract(iv.merge(timing.host_windows), iv.union(start, end))
    return Pieces(lane, start, end, module, part, outside)


@dataclass(frozen=True)
class Calls:
    """Calls of the host that lie in no frame and in no other such call."""

    lane: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    part: NDArray[np.int64]


def outside_calls(spans: pd.DataFrame, is_on_device: NDArray[np.bool_], module_rows: pd.DataFrame) -> Calls:
    """Return the calls of the host that lie in no frame and in no other such call."""
    called = host.is_kind(spans, "op", "runtime") | (
        host.is_kind(spans, "communication") & host.is_named(spans, *CALLS)
    )
    rows = np.flatnonzero(called & ~is_on_device & (module_rows["frame"].to_numpy() < 0))
    lane = spans["lane"].cat.codes.to_numpy()[rows].astype(np.int64)
    order = np.argsort(lane, kind="stable")
    rows, lane = rows[order], lane[order]
    start = spans["start_ns"].to_numpy()[rows]
    end = start + spans["dur_ns"].to_numpy()[rows]
    outer = np.ones(len(rows), dtype=bool)
    for code in np.unique(lane):
        mine = np.flatnonzero(lane == code)
        reach = np.maximum.accumulate(end[mine])
        outer[mine[1:]] = start[mine[1:]] >= reach[:-1]
    exchanges = host.is_kind(spans, "communication")[rows]
    return Calls(lane[outer], start[outer], end[outer], np.where(exchanges, COMMUNICATION, OTHER)[outer])


@within_rank
def module_host(
    host_pieces: Pieces = needs(host_pieces),
    module_frames: Frames = needs(module_frames),
    timing: Timing = needs(timing),
) -> Sums:
    """Return the time of the traced steps that threads spend in each module itself, and the training thread outside."""
    steps = iv.merge(timing.host_windows)
    took = iv.within(steps, host_pieces.start, host_pieces.end)
    found = sums(module_frames, host_pieces.module, host_pieces.part, took)
    return found + _outside(module_frames, iv.total(host_pieces.outside))


def _outside(module_frames: Frames, ns: int) -> Sums:
    return sums(module_frames, np.array([-1]), np.array([OTHER]), np.array([ns]))


@within_rank
def cpu_exposed(
    host_pieces: Pieces = needs(host_pieces),
    module_frames: Frames = needs(module_frames),
    timing: Timing = needs(timing),
    spans: Frame = needs(schema.SPANS),
    is_on_device: NDArray[np.bool_] = needs(is_on_device),
    module_rows: Frame = needs(module_rows),
    training_lane: str = needs(training_lane),
    cpu_computation: iv.Intervals = needs(cpu_computation),
    bucket_shares: Maybe[NDArray[np.float64]] = maybe(bucket_shares),
) -> Sums:
    """Return the pieces of the training thread's steps, except exchanges without simultaneous computation.

    Where exchanges overlap, the one that began first counts.
    """
    steps = iv.merge(timing.host_windows)
    marks = np.flatnonzero(host.is_kind(spans, "communication") & ~is_on_device)
    start, end = (
        spans["start_ns"].to_numpy()[marks],
        spans["start_ns"].to_numpy()[marks] + spans["dur_ns"].to_numpy()[marks],
    )
    waited = iv.subtract(iv.intersect(iv.union(start, end), steps), cpu_computation)
    categories = spans["lane"].cat.categories.tolist()
    mine = host_pieces.lane == (categories.index(training_lane) if training_lane in categories else -1)
    piece = host_pieces
    own = iv.within(iv.subtract(steps, waited), piece.start[mine], piece.end[mine])
    found = sums(module_frames, piece.module[mine], piece.part[mine], own)
    module, bucket = (module_rows[name].to_numpy()[marks].astype(np.int64) for name in ("module", "bucket"))
    took, alone = iv.within(waited, *apart(start, end)), bucket < 0
    found += sums(module_frames, module[alone], np.full(int(alone.sum()), COMMUNICATION), took[alone])
    shares = bucket_shares.or_none()
    if shares is not None:
        found += shared(module_frames, bucket[~alone], took[~alone], shares)
    rest = iv.subtract(iv.subtract(steps, iv.union(piece.start[mine], piece.end[mine])), waited)
    return found + _outside(module_frames, iv.total(rest))


def apart(start: NDArray[np.int64], end: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return intervals, in order of start, each without what those before it cover."""
    if not len(start):
        return start, end
    reach = np.maximum.accumulate(np.append(start[:1], end))[:-1]
    begin = np.maximum(start, reach)
    return begin, np.maximum(begin, end)
