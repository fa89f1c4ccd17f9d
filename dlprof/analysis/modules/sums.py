"""Sums by module and part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis.modules.frames import COMMUNICATION, PARTS, Frames

# The path of time outside modules, and the class of a CUDA graph's replay outside modules.
OUTSIDE = "(outside of modules)"
GRAPH = "CUDA graph"

# The tree of a larger model is cut at the depth at which it has no more modules than this.
MOST_MODULES = 2_000

Sums = NDArray[np.float64]  # one for each part of: no module, each module in order, graphs outside of modules


def sums(
    frames: Frames, module: NDArray[np.int64], part: NDArray[np.integer[Any]], values: NDArray[Any] | None = None
) -> Sums:
    """Return sums of values, or counts, by module (−1: none, their number: a graph) and part."""
    key = (module + 1) * len(PARTS) + part
    size = (len(frames.paths) + 2) * len(PARTS)
    return np.bincount(key, weights=None if values is None else values.astype(float), minlength=size).astype(float)


def shared(frames: Frames, bucket: NDArray[np.int64], values: NDArray[Any], shares: NDArray[np.float64]) -> Sums:
    """Return the same of exchanges, by the shares that modules have of each one's bucket."""
    found = np.zeros((len(frames.paths) + 2, len(PARTS)))
    of = np.bincount(bucket, weights=values.astype(float), minlength=len(shares))
    found[1:-1, COMMUNICATION] = of @ shares
    return found.reshape(-1)


def table(frames: Frames, flags: Mapping[str, NDArray[np.int64]], **columns: Sums) -> pd.DataFrame:
    """Return a row for each path, kind (the class) and part in which any of the sums is neither 0 nor unknown.

    A last column for each of the `flags` is 1 for the modules that it lists, else 0.
    """
    count, width = len(frames.paths), len(PARTS)
    order = np.append(np.arange(1, count + 1), [0, count + 1])
    frame = pd.DataFrame(
        {
            "path": np.repeat(np.array([*frames.paths, OUTSIDE, OUTSIDE], dtype=object), width),
            "kind": np.repeat(np.array([*frames.classes, "", GRAPH], dtype=object), width),
            "part": np.tile(np.array(PARTS, dtype=object), count + 2),
            **{name: values.reshape(count + 2, width)[order].reshape(-1) for name, values in columns.items()},
            **{name: np.repeat(np.isin(np.arange(count + 2), of), width).astype(int) for name, of in flags.items()},
        }
    )
    used = (frame[list(columns)].fillna(0.0).to_numpy() != 0).any(axis=1)
    return _folded(frame[used].reset_index(drop=True), list(flags))


def _folded(frame: pd.DataFrame, flags: Sequence[str]) -> pd.DataFrame:
    """Where there are too many modules, add the deepest ones to the modules around them."""
    paths = frame["path"]
    depth = paths.str.count(r"\.") + 1
    deep = int(depth.max()) if len(paths) else 0
    while paths.nunique() > MOST_MODULES and deep > 1:
        deep -= 1
        paths = paths.where(depth <= deep, paths.str.split(".").str[:deep].str.join("."))
    whole = paths == frame["path"]
    if whole.all():
        return frame
    classes = frame[whole].drop_duplicates("path").set_index("path")["kind"]
    folded = frame.assign(path=paths, kind=frame["kind"].where(whole, paths.map(classes).fillna("")))
    summed: pd.DataFrame = folded.groupby(["path", "kind", "part"], sort=False).sum(min_count=1).reset_index()
    return summed.assign(**{name: (summed[name] > 0).astype(int) for name in flags})
