"""Tensors that grow by `cat` in a loop: each call copies the whole tensor, so its time rises evenly."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis.chains.calls import Calls, Chain, calls, chains, replaced
from dlprof.analysis.engine import needs, per_rank, within_rank

FORM = "cat in a loop"

_CAT = re.compile("2")

# A loop calls the same operators between one `cat` and the next; up to three tensors may grow in it. With fewer than
# eight calls, rising times may be chance.
LEAST_CALLS = 8
_TENSORS = (1, 2, 3)

# The calls' times rise along the loop (by rank correlation, as anything may delay a single one), and the last third
# takes so many times as long as the first: with n pieces 5 times, apart from the fixed time of a call.
_IN_ORDER, _GROWS = 0.8, 2.0

# From the first third to the last one the operators between two calls gain at most this part of what the calls gain. A
# loop that reads the growing tensor (DenseNet, a cache of keys) needs it: reading takes half of what copying does, and
# more with what is computed of it. Where nothing reads it the operators gain a little too, as the copies empty the
# caches: up to 0.13, measured on a CPU.
_READS = 0.3


@within_rank
def growing_chains(calls: Calls = needs(calls)) -> list[Chain]:
    """Return the calls of `cat` in loops in which a tensor grows."""
    return list(_chains(calls))


@per_rank
def growing_cats(
    growing_chains: list[Chain] = needs(growing_chains),
    replaced: Callable[[Sequence[Chain]], pd.DataFrame] = needs(replaced),
) -> pd.DataFrame:
    """Return the time of growing tensors in loops, as `work.replaced` does; a fix leaves each loop's last call."""
    return replaced(growing_chains)


def _chains(calls: Calls) -> Iterator[Chain]:
    alike: dict[tuple[int, str], list[NDArray[np.int64]]] = {}
    for places in _loops(calls):
        if calls.ns[places].sum() > 0:
            alike.setdefault((len(places), calls.text[places[0] : places[1]]), []).append(places)
    for same in alike.values():
        # The same loop of several steps: the median of each of its calls, since single calls may be delayed.
        for part in _rising(calls, np.stack(same)):
            for places in same:
                for place in places[part].tolist():
                    left = float(place == places[part][-1])
                    yield from chains(calls, FORM, place, place + 1, (left, left))


def _loops(calls: Calls) -> Iterator[NDArray[np.int64]]:
    """Yield the places of the calls of each tensor that may grow in a loop: the same operators follow each of them."""
    found = np.array([first for first, _ in calls.find(_CAT)], dtype=np.int64)
    for places in np.split(found, np.flatnonzero(np.diff(calls.lane[found])) + 1):
        bodies = [calls.text[a + 1 : b] for a, b in pairwise(places.tolist())]
        at = 0
        while at < len(bodies):
            n, end = max(((n, _same(bodies, at, n)) for n in _TENSORS), key=lambda one: (one[1] - one[0], -one[0]))
            if end - at + 1 < n * LEAST_CALLS:
                at += 1
                continue
            yield from (places[at : end + 1][k::n] for k in range(n))
            at = end + 1


def _same(bodies: Sequence[str], at: int, n: int) -> int:
    """Return how far bodies repeat every n-th time from a place on."""
    end = at + n
    while end < len(bodies) and bodies[end] == bodies[end - n]:
        end += 1
    return min(end, len(bodies))


def _rising(calls: Calls, loops: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield the calls of identical loops (a row each) whose time rises evenly while the time between them does not."""
    others = np.append(0.0, np.cumsum(np.where(calls.has("2"), 0.0, calls.ns)))
    ns = np.median(calls.ns[loops], axis=0)
    between = np.median(np.diff(others[loops], axis=1), axis=0)
    falls = np.flatnonzero(ns[2:] < np.minimum(ns[1:-1], ns[:-2]) / _GROWS) + 2
    for part in np.split(np.arange(len(ns)), falls):
        third = len(part) // 3
        if len(part) < LEAST_CALLS:
            continue
        order = pd.Series(ns[part]).rank().to_numpy()
        rises = np.ptp(ns[part]) > 0 and np.corrcoef(np.arange(len(part)), order)[0, 1] >= _IN_ORDER
        rises &= np.median(ns[part[-third:]]) >= _GROWS * np.median(ns[part[:third]])
        work = between[part[:-1]]
        if rises and _gain(work, third) <= _READS * _gain(ns[part], third):
            yield part


def _gain(ns: NDArray[np.float64], third: int) -> float:
    """Return how much longer a call of the last third takes than one of the first."""
    return float(ns[-third:].mean() - ns[:third].mean())
