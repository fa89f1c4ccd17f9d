"""One rank's traced steps replayed as on another number of ranks: collectives that take longer, kernels with less work.

A rank passes on one number for each of the requested changes. A rank without a device has no replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis.engine import ALSO, RANK, Frame, Maybe, MeasureFailed, RankData, RankFacts, maybe, measure, needs
from dlprof.analysis.scaling.transfers import Fits
from dlprof.analysis.timeline import device, host
from dlprof.analysis.timeline.device import device_work
from dlprof.analysis.timeline.what_if import WhatIf, what_if
from dlprof.errors import NotMeasured
from dlprof.read.run import open_run

# Ranks of a run that are replayed.
MOST_RANKS = 8

COLUMNS = ("change", "other", "ratio")


@dataclass(frozen=True)
class Change:
    """A step on other ranks: how many a group of so many ranks then has, and how much of a kernel's work is left."""

    # (collective, ranks) → ranks, and whether these are on several hosts; others stay.
    groups: Mapping[tuple[str, int], tuple[int, bool]]
    compute: float = 1.0


def replays(
    changes: Sequence[Change], fits: Mapping[tuple[str, bool], Fits], several_hosts: bool, rank: RankData
) -> pd.DataFrame:
    """Return how long the rank's step is with each change, as a multiple of its step as it is.

    Columns: change (its place), other (1: by the other fits, 0: by the better ones), ratio. No rows where the trace
    cannot be replayed.
    """

    def ratios(
        what_if: Maybe[WhatIf] = maybe(what_if),
        device_work: Maybe[Frame] = maybe(device_work),
        rank: RankFacts = needs(RANK),
    ) -> pd.DataFrame:
        steps = what_if.or_none()
        if steps is None or steps.measured_ns <= 0:
            return pd.DataFrame({c: pd.Series(dtype=float) for c in COLUMNS})
        work = device_work.get().iloc[steps.replay.rows]
        rows = []
        for n, change in enumerate(changes):
            for other in (0, 1):
                durations = _durations(work, steps.replay.durations, change, fits, several_hosts, other, rank)
                rows.append((n, other, steps.left(durations)))
        return pd.DataFrame(rows, columns=list(COLUMNS))

    return rank.call(ratios)


def _durations(
    work: pd.DataFrame,
    now: NDArray[np.int64],
    change: Change,
    fits: Mapping[tuple[str, bool], Fits],
    several_hosts: bool,
    other: int,
    rank: RankFacts,
) -> NDArray[np.int64]:
    """Return how long each piece of work takes.

    The time of a collective beyond its fit is waiting for other ranks, and shrinks in proportion to their computation.
    """
    then = now.astype(float)
    if change.compute != 1.0:
        least = np.minimum(now, device.LEAST_KERNEL_NS)
        then = np.where(host.is_kind(work, "kernel"), least + (now - least) * change.compute, then)
    moving = np.flatnonzero(host.is_kind(work, "communication"))
    frame = work.iloc[moving][["collective", "group", "bytes"]].astype({"collective": "str", "group": "str"})
    groups = rank.trace_facts.get("groups") or {}
    world = int(rank.trace_facts.get("world_size") or rank.facts.get("world_size") or 1)
    for key, places in frame.groupby(["collective", "group", "bytes"]).indices.items():
        collective, group, size = cast("tuple[str, str, int]", key)
        ranks = len((groups.get(group) or {}).get("ranks") or ()) or world
        known = float(size) if size > 0 else None
        to, several = change.groups.get((collective, ranks), (ranks, several_hosts))
        moves = _predicted_ns(fits, (collective, several_hosts), other, known, ranks)
        longer = _predicted_ns(fits, (collective, several), other, known, to) - moves
        took = now[moving[places]]
        then[moving[places]] = took + longer - np.maximum(took - moves, 0.0) * (1 - change.compute)
    durations: NDArray[np.int64] = np.rint(np.maximum(then, 0.0)).astype(np.int64)
    return durations


def _predicted_ns(
    fits: Mapping[tuple[str, bool], Fits], key: tuple[str, bool], other: int, size: float | None, ranks: int
) -> float:
    """Return what a collective takes by the fits of its kind, ns; 0 where there are none."""
    mine = fits.get(key) or fits.get((key[0], not key[1]))
    return 0.0 if mine is None else mine.predicted_ns(size, ranks)[other]


def replays_of(
    paths: Mapping[int, Sequence[Path]], jobs: int | None = None
) -> Callable[[int, Sequence[Change], Mapping[tuple[str, bool], Fits]], dict[int, tuple[float, float]]]:
    """Return a function that replays the runs at these paths, by their number of ranks.

    At most MOST_RANKS ranks of a run are replayed, spread evenly. It returns {} where nothing can be replayed.
    """

    def replayed(
        ranks: int, changes: Sequence[Change], fits: Mapping[tuple[str, bool], Fits]
    ) -> dict[int, tuple[float, float]]:
        frames = []
        for path in paths.get(ranks, ()):
            run = open_run(path)
            chosen = run.ranks[:: -(-len(run.ranks) // MOST_RANKS)]
            several = len(run.hosts) > 1
            also = partial(replays, (Change({}), *changes), fits, several)
            with suppress(NotMeasured, MeasureFailed):
                frames.append(measure(replace(run, ranks=chosen), [], jobs, also=also).frame(ALSO))
        if not frames or not sum(map(len, frames)):
            return {}
        means = pd.concat(frames).groupby(["change", "other"])["ratio"].mean()
        now = means[0]
        return {n: (float(means[n + 1, 0] / now[0]), float(means[n + 1, 1] / now[1])) for n in range(len(changes))}

    return replayed
