"""Batches are loaded that nothing trains on.

A script that counts its batches with `len(list(loader))`, looks at one to learn its shape, skips those that it does not
want, or goes through the loader to where a job had stopped, waits for batches that it throws away.

Needs the step log: a step that takes more batches than most do, and calls the model for fewer, has thrown the others
away. Batches that every step throws away are not told from those that gradients are accumulated over.

Saving: the waits for these batches, over the whole job, spread over the training steps: the most that it can be where
workers meanwhile made those that are used. Its share is that of the training loop.

What to change: `len(loader)` to count batches; what is not wanted left out by the sampler or the data set's index, not
after loading; to resume, the position of the sampler, or `torchdata`'s `StatefulDataLoader`.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof import schema
from dlprof.analysis.engine import Frame, Maybe, maybe, needs, per_rank
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.step.whole_job import training_steps
from dlprof.analysis.timeline.steady import light_steps
from dlprof.errors import NotMeasured
from dlprof.units import count, duration


@per_rank
def thrown_away(light_steps: Frame = needs(light_steps), loading: Maybe[Frame] = maybe(schema.LOADING)) -> pd.DataFrame:
    """Return one row: unused (batches that no step used), steps (that loaded these), ns (that waiting for them took).

    Raises NotMeasured where the model's calls or the loader's were not seen.
    """
    usual = light_steps[light_steps["steady"]]
    fetches, forwards = (light_steps[name].clip(lower=0).to_numpy(dtype=float) for name in ("fetches", "forwards"))
    if not len(usual) or not usual["forwards"].median() >= 1 or not usual["fetches"].median() >= 1:
        raise NotMeasured("most steps take no batch of a loader, or no call of a model was seen in them")
    trains = (light_steps["kind"] == "train").to_numpy()
    used = np.maximum(forwards, np.where(trains, usual["fetches"].median(), 0.0))
    # The next() that finds an epoch at its end loads nothing; each time a loader is begun, there may be one.
    begun, rows = light_steps["first"].to_numpy(dtype=float), loading.or_none()
    if rows is not None:
        counts = rows[rows["kind"] == "start"].groupby("step").size()
        begun = np.maximum(begun, light_steps["step"].map(counts).fillna(0).to_numpy(dtype=float))
    unused = np.maximum(fetches - used - begun, 0.0)
    waited = light_steps["fetch_ns"].clip(lower=0).to_numpy(dtype=float) * unused / np.maximum(fetches, 1.0)
    row = (unused.sum(), np.count_nonzero(unused), waited.sum())
    return pd.DataFrame([row], columns=["unused", "steps", "ns"])


def check(
    thrown_away: Frame = needs(thrown_away), training_steps: pd.Series[float] = needs(training_steps)
) -> Estimate:
    each = thrown_away.set_index("rank")["ns"].div(training_steps).dropna()
    if not (thrown_away["unused"] > 0).any():
        return nothing("every batch is used", scope="job")
    return Estimate(
        saving_ns=float(each.max()),
        by_rank_ns={int(str(rank)): float(ns) for rank, ns in each.items()},
        scope="job",
        loses="is waiting for batches that nothing trains on",
        seen=thrown_away,
    )


def explain(estimate: Estimate) -> Explanation:
    mine = estimate.rows(estimate.seen).iloc[0]
    return Explanation(
        title="Batches are loaded that nothing trains on",
        summary=f"In {count(int(mine['steps']), 'step')} rank {estimate.worst} loaded"
        f" {count(int(mine['unused']), 'batch')} more than the model was called for, and waited"
        f" {duration(float(mine['ns']))} for them.",
        changes=(
            change(
                "`len(loader)` where batches are only counted; what is not wanted, left out by the sampler or the data"
                " set's index, not after loading; to resume, `torchdata`'s `StatefulDataLoader`"
                " (https://docs.pytorch.org/data/main/stateful_dataloader_tutorial.html)"
            ),
        ),
        sure="Measured over the whole job, estimated as all of these waits gone. A batch counts as used where the model"
        " is called for it.",
        at_most=True,
    )


RULE = Rule("Batches that nothing trains on", check, explain, only_with="loader")
