"""Loader workers start anew in every epoch.

With `persistent_workers=False`, the default, each epoch begins with new worker processes and ends with waiting for them
to leave. The first batch then waits until a worker has started, opened its files and fetched; with the start method
spawn each of them imports the script and its libraries again. After a fork the script's own memory is copied page by
page as the next step writes to it. Validation has a loader of its own, and pays as well.

Needs the epochs that dlprof records with the step log: iter(), the first next() and the end of each, and the workers'
process ids, which show whether they stayed. It takes two epochs to see how often workers start anew.

Saving: the starts, first batches and ends of all epochs but the first, and what the step after a start computes longer
than others; less what fetching one batch takes a worker that is there already, since no batch is prefetched over an
epoch's end. This time is not in the steady steps: it is spread over the training steps, and its share is that of the
training loop.

What to change: `persistent_workers=True`. Its price: the workers' memory stays, and they do not see what the script
changes in its data set between epochs. Longer epochs (a sampler that goes through the data several times) help as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from dlprof.analysis.engine import JOB, Frame, Job, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.input.loader import restarts
from dlprof.analysis.panel import table
from dlprof.analysis.step.whole_job import training_steps
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.units import count, duration

# From so many epochs for each training step on, the script makes an iterator for each batch.
_OFTEN = 0.5

_COLUMNS = {
    "of": "loader of",
    "epochs": "epochs",
    "start_ns": "iter()_ns",
    "first_ns": "first batch_ns",
    "fetch_ns": "any batch takes a worker_ns",
    "after_ns": "slower step_ns",
    "end_ns": "end_ns",
    "gain_ns": "to gain_ns",
}


def check(restarts: Frame = needs(restarts), training_steps: pd.Series[float] = needs(training_steps)) -> Estimate:
    if not len(restarts):
        raise DoesNotApply("no loader has workers")
    if not restarts["anew"].any():
        if (restarts["epochs"] < 2).all():
            raise NotMeasured("one epoch was recorded: whether workers start anew shows only with a second one")
        return nothing("the workers stay from epoch to epoch")
    anew = restarts[restarts["anew"] > 0]
    spread = anew[["gain_ns", "noise_ns"]].mul(anew["anew"], axis=0).groupby(anew["rank"]).sum()
    spread = spread.reindex(training_steps.index).fillna(0.0).div(training_steps, axis=0)
    return Estimate(
        saving_ns=float(spread["gain_ns"].mean()),
        by_rank_ns={int(str(rank)): float(ns) for rank, ns in spread["gain_ns"].items()},
        noise_ns=float(spread["noise_ns"].max()),
        scope="job",
        loses="goes to restarting loader workers",
    )


def explain(
    estimate: Estimate,
    restarts: Frame = needs(restarts),
    training_steps: pd.Series[float] = needs(training_steps),
    job: Job = needs(JOB),
) -> Explanation:
    rank, loaders = estimate.worst, job.facts[estimate.worst].get("loaders") or []
    mine = estimate.rows(restarts[restarts["anew"] > 0]).sort_values("gain_ns", ascending=False)
    known = [loaders[number] if number < len(loaders) else {} for number in mine["loader"]]
    mine = mine.assign(of=[_name(loader, number) for loader, number in zip(known, mine["loader"], strict=True)])
    first = mine.iloc[0]
    changes = []
    if float(mine["epochs"].max()) >= _OFTEN * float(training_steps.max()):
        # A persistent worker would still be told of the new epoch, and what was made ahead is thrown away.
        text = "one iterator for all steps: `batches = iter(loader)` before the loop, and `next(batches)` in it;"
        changes.append(change(f"{text} a new `iter(loader)` for each batch starts and ends the workers each time"))
    for of, gain_ns, loader in zip(mine["of"], mine["gain_ns"], known, strict=True):
        workers = f"{count(loader['num_workers'], 'worker')}, " if loader.get("num_workers") else ""
        now = loader.get("persistent_workers", False)
        text = f"`persistent_workers=True` (is {now}) on the loader of {of}: {workers}{duration(gain_ns)} less an epoch"
        changes.append(change(text, persistent_workers=(now, True)))
    if any(loader.get("start_method") == "spawn" for loader in known):
        text = "the workers are spawned: each imports the script anew; keep what it imports light, or"
        text += " `multiprocessing_context='forkserver'`"
        changes.append(change(text, multiprocessing_context=("spawn", "forkserver")))
    return Explanation(
        title="Loader workers start anew in every epoch",
        summary=f"On rank {rank} {count(int(mine['anew'].sum()), 'epoch')} began with new workers: starting them, the"
        f" first batch and step, and their leaving took {duration(first['took_ns'])} an epoch of {first['of']}, of"
        f" which {duration(first['gain_ns'])} would be gone.",
        changes=tuple(changes),
        evidence=table(f"Epochs of rank {rank} that begin with new workers, means", mine, _COLUMNS),
        sure="Measured in every epoch but the first; that the first batch then takes a worker as long as any other is"
        " assumed. Longer epochs than the recorded ones have less to gain.",
    )


def _name(loader: Mapping[str, Any], number: int) -> str:
    return {"train": "training", "validation": "validation"}.get(str(loader.get("role")), f"loader {number}")


RULE = Rule("Loader workers that start anew", check, explain, only_with="loader")
