"""What each operator and each kernel takes of a step, by name, so that two runs can be told apart."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis.engine import Maybe, across_ranks, per_rank
from dlprof.analysis.timeline.steady import standard_errors
from dlprof.analysis.timeline.steps import Timing
from dlprof.errors import NotMeasured
from dlprof.result import MOST_WORK
from dlprof.units import short

# Names of kernels that templates made can be thousands of letters long.
LONGEST_NAME = 300


@per_rank
def work(
    timing: Timing,
    spans: Maybe[pd.DataFrame],
    has_device: bool,
    kernels: Maybe[pd.DataFrame],
    kernels_within: Maybe[NDArray[np.int64]],
    owners: Maybe[NDArray[np.int64]],
    own_times: Maybe[tuple[NDArray[np.int64], NDArray[np.float64]]],
) -> pd.DataFrame:
    """Return what operators and kernels take of a mean steady traced step: kind, name, calls, ns, noise_ns.

    On a device an operator has the kernels that it launched, each counts as a call; on a CPU the time that it spends in
    no other. noise_ns is the standard error over the traced steps, 0 of a single one. The heaviest first, MOST_WORK of
    each kind. Raises NotMeasured where no operator's work was traced.
    """
    windows = timing.windows
    if not len(windows):
        raise NotMeasured("no steps were traced")
    events = spans.get()
    n = len(windows)
    code, start = events["name"].cat.codes.to_numpy(), events["start_ns"].to_numpy()
    found = []
    if has_device:
        rows = kernels.get().index.to_numpy()
        dur = events["dur_ns"].to_numpy(dtype=float)[rows]
        step = kernels_within.get()
        by = owners.get()[rows]
        known = by >= 0
        found.append(_sums("operator", n, code[by[known]], step[known], dur[known]))
        found.append(_sums("kernel", n, code[rows], step, dur))
    else:
        rows, dur = own_times.get()
        at = start[rows]
        step = np.searchsorted(windows[:, 0], at, side="right") - 1
        step = np.where((step >= 0) & (at < windows[np.maximum(step, 0), 1]), step, -1)
        found.append(_sums("operator", n, code[rows], step, dur))
    frame = pd.concat(found, ignore_index=True)
    if not len(frame):
        raise NotMeasured("no operator's work was traced")
    names = events["name"].cat.categories
    named = np.array([short(str(names[i]), LONGEST_NAME) for i in frame["name"].tolist()], dtype=object)
    return frame.assign(name=pd.Series(named, dtype=object))


def _sums(kind: str, n: int, code: np.ndarray, step: np.ndarray, dur: np.ndarray) -> pd.DataFrame:
    """Add up what belongs to each of n steps (−1: to none), by the number of its name."""
    inside = step >= 0
    place, found = pd.factorize(code[inside])
    ns = np.bincount(place * n + step[inside], dur[inside], len(found) * n).reshape(-1, n)
    calls = np.bincount(place, minlength=len(found)) / n
    heaviest = np.argsort(-ns.sum(axis=1), kind="stable")[:MOST_WORK]
    return pd.DataFrame(
        {
            "kind": kind,
            "name": found[heaviest],
            "calls": calls[heaviest],
            "ns": ns[heaviest].mean(axis=1),
            "noise_ns": standard_errors(ns[heaviest]),
        }
    )


@across_ranks
def work_means(work: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `work` as the mean of the ranks, the heaviest first, MOST_WORK of each kind.

    What a rank does not have is nothing there. The noise is the mean of the ranks': what holds one of them up holds up
    all.
    """
    sums = work.groupby(["kind", "name"], as_index=False)[["calls", "ns", "noise_ns"]].sum()
    sums = sums.sort_values(["ns", "name"], ascending=[False, True], kind="stable", ignore_index=True)
    sums = sums[sums.groupby("kind").cumcount() < MOST_WORK].reset_index(drop=True)
    ranks = work["rank"].nunique()
    return sums.assign(**{name: sums[name] / ranks for name in ("calls", "ns", "noise_ns")})
