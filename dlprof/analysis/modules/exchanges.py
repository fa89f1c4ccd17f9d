"""Which modules' gradients DistributedDataParallel reduces in which exchange.

It puts the parameters into buckets and reduces these in the same order in each backward pass. Where the buckets were
recorded, an exchange belongs to the modules of the bucket's parameters, in proportion to their bytes; otherwise to the
model.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis.engine import Frame, needs, within_rank
from dlprof.analysis.modules.frames import Frames, module_frames
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.paths import around
from dlprof.errors import NotMeasured

# Calls that issue an exchange. Other spans of an exchange in a CPU run last until it has completed.
CALLS = ("c10d", "_c10d", "record_param_comms")


@within_rank
def bucket_shares(
    modules: Frame = needs(schema.MODULES), module_frames: Frames = needs(module_frames)
) -> NDArray[np.float64]:
    """Return for each bucket (a row, in the order in which they are reduced) the share of each of the trace's modules.

    A module that is not called in the trace counts to the one around it. Raises NotMeasured where no bucket is known.
    """
    known = modules[(modules["bucket"] >= 0) & (modules["parameter_bytes"] > 0)]
    if known.empty:
        raise NotMeasured("which parameters DistributedDataParallel reduces together is not recorded")
    place = {path: n for n, path in reversed(list(enumerate(module_frames.paths)))}
    module = np.array([nearest(str(path), place) for path in known["path"]], dtype=np.int64)
    if (module < 0).any():
        raise NotMeasured("the trace shows another model than the recorded one")
    sizes = np.zeros((int(known["bucket"].max()) + 1, len(module_frames.paths)))
    np.add.at(sizes, (known["bucket"].to_numpy(), module), known["parameter_bytes"].to_numpy())
    shares: NDArray[np.float64] = sizes / np.maximum(sizes.sum(axis=1, keepdims=True), 1)
    return shares


def frames_of_calls(spans: pd.DataFrame, rows: NDArray[np.int64], frame: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the spans' frames, where those of exchanges that run on threads of their own are the issuing calls'.

    `rows` are the host's exchanges. They begin in the order in which they were issued: where there are as many as
    calls, the n-th is the n-th call's, else what the last call before it issued.
    """
    found = frame.copy()
    calls = rows[host.is_named(spans, "c10d", "_c10d")[rows]]
    works = rows[~host.is_named(spans, *CALLS)[rows]]
    alone = works[frame[works] < 0]
    if not len(calls) or not len(alone):
        return found
    start = spans["start_ns"].to_numpy()
    works, calls = (of[np.argsort(start[of], kind="stable")] for of in (works, calls))
    place = np.searchsorted(start[calls], start[works], side="right") - 1
    issued = np.arange(len(works)) if len(works) == len(calls) else place
    chosen = (frame[works] < 0) & (place >= 0)
    found[works[chosen]] = frame[calls[issued[chosen]]]
    return found


def buckets_of(
    spans: pd.DataFrame,
    rows: NDArray[np.int64],
    frame_start: NDArray[np.int64],
    steps: NDArray[np.int64],
    count: int,
    *,
    finds_unused: bool,
) -> NDArray[np.int64]:
    """Return the bucket of exchanges that frames issued which began at `frame_start`; −1: of none, or not known.

    `steps`: when the traced steps begin. Where a step has another number of exchanges than buckets, or several times as
    many as a job that accumulates gradients has, it is not known which is which. Where DistributedDataParallel looks
    for unused parameters, it exchanges behind the last bucket which were used.
    """
    found = np.full(len(rows), -1, dtype=np.int64)
    # Integers are no gradients: they tell which parameters were used. Traces of a CPU hold no type.
    reduces = host.is_one_of(spans["collective"], "all_reduce") & ~host.is_one_of(spans["dtype"], "int32", "int64")
    unknown = finds_unused & host.is_one_of(spans["dtype"], "")
    step = np.searchsorted(steps, frame_start, side="right")
    # The same exchange is a call, within it another one, a range until it is through, and a kernel: each by its name.
    of = pd.factorize(spans["name"].cat.codes.to_numpy()[rows].astype(np.int64) * (len(steps) + 1) + step)[0]
    mine = np.flatnonzero(reduces[rows])
    if not len(mine):
        return found
    order = mine[np.lexsort((frame_start[mine], of[mine]))]
    sizes = np.bincount(of[mine])
    place = np.arange(len(order)) - (np.cumsum(sizes) - sizes)[of[order]]
    each = count + unknown[rows[order]].astype(np.int64)
    found[order] = np.where((sizes[of[order]] % each == 0) & (place % each < count), place % each, -1)
    return found


def common(shares: NDArray[np.float64], paths: tuple[str, ...]) -> NDArray[np.int64]:
    """Return for each bucket the innermost module around all of its parameters; −1: none."""
    place = {path: n for n, path in reversed(list(enumerate(paths)))}
    found = [nearest(around(paths[n] for n in np.flatnonzero(of).tolist()), place) for of in shares]
    return np.array(found, dtype=np.int64)


def nearest(path: str, place: dict[str, int]) -> int:
    """Return the place of a path, or of the nearest one around it; −1: none."""
    while path and path not in place:
        path = path.rpartition(".")[0]
    return place.get(path, -1)
