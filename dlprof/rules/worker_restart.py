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
epoch's end. This time is not in the steady steps: it is spread
over the training steps, and its share is that of the training loop.

What to change: `persistent_workers=True`. Its price: the workers' memory stays, and they do not see what the script
changes in its data set between epochs. Longer epochs (a sampler that goes through the data several times) help as well.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from dlprof.diagnosis import Clear, Rule
from dlprof.engine import Measured
from dlprof.errors import NotMeasured
from dlprof.measures.loader import restarts
from dlprof.measures.whole_job import loop_step_ns, training_steps, whole_job
from dlprof.result import Finding, Panel
from dlprof.timeline.steps import step_means
from dlprof.units import count, duration, percent

# One word to change, so it is worth saying from where any finding is (diagnosis.LEAST_SHARE).
NOTABLE_SHARE = 0.02


def check(run: Measured) -> Finding | Clear:
    """Look at what the epochs with new workers cost, spread over the training steps."""
    frame = run.frame(restarts)
    if not len(frame):
        return Clear("no loader has workers")
    frame = frame.assign(ns=_freed(frame))
    steps = training_steps(run)
    anew = frame[frame["anew"] > 0]
    if not len(anew):
        if (frame["epochs"] < 2).all():
            raise NotMeasured("one epoch was recorded: whether the next begins with new workers is not known")
        return Clear("the workers stay from epoch to epoch")
    loop = loop_step_ns(run)
    each = (anew["ns"] * anew["anew"]).groupby(anew["rank"]).sum().reindex(steps.index).fillna(0.0) / steps
    noise = (anew["noise_ns"] * anew["anew"]).groupby(anew["rank"]).sum().reindex(steps.index).fillna(0.0) / steps
    gain = float(each.mean())
    if gain / loop < NOTABLE_SHARE:
        return Clear(f"{percent(gain / loop)} of the training loop's time goes to workers that start anew")
    worst = int(str(each.idxmax()))
    mine = anew[anew["rank"] == worst]
    first = mine.sort_values("ns", ascending=False).iloc[0]
    return Finding(
        title="Loader workers start anew in every epoch",
        summary=f"On rank {worst} {count(int(mine['anew'].sum()), 'epoch')} began with new workers: starting them, the"
        f" first batch and step, and their leaving took {duration(_sum(first))} an epoch of"
        f" {_name(run, worst, first)}, of which {duration(first['ns'])} would be gone.",
        verdict=f"{percent(gain / loop)} of the training loop's time goes to loader workers that start anew.",
        scope="job",
        saving_ns=gain,
        noise_ns=float(noise.max()),
        advice=_advice(run, worst, mine),
        evidence=_evidence(run, worst, mine),
        ranks=tuple(sorted(int(str(r)) for r in each[each >= each.max() / 2].index)),
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


def _loader(run: Measured, rank: int, number: int) -> dict[str, object]:
    loaders = run.facts[rank].get("loaders") or []
    return dict(loaders[number]) if number < len(loaders) else {}


def _name(run: Measured, rank: int, row: pd.Series[float]) -> str:
    role = _loader(run, rank, int(row["loader"])).get("role")
    return {"train": "training", "validation": "validation"}.get(str(role), f"loader {int(row['loader'])}")


def _advice(run: Measured, rank: int, mine: pd.DataFrame) -> tuple[str, ...]:
    advice = []
    for _, row in mine.sort_values("ns", ascending=False).iterrows():
        said = _loader(run, rank, int(row["loader"]))
        of = f"{count(int(str(said['num_workers'])), 'worker')}, " if said.get("num_workers") else ""
        advice.append(
            f"`persistent_workers=True` (is {said.get('persistent_workers', False)}) on the loader of"
            f" {_name(run, rank, row)}: {of}{duration(row['ns'])} less an epoch"
        )
    if any(_loader(run, rank, int(n)).get("start_method") == "spawn" for n in mine["loader"]):
        advice.append(
            "the workers are spawned: each imports the script anew; keep what it imports light, or"
            " `multiprocessing_context='forkserver'`"
        )
    return tuple(advice)


def _evidence(run: Measured, rank: int, mine: pd.DataFrame) -> Panel:
    def told(ns: float) -> str:
        return duration(ns) if math.isfinite(ns) else "–"

    rows = tuple(
        (
            _name(run, rank, row),
            int(row["epochs"]),
            *(told(float(row[c])) for c in ("start_ns", "first_ns", "fetch_ns", "after_ns", "end_ns")),
            duration(row["ns"]),
        )
        for _, row in mine.iterrows()
    )
    columns = (
        "loader of",
        "epochs",
        "iter()",
        "first batch",
        "any batch takes a worker",
        "slower step",
        "end",
        "to gain",
    )
    return Panel("table", f"Epochs of rank {rank} that begin with new workers, means", rows, columns)


RULE = Rule("worker_restart", "Loader workers that start anew", (restarts, step_means, whole_job), check)
