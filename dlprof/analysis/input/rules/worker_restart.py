"""Loader workers start anew in every epoch.

With `persistent_workers=False`, the default, each epoch begins with new worker processes and ends with waiting for them
to leave. The first batch then waits until a worker has started, opened its files and fetched; with the start method
spawn each of them imports the script and its libraries again. After a fork the script's own memory is copied page by
page as the next step writes to it. Validation has a loader of its own, and pays as well.

Needs the epochs that dlprof records beside the light layer: iter(), the first next() and the end of each, and the
workers' process ids, which tell whether they stayed. Of one epoch alone nothing can be said: how often workers start
anew is seen from the second on.

Saving: the starts, first batches and ends of all epochs but the first, and what the step after a start computes longer
than others; less what fetching one batch takes a worker that is there already, since no batch is prefetched over an
epoch's end. This time is not in the steady steps: it is spread over the training steps, and its share is that of the
training loop.

What to change: `persistent_workers=True`. Its price: the workers' memory stays, and they do not see what the script
changes in its data set between epochs. Longer epochs (a sampler that goes through the data several times) help as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from dlprof.analysis.engine import Job, Maybe
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing, worst
from dlprof.errors import NotMeasured
from dlprof.result import Change, Panel
from dlprof.units import count, duration


def check(restarts: pd.DataFrame, training_steps: Maybe[pd.Series[float]], job: Job) -> Estimate:
    """Estimate what the epochs with new workers cost, spread over the training steps."""
    frame = restarts
    if not len(frame):
        return nothing("no loader has workers")
    frame = frame.assign(ns=_freed(frame))
    steps = training_steps.get()
    anew = frame[frame["anew"] > 0]
    if not len(anew):
        if (frame["epochs"] < 2).all():
            raise NotMeasured("one epoch was recorded: whether the next begins with new workers is not known")
        return nothing("the workers stay from epoch to epoch")
    spread = anew[["ns", "noise_ns"]].mul(anew["anew"], axis=0).groupby(anew["rank"]).sum()
    spread = spread.reindex(steps.index).fillna(0.0).div(steps, axis=0)
    each = {int(str(r)): float(ns) for r, ns in spread["ns"].items()}
    return Estimate(
        saving_ns=float(spread["ns"].mean()),
        by_rank_ns=each,
        noise_ns=float(spread["noise_ns"].max()),
        scope="job",
        loses="goes to loader workers that start anew",
        explain=lambda: _explain(job, worst(each), anew[anew["rank"] == worst(each)]),
    )


def _explain(job: Job, rank: int, mine: pd.DataFrame) -> Explanation:
    mine = mine.sort_values("ns", ascending=False)
    first = mine.iloc[0]
    return Explanation(
        title="Loader workers start anew in every epoch",
        summary=f"On rank {rank} {count(int(mine['anew'].sum()), 'epoch')} began with new workers: starting them, the"
        f" first batch and step, and their leaving took {duration(_sum(first))} an epoch of"
        f" {_name(job, rank, first)}, of which {duration(first['ns'])} would be gone.",
        changes=tuple(_changes(job, rank, mine)),
        evidence=_evidence(job, rank, mine),
        sure="Measured in every epoch but the first; that the first batch then takes a worker as long as any other is"
        " assumed. Longer epochs than the recorded ones have less to gain.",
    )


def _freed(frame: pd.DataFrame) -> pd.Series[float]:
    """Return what an epoch would be shorter by; of a first batch that is not known how long it takes, nothing.

    Behind as much of it as the device works on, only what takes longer than that is gained.
    """
    first = frame["first_ns"].fillna(0.0)
    left = np.minimum(first, frame["fetch_ns"].fillna(math.inf))
    whole = first + frame[["start_ns", "end_ns", "after_ns"]].fillna(0.0).sum(axis=1)
    hidden = frame["hidden_ns"].fillna(0.0)
    freed: pd.Series[float] = (whole - hidden) - (left - hidden).clip(lower=0.0)
    return freed


def _sum(row: pd.Series[float]) -> float:
    return sum(float(row[c]) for c in ("start_ns", "first_ns", "end_ns", "after_ns") if math.isfinite(row[c]))


def _loader(job: Job, rank: int, number: int) -> dict[str, Any]:
    loaders = job.facts[rank].get("loaders") or []
    return dict(loaders[number]) if number < len(loaders) else {}


def _name(job: Job, rank: int, row: pd.Series[float]) -> str:
    role = _loader(job, rank, int(row["loader"])).get("role")
    return {"train": "training", "validation": "validation"}.get(str(role), f"loader {int(row['loader'])}")


def _changes(job: Job, rank: int, mine: pd.DataFrame) -> Iterator[Change]:
    for _, row in mine.iterrows():
        said = _loader(job, rank, int(row["loader"]))
        of = f"{count(said['num_workers'], 'worker')}, " if said.get("num_workers") else ""
        now = said.get("persistent_workers", False)
        yield change(
            f"`persistent_workers=True` (is {now}) on the loader of {_name(job, rank, row)}:"
            f" {of}{duration(row['ns'])} less an epoch",
            persistent_workers=(now, True),
        )
    if any(_loader(job, rank, int(n)).get("start_method") == "spawn" for n in mine["loader"]):
        yield change(
            "the workers are spawned: each imports the script anew; keep what it imports light, or"
            " `multiprocessing_context='forkserver'`",
            multiprocessing_context=("spawn", "forkserver"),
        )


_COLUMNS = {
    "start_ns": "iter()_ns",
    "first_ns": "first batch_ns",
    "fetch_ns": "any batch takes a worker_ns",
    "after_ns": "slower step_ns",
    "end_ns": "end_ns",
    "ns": "to gain_ns",
}


def _evidence(job: Job, rank: int, mine: pd.DataFrame) -> Panel:
    rows = tuple(
        (
            _name(job, rank, row),
            int(row["epochs"]),
            *(float(row[c]) if math.isfinite(row[c]) else None for c in _COLUMNS),
        )
        for _, row in mine.iterrows()
    )
    columns = ("loader of", "epochs", *_COLUMNS.values())
    return Panel("table", f"Epochs of rank {rank} that begin with new workers, means", rows, columns)


RULE = Rule("worker_restart", "Loader workers that start anew", check)
