"""The training thread: which host lane it is, and what runs on it."""

from __future__ import annotations

import re
from typing import cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Frame, needs, within_rank

# The script's own loop marks itself in these ways, the surest first.
_MARKS = (
    "ProfilerStep#",
    "dlprof::",
    "enumerate(DataLoader)",
    "Optimizer.step#",
    "step[",
    "execute_context_",
    "execute_new_",
)

# What a closure does that an optimizer's step calls is none of that step.
CLOSURE = "dlprof::closure"

# Code that torch.compile generated runs under these ranges and not under operators.
COMPILED = ("Torch-Compiled Region", "## Call CompiledFxGraph", "CompiledFunction")

# Around each function of the backward pass, and the hooks on what it is given.
_ENGINE = "autograd::engine::evaluate_function"

# A subclass of torch.autograd.Function, or its backward; what torch.compile makes has no operators inside.
_PYTHON_FUNCTION = re.compile(r"(?!CompiledFunction)[A-Za-z_]\w*(?<!\d)")


@within_rank
def is_on_device(spans: Frame = needs(schema.SPANS)) -> NDArray[np.bool_]:
    """Return for each span whether it lies on a device lane."""
    lane = spans["lane"]
    return _are(lane, [c.startswith("device") for c in _texts(lane)])


def is_named(frame: pd.DataFrame, *prefixes: str) -> NDArray[np.bool_]:
    """Return for each span whether its name begins with one of the prefixes."""
    return _are(frame["name"], [c.startswith(prefixes) for c in _texts(frame["name"])])


def is_frame(frame: pd.DataFrame) -> NDArray[np.bool_]:
    """Return for each operator whether it may only span what hooks or Python do: the engine's, and Python's functions.

    torch's own backward functions end with a digit (AddmmBackward0), its other operators have a namespace.
    """
    return _are(frame["name"], [names_frame(name) for name in _texts(frame["name"])])


def names_frame(name: str) -> bool:
    """Return whether an operator of this name is one of those, as `is_frame` says."""
    return name.startswith(_ENGINE) or _PYTHON_FUNCTION.fullmatch(name) is not None


def is_kind(frame: pd.DataFrame, *kinds: str) -> NDArray[np.bool_]:
    """Return for each span whether it is of one of the kinds."""
    return is_one_of(frame["kind"], *kinds)


def is_one_of(column: pd.Series[str], *values: str) -> NDArray[np.bool_]:
    """Return for each value of a categorical column whether it is one of those given."""
    return _are(column, [c in values for c in _texts(column)])


def written(column: pd.Series[str]) -> NDArray[np.object_]:
    """Return the texts of a categorical column, which share their objects."""
    values = cast("pd.Categorical", column.array)
    texts: NDArray[np.object_] = values.categories.to_numpy(dtype=object)[values.codes]
    return texts


def _texts(column: pd.Series[str]) -> list[str]:
    """Return the categories of a column of texts; iterating over them would make a pandas object of each."""
    return cast("pd.Categorical", column.array).categories.tolist()


def _are(column: pd.Series[str], wanted: list[bool]) -> NDArray[np.bool_]:
    """Return for each value of a categorical column whether its category is wanted."""
    codes = cast("pd.Categorical", column.array).codes  # as they are: .cat makes a series of them
    chosen = [code for code, yes in enumerate(wanted) if yes]
    if len(chosen) > 5:
        return cast("NDArray[np.bool_]", np.asarray(wanted, dtype=bool)[codes])
    found = np.zeros(len(codes), dtype=bool)
    for code in chosen:  # comparing all rows with one code takes a tenth of looking each row up
        found |= codes == code
    return found


def is_among(values: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return for each number whether it is one of the others; by a hash table, for NumPy sorts both."""
    return cast("NDArray[np.bool_]", pd.Series(values).isin(wanted).to_numpy())


@within_rank
def training_lane(spans: Frame = needs(schema.SPANS), is_on_device: NDArray[np.bool_] = needs(is_on_device)) -> str:
    """Return the lane of the thread that runs the training loop; "" where there is no host lane."""
    host = ~is_on_device
    for mark in _MARKS:
        marked = spans["lane"][host & is_named(spans, mark)]
        if len(marked):
            return str(marked.value_counts().index[0])
    ops = spans.loc[host & is_kind(spans, "op", "annotation")]
    if not len(ops):
        return ""
    return str(ops.groupby("lane", observed=True)["dur_ns"].sum().idxmax())


@within_rank
def on_training_thread(spans: Frame = needs(schema.SPANS), training_lane: str = needs(training_lane)) -> pd.DataFrame:
    """Return the spans of the training thread: kind, name, start_ns, dur_ns, launch and collective."""
    # Not all columns: choosing their rows takes three times as long.
    return spans[["kind", "name", "start_ns", "dur_ns", "launch", "collective"]][
        is_one_of(spans["lane"], training_lane)
    ]


def cover(spans: pd.DataFrame, chosen: NDArray[np.bool_] | None = None) -> iv.Intervals:
    """Return the time that spans cover."""
    # The two columns, not the frame: choosing rows of all columns would cost more than all that follows.
    start, dur = spans["start_ns"].to_numpy(), spans["dur_ns"].to_numpy()
    if chosen is not None:
        start, dur = start[chosen], dur[chosen]
    return iv.union(start, start + dur)


@within_rank
def in_calls(spans: Frame = needs(schema.SPANS), is_on_device: NDArray[np.bool_] = needs(is_on_device)) -> iv.Intervals:
    """Return when any thread was in an operator, a runtime call or a collective."""
    return cover(spans, ~is_on_device & is_kind(spans, "op", "runtime", "communication"))


def outermost(spans: pd.DataFrame) -> pd.DataFrame:
    """Return the spans of one lane that lie in no other; they are in order of start, the longer first, as ever."""
    if not len(spans):
        return spans
    start = spans["start_ns"].to_numpy()
    reach = np.maximum.accumulate(start + spans["dur_ns"].to_numpy())
    return spans[np.concatenate(([True], start[1:] >= reach[:-1]))]


# Python's own stack is a thousand calls deep at most; those of a trace with stacks are a hundred.
MOST_DEEP = 256


def parents(start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each of nested intervals, in order of start and the longer first, the one around it; -1: none.

    One pass for each level of nesting: calls are a few levels deep, and there are many of them. What lies deeper than
    MOST_DEEP counts to the one at that depth: a file may hold millions of spans that are all the same.
    """
    parent = np.full(len(start), -1, dtype=np.int64)
    todo = np.arange(len(start))
    for _ in range(MOST_DEEP):
        if not len(todo):
            break
        begin = start[todo]
        reach = np.maximum.accumulate(end[todo])
        outer = np.concatenate(([True], begin[1:] >= reach[:-1]))
        first = np.flatnonzero(outer)
        around = np.repeat(todo[first], np.diff(first, append=len(todo)))
        todo, around = todo[~outer], around[~outer]
        parent[todo] = around
    return parent
