"""The modules of a finding: those of the spans that it is about."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof import schema
from dlprof.analysis.engine import Frame, Maybe, maybe, needs, per_rank
from dlprof.analysis.modules.frames import Frames, module_frames
from dlprof.analysis.modules.rows import module_rows
from dlprof.analysis.modules.sums import OUTSIDE
from dlprof.analysis.modules.tree import around_of, built, inclusive
from dlprof.analysis.source.concerned import CONCERNED, Rows, concerned_rows
from dlprof.analysis.timeline.paths import folded
from dlprof.result.modules import InModule

# Of one rank so many modules of a finding travel, and so many are named.
MOST_OF_RANK, MOST_NAMED = 60, 6

# A finding is in what is inside a module, and not in the module, where those that have at least LEAST_SHARE of the
# finding have together so much of what the module has.
LEAST_SHARE, INSIDE_SHARE = 0.1, 0.8


@per_rank
def found_in_modules(
    module_rows: Frame = needs(module_rows),
    module_frames: Frames = needs(module_frames),
    modules: Maybe[Frame] = maybe(schema.MODULES),
    concerned_rows: dict[str, Rows] = needs(concerned_rows),
) -> pd.DataFrame:
    """Return in which modules the rows are that findings are about: about (as CONCERNED names it), path (folded; of
    what is in none, OUTSIDE), kind, ns (with what is inside the module), total_ns (of all those rows).

    Raises NotMeasured where the trace names no module: `module_rows` stands first, and nothing is computed then.
    """
    called = dict(zip(module_frames.paths, module_frames.classes, strict=True))
    names = folded({**built(modules.or_none()), **called})
    of_place = np.array([*(names[path] for path in module_frames.paths), OUTSIDE], dtype=object)  # −1: the last
    kind_of = {names[path]: kind for path, kind in zip(module_frames.paths, module_frames.classes, strict=True)}
    module = module_rows["module"].to_numpy()
    found = []
    for about, (rows, ns) in concerned_rows.items():
        if not ns.sum() > 0:
            continue
        own = pd.Series(ns).groupby(of_place[module[rows]]).sum()
        inside = own.drop(OUTSIDE, errors="ignore")
        tree = inclusive(inside.to_frame("ns"))["ns"].fillna(0.0).nlargest(MOST_OF_RANK)
        tree = pd.concat([tree, own[own.index == OUTSIDE]])
        kinds = [kind_of.get(str(path), "") for path in tree.index]
        of = {"about": about, "path": tree.index, "kind": kinds, "ns": tree.to_numpy(), "total_ns": ns.sum()}
        found.append(pd.DataFrame(of))
    columns = ["about", "path", "kind", "ns", "total_ns"]
    frame = pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=columns)
    return frame.astype(dict.fromkeys(columns[:3], object) | dict.fromkeys(columns[3:], float))


def in_modules(rule: str, found: pd.DataFrame | None) -> tuple[InModule, ...]:
    """Return the modules that a rule's finding is in, over all ranks, none inside another, the largest share first.

    () where none is known. What is in no module has no path and no class.
    """
    mine = found[found["about"] == CONCERNED.get(rule, "")] if found is not None else None
    if mine is None or not len(mine):
        return ()
    total = float(mine.drop_duplicates("rank")["total_ns"].sum())
    sums = mine.groupby("path", sort=False).agg(ns=("ns", "sum"), kind=("kind", "max"))
    outside = float(sums["ns"].get(OUTSIDE, 0.0))
    tree = sums.drop(OUTSIDE, errors="ignore").sort_values("ns", ascending=False, kind="stable")
    around = around_of([str(path) for path in tree.index])
    took = (tree["ns"] / total).tolist()
    inside: dict[int, list[int]] = {}
    for n, outer in enumerate(around):
        inside.setdefault(outer, []).append(n)
    chosen, todo = [], list(inside.get(-1, ()))
    while todo:
        n = todo.pop()
        large = [i for i in inside.get(n, ()) if took[i] >= LEAST_SHARE]
        if sum(took[i] for i in large) >= INSIDE_SHARE * took[n]:
            todo += large
        else:
            chosen.append(n)
    rows = [InModule(str(tree.index[n]), str(tree["kind"].iloc[n]), took[n]) for n in chosen]
    rows += [InModule("", "", outside / total)] if outside and rows else []
    return tuple(sorted((row for row in rows if row.share > 0), key=lambda row: -row.share)[:MOST_NAMED])
