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

# Threads whose operators are looked at, those with most of them.
_MOST_LANES = 64

ENGINE = "autograd::engine::evaluate_function: "


def forward_rows(
    spans: pd.DataFrame, is_on_device: NDArray[np.bool_], functions: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return for rows of backward functions the row of the operator that made each; −1: the trace does not hold it."""
    found = np.full(len(functions), -1, dtype=np.int64)
    number, thread = spans["autograd"].to_numpy().copy(), spans["forward_thread"].cat.codes.to_numpy().copy()
    makes = (number >= 0) & host.is_one_of(spans["forward_thread"], "") & host.is_kind(spans, "op") & ~is_on_device
    operators = np.flatnonzero(makes)
    lane = spans["lane"].cat.codes.to_numpy()
    lanes, counts = np.unique(lane[operators], return_counts=True)
    name = pd.factorize(np.array([_plain(str(n)) for n in spans["name"].cat.categories]))[0]
    name = name[spans["name"].cat.codes.to_numpy()]
    unnumbered = functions[number[functions] < 0]
    inner = _inner(spans, name, unnumbered)
    number[unnumbered], thread[unnumbered] = number[inner], thread[inner]
    asked = np.flatnonzero(number[functions] >= 0)
    # Whose thread is which the trace does not say: the one that fits best is.
    threads = thread[functions]
    best = np.full(int(threads.max(initial=0)) + 1, -1, dtype=np.int64)
    for code in lanes[np.argsort(-counts, kind="stable")][:_MOST_LANES]:
        made_by = _last(number, spans["start_ns"].to_numpy(), operators[lane[operators] == code], functions[asked])
        # By its number, and better still by its name.
        exact = (made_by >= 0) & (number[made_by] == number[functions[asked]])
        fits = exact * (1 + (name[made_by] == name[functions[asked]]))
        score = np.bincount(threads[asked], weights=fits, minlength=len(best)).astype(np.int64)
        better = (score > best)[threads[asked]]
        found[asked[better]] = made_by[better]
        best = np.maximum(best, score)
    return found


def _inner(spans: pd.DataFrame, name: NDArray[np.int64], ranges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the function that runs in each of the engine's ranges, else the range itself.

    The profiler numbers a range only where its function is the first thing in it: hooks run before.
    """
    functions = np.flatnonzero(~host.is_one_of(spans["forward_thread"], "") & ~host.is_named(spans, ENGINE))
    if not len(functions) or not len(ranges):
        return ranges
    # Rows are in order of start.
    key = (name * (int(spans["lane"].cat.codes.max()) + 1) + spans["lane"].cat.codes.to_numpy()) * len(spans)
    key += np.arange(len(spans))
    functions = functions[np.argsort(key[functions])]
    at = np.minimum(np.searchsorted(key[functions], key[ranges]), len(functions) - 1)
    start = spans["start_ns"].to_numpy()
    found = functions[at]
    within = (key[found] > key[ranges]) & (key[found] // len(spans) == key[ranges] // len(spans))
    within &= start[found] < start[ranges] + spans["dur_ns"].to_numpy()[ranges]
    return np.where(within, found, ranges)


def _last(
    number: NDArray[np.int64], start: NDArray[np.int64], operators: NDArray[np.int64], functions: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the last operator of a thread before each function with its number; else one with a number near it."""
    rows = np.concatenate((operators, functions))
    order = np.lexsort((np.repeat((0, 1), (len(operators), len(functions))), start[rows], number[rows]))
    last = np.maximum.accumulate(np.where(order < len(operators), np.arange(len(order)), -1))
    at = np.empty(len(rows), dtype=np.int64)
    at[order] = last
    at = at[len(operators) :]
    row = rows[order[np.maximum(at, 0)]]
    good = (at >= 0) & (number[functions] - number[row] <= _NEAR) & (start[row] <= start[functions])
    return np.where(good, row, -1)


def _plain(name: str) -> str:
    """Return what an operator and its function have in common: addmm of aten::addmm and of AddmmBackward0."""
    name = name.removeprefix(ENGINE).removeprefix("aten::")
    return name.partition("Backward")[0].replace("_", "").lower()
