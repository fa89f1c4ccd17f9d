"""The tree of a model's modules: the time of each with all modules inside it, repeated layers as one row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.compute.peaks import arithmetic
from dlprof.analysis.engine import Frame, Maybe, across_ranks, maybe, needs, per_rank
from dlprof.analysis.memory.memory import held_by_module
from dlprof.analysis.modules.work import GRAPH, OUTSIDE, module_work
from dlprof.analysis.timeline.device import has_device
from dlprof.analysis.timeline.paths import folded, parent
from dlprof.analysis.timeline.steps import Timing, timing

# The parts of a module's time, and parts outside modules.
PARTS = ("forward", "recompute", "backward", "communication")
GRAPHS, IDLE = "graphs", "idle"
_NS = [f"{part}_ns" for part in PARTS]

_ROUNDING = 1e-6  # of a step

# Rows of one rank that travel, and rows of the tree: the largest. Deeper modules count to those around them.
MOST_OF_RANK, MOST_ROWS = 400, 200

# A repeated layer is named if it takes so many times the median one on most ranks, and the difference is this share of
# the step: less is chance on a busy machine.
SLOW, NOTABLE_SHARE = 1.25, 0.01

# What torch.compile did to a module.
FLAGS = ("compiled", "fused")

_TIMES = ["ns", *_NS, "host_ns", "device_ns", "computing_ns"]
_SUMS = [*_TIMES, "flops", "copied_bytes", "moved_bytes", "parameter_bytes", "held_bytes"]
_SPREAD: dict[str, Any] = {"modules": 1, "slowest": "", "slowest_ns": 0.0, "typical_ns": 0.0}


@per_rank
def module_tree(
    module_work: Frame = needs(module_work),
    modules: Maybe[Frame] = maybe(schema.MODULES),
    held_by_module: Maybe[Frame] = maybe(held_by_module),
    has_device: bool = needs(has_device),
    timing: Timing = needs(timing),
) -> pd.DataFrame:
    """Return the time of each module in a rank's mean steady traced step, with all modules inside it, largest first.

    Repeated layers are one row; there are at most MOST_OF_RANK rows. Columns: path (folded), kind (its class; "": a
    container that is never called), modules (how many fold into it), calls, ns (of the step) and its parts forward_ns,
    recompute_ns, backward_ns and communication_ns, host_ns, device_ns (of all device work that it launched, overlapped
    or not), computing_ns (device_ns, or ns on a CPU, without communication), flops, copied_bytes, moved_bytes (read and
    written by operators), parameter_bytes, held_bytes (parameters, gradients, optimizer state and activations; NaN: not
    known), slowest (the module of the row with the longest time), slowest_ns and typical_ns (their median), compiled
    (torch.compile made one region of it), fused (the modules of its compiled kernels are known), and on_device, the
    same in all rows. Time outside modules has the path OUTSIDE and as kind a part of the step, GRAPHS (CUDA graphs) or
    IDLE (the device's).
    """
    own_ns, communicates = module_work["exposed_ns"], module_work["part"] == "communication"
    computing = (module_work["device_ns"] if has_device else own_ns).where(~communicates, 0.0)
    work = module_work.assign(ns=own_ns, computing_ns=computing, moved_bytes=0.0, parameter_bytes=0.0, held_bytes=0.0)
    outside = work["path"] == OUTSIDE
    beyond = work.assign(kind=work["part"].mask(work["kind"] == GRAPH, GRAPHS))[outside]
    beyond = _by_part(beyond, "kind").reset_index()
    step = iv.total(timing.windows) / len(timing.windows)
    idle = step - float(own_ns.sum())
    if has_device and idle > _ROUNDING * step:
        beyond = pd.concat([beyond, pd.DataFrame([dict.fromkeys(beyond, 0.0) | {"kind": IDLE, "ns": idle}])])
    beyond = beyond.assign(path=OUTSIDE, **dict.fromkeys(FLAGS, False), **_SPREAD)
    own = _by_part(work[~outside], "path")
    # The model itself has a row also where the rank has only a stage of it.
    own = own.reindex([*own.index, *([] if "" in own.index else [""])], fill_value=0.0)
    paths = [str(path) for path in own.index]
    own = own.assign(
        parameter_bytes=_bytes_of(paths, modules.or_none(), "path", "parameter_bytes"),
        moved_bytes=_bytes_of(paths, _counted(modules.or_none()), "path", "moved_bytes"),
        held_bytes=_bytes_of(paths, held_by_module.or_none(), "module", "bytes"),
    )
    kinds = dict.fromkeys(with_parents(paths), "")
    kinds |= {str(path): str(kind) for path, kind in work[~outside].groupby("path")["kind"].first().items()}
    # As the model was built: a compiled layer does not show all that is inside it.
    names = folded({**built(modules.or_none()), **kinds})
    whole = _added(own.groupby([names[path] for path in paths], sort=False))
    tree = inclusive(whole[_SUMS])
    tree = tree.assign(calls=whole["calls"].reindex(tree.index, fill_value=0.0))
    kind_of = {names[path]: kind for path, kind in kinds.items()}
    tree = tree.assign(kind=[kind_of[path] for path in tree.index])
    tree = tree.join(_spread(inclusive(own[["ns"]])["ns"], names))
    for flag in FLAGS:
        mine = {names[str(path)] for path in work.loc[~outside & (work[flag] > 0), "path"]}
        tree = tree.assign(**{flag: [path in mine for path in tree.index]})
    tree = largest(tree, MOST_OF_RANK).rename_axis("path").reset_index()
    return pd.concat([tree, beyond], ignore_index=True).assign(on_device=has_device)


def _counted(modules: pd.DataFrame | None) -> pd.DataFrame | None:
    return None if modules is None or (modules["moved_bytes"] < 0).any() else modules


def built(modules: pd.DataFrame | None) -> dict[str, str]:
    """Return the class of each recorded module, by its path."""
    if modules is None:
        return {}
    return dict(zip(modules["path"].astype(str), modules["kind"].astype(str), strict=True))


def _bytes_of(paths: Sequence[str], rows: pd.DataFrame | None, by: str, column: str) -> pd.Series[float]:
    """Return the recorded bytes of each module itself, and of modules inside it that have no row.

    NaN where nothing was recorded.
    """
    if rows is None or not len(rows):
        return pd.Series(np.nan, list(paths))
    held = rows.groupby(by, observed=True)[column].sum().astype(float)
    known = set(paths)
    at = []
    for path in map(str, held.index):
        while path and path not in known:
            path = parent(path)
        at.append(path)
    return held.groupby(at).sum().reindex(list(paths), fill_value=0.0)


def _by_part(work: pd.DataFrame, key: str) -> pd.DataFrame:
    """Add up work by a key, its parts as columns; calls are those of the forward pass."""
    forward = work["part"] == "forward"
    parts = {f"{part}_ns": work["ns"].where(work["part"] == part, 0.0) for part in PARTS}
    by = work.assign(calls=work["calls"].where(forward, 0.0), **parts).groupby(key, sort=False)
    return _added(by[["calls", *_SUMS]])


def with_parents(paths: Iterable[str]) -> dict[str, None]:
    """Return paths with those of all modules around them; "", the model itself, only where it is among them."""
    every: dict[str, None] = {}
    for path in paths:
        every[path] = None
        while (path := parent(path)) and path not in every:
            every[path] = None
    return every


def inclusive(own: pd.DataFrame) -> pd.DataFrame:
    """Return figures of modules with those of all modules inside, given those of each alone by its path.

    A figure that is NaN of one is NaN of all around it. Modules around those that are given get a row.
    """
    paths = list(with_parents(str(path) for path in own.index))
    place = {path: i for i, path in enumerate(paths)}
    values = own.reindex(paths, fill_value=0.0).to_numpy(dtype=float, copy=True)  # pandas' own is read-only
    depth = np.array([path.count(".") + 1 if path else 0 for path in paths], dtype=np.int64)
    around = np.array([place.get(parent(path), -1) if path else -1 for path in paths], dtype=np.int64)
    for level in range(int(depth.max(initial=0)), 0, -1):
        rows = np.flatnonzero((depth == level) & (around >= 0))
        np.add.at(values, around[rows], values[rows])
    return pd.DataFrame(values, paths, own.columns)


def _added(by: Any) -> pd.DataFrame:
    """Return the sums of groups, NaN where a value is."""
    sums: pd.DataFrame = by.sum()
    return sums.where(by.count().eq(by.size(), axis=0))


def _spread(ns: pd.Series[float], names: Mapping[str, str]) -> pd.DataFrame:
    """Return how many modules each folded path stands for, which takes longest, and what that and the median take."""
    each = pd.DataFrame({"ns": ns.to_numpy(), "path": ns.index, "name": [names[path] for path in ns.index]})
    each = each.sort_values("ns", ascending=False, kind="stable")
    by = each.groupby("name", sort=False)
    found = by.agg(
        modules=("ns", "size"), slowest=("path", "first"), slowest_ns=("ns", "max"), typical_ns=("ns", "median")
    )
    return found.assign(slowest=found["slowest"].where(found["modules"] > 1, ""))


def around_of(paths: Sequence[str]) -> list[int]:
    """Return the place of the nearest module around each path among the paths; -1: there is none."""
    place = {path: i for i, path in enumerate(paths)}
    found = []
    for path in paths:
        at = path
        while at:
            at = parent(at)
            if at in place:
                break
        found.append(place.get(at, -1) if path else -1)
    return found


def _without_needless(tree: pd.DataFrame) -> pd.DataFrame:
    """Leave out what is never called and holds one row alone, as `encoder.layer` does of `encoder.layer.*`, or all."""
    around = np.array(around_of(tree.index.tolist()), dtype=np.int64)
    children = np.bincount(around[around >= 0], minlength=len(tree))
    needed: pd.DataFrame = tree[((children != 1) & (tree.index != "")) | (tree["kind"] != "").to_numpy()]
    return needed


def largest(tree: pd.DataFrame, most: int) -> pd.DataFrame:
    """Return the rows with most `ns`, so that with a module those around it are there."""
    depth = np.array([path.count(".") + 1 if path else 0 for path in tree.index], dtype=np.int64)
    return tree.iloc[np.lexsort((depth, -tree["ns"].to_numpy()))[:most]]


@across_ranks
def module_means(module_tree: Frame = needs(module_tree), arithmetic: Maybe[Frame] = maybe(arithmetic)) -> pd.DataFrame:
    """Return the tree of the model's modules, mean of the ranks: each module above those inside it, the largest first.

    Columns: those of `module_tree`, and depth, own_ns (in none of the rows below it), share (of the step), flops_per_s
    (while it computes), mfu (of the device's peak; NaN: not known), rank and rank_ns (that with most); in all rows the
    same total_ns (of a step) and ranks (of which it is the mean). Here slowest is "" where no repeated layer is clearly
    slower. What no module does comes last. There are MOST_ROWS at most; what lies deeper is in the rows around it.
    """
    ranks = module_tree["rank"].nunique()
    inside = module_tree["path"] != OUTSIDE
    tree = largest(_without_needless(_over_ranks(module_tree[inside], "path", ranks)), MOST_ROWS)
    around = np.array(around_of(tree.index.tolist()), dtype=np.int64)
    below = np.bincount(around[around >= 0], tree["ns"].to_numpy()[around >= 0], len(tree))
    order, depth = _down(around)
    tree = tree.assign(own_ns=np.maximum(tree["ns"] - below, 0.0), depth=depth).iloc[order]
    beyond = _over_ranks(module_tree[~inside], "kind", ranks).sort_values("ns", ascending=False)
    beyond = beyond.assign(own_ns=beyond["ns"], depth=0, kind=beyond.index).rename(index=lambda _: OUTSIDE)
    rows = pd.concat([tree, beyond]).rename_axis("path").reset_index()
    total = float(rows.loc[rows["depth"] == 0, "ns"].sum())
    rate = rows["flops"] / rows["computing_ns"].replace(0.0, np.nan) * 1e9
    # The peak of the step's one precision: NaN of several.
    counted = arithmetic.or_none()
    peak = np.nan if counted is None else float(counted["peak"].mean())
    slower = rows["slowest_ns"] - rows["typical_ns"]
    clearly = (rows["slowest_ns"] >= SLOW * rows["typical_ns"]) & (slower >= NOTABLE_SHARE * total)
    return rows.assign(
        share=rows["ns"] / total if total else 0.0,
        flops_per_s=rate,
        mfu=rate / peak,
        slowest=rows["slowest"].where(clearly, ""),
        on_device=bool(module_tree["on_device"].any()),
        total_ns=total,
        ranks=ranks,
    )


def _over_ranks(rows: pd.DataFrame, key: str, ranks: int) -> pd.DataFrame:
    """Return the mean over the ranks by a key; a row that a rank does not have counts as 0."""
    by = rows.groupby(key, sort=False)
    means = _added(by[["calls", *_SUMS]]) / ranks
    worst = rows.loc[by["ns"].idxmax(), [key, "rank", "ns"]].set_index(key).rename(columns={"ns": "rank_ns"})
    votes = rows.groupby([key, "slowest"], sort=False)["rank"].transform("size") > by["rank"].transform("size") / 2
    odd = (rows["slowest_ns"] - rows["typical_ns"]).where(votes, -1.0).groupby(rows[key], sort=False).idxmax()
    spread = rows.loc[odd, [key, "slowest", "slowest_ns", "typical_ns"]].set_index(key)
    spread["slowest"] = spread["slowest"].where(votes[odd].to_numpy(), "")
    return (
        means.join(by.agg(kind=("kind", "max"), modules=("modules", "max"), **{f: (f, "any") for f in FLAGS}))
        .join(worst)
        .join(spread)
    )


def _down(around: NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """Return the rows of a tree from the top, each above those inside it in their order, and the depth of each."""
    below: dict[int, list[int]] = {}
    for row, outer in enumerate(around.tolist()):
        below.setdefault(outer, []).append(row)
    order, depth = [], [0] * len(around)
    todo = [(row, 0) for row in reversed(below.get(-1, []))]
    while todo:
        row, depth[row] = todo.pop()
        order.append(row)
        todo += [(inner, depth[row] + 1) for inner in reversed(below.get(row, []))]
    return order, depth
