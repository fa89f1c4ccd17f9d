"""Links a function of the backward pass to the operator of the forward pass that made it.

Autograd numbers the functions that a thread makes, one after the other. The profiler writes the number, and the thread,
on a function that runs; and on an operator the number that the next function made by its thread will have. So the last
operator with a function's number has made it: those that begin afterwards have higher ones.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis.timeline import host

# An operator that is not numbered, as those that only look at a tensor, is followed by others: its function counts to
# the operator before it, if that made one of the few functions before.
_NEAR = 4

_MOST_LANES = 256


def forward_rows(
    spans: pd.DataFrame, is_on_device: NDArray[np.bool_], functions: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return for rows of backward functions the row of the operator that made each; −1: the trace does not hold it."""
    found = np.full(len(functions), -1, dtype=np.int64)
    number, made_by = spans["autograd"].to_numpy(), spans["forward_thread"].cat.codes.to_numpy()
    makes = (number >= 0) & host.is_one_of(spans["forward_thread"], "") & host.is_kind(spans, "op") & ~is_on_device
    operators = np.flatnonzero(makes)
    asked = np.flatnonzero(number[functions] >= 0)
    if not len(operators) or not len(asked):
        return found
    lane = spans["lane"].cat.codes.to_numpy().astype(np.int64)
    start = spans["start_ns"].to_numpy()
    threads = made_by[functions[asked]].astype(np.int64)
    lanes = _lanes_of(threads, number[functions[asked]], lane[operators], number[operators])
    on = lanes[threads]
    for code in np.unique(on[on >= 0]):
        mine, theirs = operators[lane[operators] == code], asked[on == code]
        found[theirs] = _last(number, start, mine, functions[theirs])
    return found


def _last(
    number: NDArray[np.int64], start: NDArray[np.int64], operators: NDArray[np.int64], functions: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the last operator of a thread before each function with its number; else one with a number near it."""
    rows = np.concatenate((operators, functions))
    order = np.lexsort((np.repeat((0, 1), (len(operators), len(functions))), start[rows], number[rows]))
    is_operator = order < len(operators)
    last = np.maximum.accumulate(np.where(is_operator, np.arange(len(order)), -1))
    at = np.empty(len(rows), dtype=np.int64)
    at[order] = last
    at = at[len(operators) :]
    row = rows[order[np.maximum(at, 0)]]
    good = (at >= 0) & (number[functions] - number[row] <= _NEAR) & (start[row] <= start[functions])
    return np.where(good, row, -1)


def _lanes_of(
    threads: NDArray[np.int64],
    numbers: NDArray[np.int64],
    lanes: NDArray[np.int64],
    theirs: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return the lane of each thread, as the profiler numbers threads: the one with most of its numbers.

    A trace does not say which is which.
    """
    found = np.full(int(threads.max()) + 1, -1, dtype=np.int64)
    codes, counts = np.unique(lanes, return_counts=True)
    if len(codes) == 1:
        found[:] = codes[0]
        return found
    kept = codes[np.argsort(-counts, kind="stable")[:_MOST_LANES]]
    made = pd.DataFrame({"number": theirs, "lane": lanes}).drop_duplicates()
    made = made[np.isin(made["lane"], kept)]
    ran = pd.DataFrame({"number": numbers, "thread": threads}).drop_duplicates()
    both = ran.merge(made, on="number").groupby(["thread", "lane"], sort=True).size().reset_index(name="count")
    best = both.sort_values("count", ascending=False, kind="stable").drop_duplicates("thread")
    found[best["thread"].to_numpy()] = best["lane"].to_numpy()
    return found
