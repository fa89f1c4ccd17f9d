"""Divides the graphs that torch.compile made into the modules that they were made of.

The recorder notes for each graph which calls it makes, in their order, and what each is for (the table `compiled`). Of
these the trace shows operators and Triton's kernels, by their names: the n-th of a name in the graph's range is the
n-th of that name in the table. C++ kernels are not shown: they are the time between two calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.paths import around

# How the range of a graph begins; its key follows.
GRAPH = "## Call CompiledFxGraph "


@dataclass(frozen=True)
class Pieces:
    """Stretches of a lane in which a compiled graph works for one module; arrays have an item each.

    `row`: of the span of the call that it begins with; −1: of none. `graph`: of its graph's range, a row of the spans.
    `lane`: the code of its lane. `path`: the module's.
    """

    row: NDArray[np.int64]
    graph: NDArray[np.int64]
    lane: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    path: NDArray[np.object_]


def pieces(
    spans: pd.DataFrame,
    is_on_device: NDArray[np.bool_],
    compiled: pd.DataFrame,
    called_by: Mapping[int, str],
) -> Pieces:
    """Return the pieces of the graphs that `compiled` knows.

    `called_by`: by the row of a graph's range the module around it; absent: there is none. Modules that are alike
    share a graph, which names those of the first one: the others' own stand in their place.
    """
    graphs = {str(key): rows for key, rows in compiled.groupby("graph", observed=True, sort=False)}
    texts = [str(name) for name in spans["name"].cat.categories]
    names, lanes = spans["name"].cat.codes.to_numpy(), spans["lane"].cat.codes.to_numpy()
    start = spans["start_ns"].to_numpy()
    end = start + spans["dur_ns"].to_numpy()
    keys = {code: key for code, text in enumerate(texts) if (key := _key(text)) in graphs}
    found: list[tuple[int, int, int, int, str]] = []
    code_of = {text: code for code, text in enumerate(texts)}
    operators = {
        key: np.array([code_of.get(str(name), -1) for name in calls["operator"]], dtype=np.int64)
        for key, calls in graphs.items()
    }
    on_host = ~is_on_device & host.is_kind(spans, "op")
    wanted = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *operators.values()]))
    shown = np.flatnonzero(on_host & np.isin(names, wanted))
    by_lane = {lane: shown[lanes[shown] == lane] for lane in np.unique(lanes[shown]).tolist()}
    for at in np.flatnonzero(on_host & np.isin(names, list(keys))).tolist():
        key = keys[int(names[at])]
        there = by_lane.get(int(lanes[at]), shown[:0])
        first, last = np.searchsorted(start[there], (start[at], end[at])).tolist()
        mine = there[first:last]
        mine = mine[np.isin(names[mine], operators[key])]
        place = _matched(operators[key], names[mine], start[mine], end[mine])
        rows = np.append(mine, -1)[place]
        found += _stretches(_relocated(graphs[key], called_by.get(at)), rows, at, start, end)
    columns = list(zip(*found, strict=True)) or [(), (), (), (), ()]
    row, graph, begin, stop = (np.array(column, dtype=np.int64) for column in columns[:4])
    path = np.array(columns[4], dtype=object)
    return Pieces(row, graph, lanes[graph].astype(np.int64), begin, stop, path)


def _key(text: str) -> str:
    return text.removeprefix(GRAPH).partition(" ")[0] if text.startswith(GRAPH) else ""


def _matched(
    wanted: NDArray[np.int64], names: NDArray[np.integer], start: NDArray[np.int64], end: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return for each call the place of the operator that is it; −1: it is not shown, or as many as others are not."""
    outer = np.ones(len(names), dtype=bool)
    outer[1:] = start[1:] >= np.maximum.accumulate(end)[:-1]
    found = np.full(len(wanted), -1, dtype=np.int64)
    for name in np.unique(wanted[wanted >= 0]).tolist():
        calls, shown = np.flatnonzero(wanted == name), np.flatnonzero(outer & (names == name))
        if len(calls) == len(shown):
            found[calls] = shown
    known = found[found >= 0]
    return found if (np.diff(known) > 0).all() else np.full_like(found, -1)


def _relocated(calls: pd.DataFrame, caller: str | None) -> list[tuple[str, str]]:
    """Return the module of each call and of what is before it, as they are called inside `caller`."""
    modules = list(zip(calls["module"].astype(str), calls["before"].astype(str), strict=True))
    if not caller:
        return modules
    whole = around({path for both in modules for path in both})
    if whole == caller or whole.startswith(f"{caller}."):
        return modules
    depth = caller.count(".") + 1
    if whole.count(".") + 1 < depth:
        return [(caller, caller)] * len(modules)
    ours = ".".join(whole.split(".")[:depth])
    return [(caller + module[len(ours) :], caller + before[len(ours) :]) for module, before in modules]


def _stretches(
    modules: list[tuple[str, str]],
    rows: NDArray[np.int64],
    graph: int,
    start: NDArray[np.int64],
    end: NDArray[np.int64],
) -> list[tuple[int, int, int, int, str]]:
    """Return a graph's pieces: each call, and the time before it; what is not shown is a part of the next one."""
    found: list[tuple[int, int, int, int, str]] = []
    at = int(start[graph])
    skipped: list[str] = []
    for (module, before), row in zip(modules, rows.tolist(), strict=True):
        if row < 0:
            skipped += [before, module]
            continue
        found.append((-1, graph, at, int(start[row]), around([*skipped, before])))
        found.append((row, graph, int(start[row]), int(end[row]), module))
        at, skipped = int(end[row]), []
    if found:
        found.append((-1, graph, at, int(end[graph]), around(skipped) if skipped else modules[-1][0]))
    merged: list[tuple[int, int, int, int, str]] = []
    for piece in found:
        if merged and merged[-1][4] == piece[4]:
            last = merged.pop()
            piece = (last[0] if last[0] >= 0 else piece[0], graph, last[2], piece[3], piece[4])
        merged.append(piece)
    return [piece for piece in merged if piece[3] > piece[2]]
