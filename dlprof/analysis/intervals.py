"""Sets of time as arrays: union, subtract, intersect, clip of half-open intervals [start, end).

An interval set is an int64 array of shape (n, 2), sorted by start, disjoint and without empty intervals, as `union`
returns it. Every function takes and returns such sets, costs at most O(n log n), and modifies none of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.int64]

EMPTY: Intervals = np.empty((0, 2), dtype=np.int64)


def union(start: NDArray[np.int64], end: NDArray[np.int64]) -> Intervals:
    """Merge any intervals, in any order, overlapping or not, into an interval set; empty and negative ones vanish."""
    keep = end > start
    start, end = start[keep], end[keep]
    if not len(start):
        return EMPTY
    if np.any(start[1:] < start[:-1]):
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    opens = np.flatnonzero(np.concatenate(([True], start[1:] > reach[:-1])))
    closes = np.concatenate((opens[1:] - 1, [len(start) - 1]))
    return np.column_stack((start[opens], reach[closes]))


def total(a: Intervals) -> int:
    """Add up the lengths of an interval set."""
    return int((a[:, 1] - a[:, 0]).sum())


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Return the time that is in both sets."""
    if not len(a) or not len(b):
        return EMPTY
    if len(a) > len(b):  # looking up the fewer of them is cheaper
        a, b = b, a
    # Interval i of a meets those of b from the first that ends after its start to the last that starts before its end.
    first = np.searchsorted(b[:, 1], a[:, 0], side="right")
    last = np.searchsorted(b[:, 0], a[:, 1], side="left")
    count = np.maximum(last - first, 0)
    owner = np.repeat(np.arange(len(a)), count)
    offset = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    other = first[owner] + offset
    return np.column_stack((np.maximum(a[owner, 0], b[other, 0]), np.minimum(a[owner, 1], b[other, 1])))


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Return the time that is in a and not in b."""
    if not len(a) or not len(b):
        return a
    low, high = min(a[0, 0], b[0, 0]), max(a[-1, 1], b[-1, 1])
    gaps = np.column_stack((np.concatenate(([low], b[:, 1])), np.concatenate((b[:, 0], [high]))))
    return intersect(a, gaps[gaps[:, 1] > gaps[:, 0]])


def clip(a: Intervals, start: int, end: int) -> Intervals:
    """Return the time of `a` within [start, end)."""
    return intersect(a, np.array([[start, end]], dtype=np.int64)) if end > start else EMPTY


def merge(*sets: Intervals) -> Intervals:
    """Return the time that is in any of the sets."""
    everything = np.concatenate(sets) if sets else EMPTY
    return union(everything[:, 0], everything[:, 1])


def within(a: Intervals, start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how much of `a` is in each interval [start[i], end[i]); these may overlap and be in any order."""
    return before(a, end) - before(a, start)


def holds(a: Intervals, at: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return for each instant whether it lies in an interval of `a`."""
    if not len(a):
        return np.zeros(len(at), dtype=bool)
    place = np.searchsorted(a[:, 0], at, side="right") - 1
    inside: NDArray[np.bool_] = (place >= 0) & (at < a[np.maximum(place, 0), 1])
    return inside


def per_slot(a: Intervals, edges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how much of `a` is in each slot [edges[i], edges[i + 1]); edges ascend, the result is one shorter."""
    return np.diff(before(a, edges))


def before(a: Intervals, at: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how much of `a` is before each instant."""
    if not len(a):
        return np.zeros(len(at), dtype=np.int64)
    before = np.concatenate(([0], np.cumsum(a[:, 1] - a[:, 0])))
    i = np.searchsorted(a[:, 0], at, side="right")
    # All intervals that began before the instant, minus the part of the last one after it.
    beyond = np.where(i > 0, np.maximum(a[np.maximum(i - 1, 0), 1] - at, 0), 0)
    return before[i] - beyond
