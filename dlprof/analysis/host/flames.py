"""Flame graphs of a tree of calls, over all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pandas as pd

from dlprof.analysis.host.stacks import MOST_FRAMES, shown

_CALL = ["doing", "parent", "name", "samples", "own"]


def flame_rows(
    flame: pd.DataFrame, roots: Mapping[str, str], categories: Mapping[str, str], *, rooted: bool = True
) -> tuple[tuple[Any, ...], ...]:
    """Return the rows of a panel of shape flame: what was done (`roots`: doing → its name), and upon it its functions.

    The widest stand first. `rooted`: whether what was done stands there as a frame.
    """
    seen: Counter[tuple[str, ...]] = Counter()  # by path, which begins with what was done
    own = set()
    for _, of_rank in flame.groupby("rank"):
        paths: list[tuple[str, ...]] = []
        for doing, parent, name, samples, is_own in of_rank[_CALL].itertuples(index=False):
            above = paths[parent] if parent >= 0 else (doing,)
            paths.append((*above, name))
            seen[paths[-1]] += samples
            seen[above] += samples if parent < 0 else 0
            own |= {paths[-1]} if is_own else set()
    place = [*roots].index
    rows: list[tuple[int, int, int, str, str]] = []
    begin: Counter[tuple[str, ...]] = Counter()  # where the next call on each path is drawn
    for path in sorted(seen, key=lambda path: (len(path), place(path[0]), -seen[path])):
        at = begin[path] = begin[path[:-1]]
        begin[path[:-1]] += seen[path]
        function, _, file = path[-1].rpartition(" (")
        name, category = shown(function, file.rstrip(")")), "own" if path in own else "library"
        if len(path) == 1:
            name, category = roots[path[0]], categories[path[0]]
        if rooted or len(path) > 1:
            rows.append((len(path) - 1 - (not rooted), at, seen[path], name, category))
    return tuple(sorted(rows)[:MOST_FRAMES])
