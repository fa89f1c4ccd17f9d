"""What it costs that the ranks' batches have unequal lengths: all wait for the one with the most tokens in a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from dlprof.analysis.engine import JOB, Frame, Job, across_ranks, needs, per_rank
from dlprof.analysis.stragglers.own_time import MOST_ROWS
from dlprof.analysis.timeline.steady import steady_steps
from dlprof.errors import DoesNotApply, NotMeasured

# Fewer steps say little of how the step's length goes with the tokens: three figures are fitted to them.
_LEAST_STEPS = 20


@per_rank
def tokens_of_steps(steady_steps: Frame = needs(steady_steps)) -> pd.DataFrame:
    """Return how long steady steps were and how many tokens the rank had in them: step, dur_ns, tokens.

    Raises NotMeasured where the tokens of a step were not counted.
    """
    steps = steady_steps.head(MOST_ROWS)
    if not len(steps) or (steps["tokens"] <= 0).any():
        raise NotMeasured("how many tokens a step has was not counted: its model gets no two-dimensional tensor of ids")
    return pd.DataFrame({"step": steps["step"], "dur_ns": steps["length_ns"], "tokens": steps["tokens"]})


@dataclass(frozen=True)
class Unequal:
    """How the steps go with the ranks' tokens, times in ns of the mean step."""

    token_ns: float  # what the step is longer by for each token that the rank with the most has more than the mean rank
    noise: float  # standard error of that, as a share of it
    explained: float  # share of how much the steps differ in length that the tokens explain
    over: float  # tokens that the rank with the most has over the mean rank, in the mean step
    saving_ns: float  # with lengths alike in each step: then the ranks differ as their means do
    ranks: pd.DataFrame  # rank, tokens (mean), most (share of the steps in which it has the most), wait_ns


@across_ranks
def unequal(tokens_of_steps: Frame = needs(tokens_of_steps), job: Job = needs(JOB)) -> Unequal:
    """Return it by a fit of the step's length to the mean rank's tokens and to what the longest has over these.

    Ranks that do not wait for each other take as long as their own tokens ask for: then the second has no part in it.
    Raises NotMeasured where a rank is missing, or too few steps are there.
    """
    if job.world_size < 2:
        raise DoesNotApply("one rank has no other to wait for")
    if job.missing_ranks:
        raise NotMeasured("the tokens of some ranks are not here")
    tokens, took = (tokens_of_steps.pivot_table(index="step", columns="rank", values=v) for v in ("tokens", "dur_ns"))
    tokens, took = tokens.dropna(), took.dropna()
    if len(tokens) < _LEAST_STEPS or tokens.shape[1] < job.world_size:
        raise NotMeasured(f"{len(tokens)} steady steps of all ranks are too few")
    mean, most = tokens.mean(axis=1), tokens.max(axis=1)
    over, step = most - mean, took.mean(axis=1).to_numpy()
    known = np.column_stack([np.ones(len(mean)), mean, over])
    scale = np.maximum(known.max(axis=0), 1.0)
    fit, *_ = np.linalg.lstsq(known / scale, step, rcond=None)
    left, whole = float(((step - known / scale @ fit) ** 2).sum()), float(((step - step.mean()) ** 2).sum())
    token_ns = float(fit[2] / scale[2]) if over.max() > 0 else 0.0
    error = np.sqrt(left / (len(step) - 3) * np.linalg.pinv((known / scale).T @ (known / scale))[2, 2]) / scale[2]
    alike = float(tokens.mean().max())  # the ranks' means stay what they are
    ranks = pd.DataFrame(
        {
            "tokens": tokens.mean(),
            "most": tokens.eq(most, axis=0).mean(),
            "wait_ns": max(token_ns, 0.0) * (-tokens).add(most, axis=0).mean(),
        }
    )
    return Unequal(
        token_ns=token_ns,
        noise=float(error / abs(token_ns)) if token_ns else 0.0,
        explained=1 - left / whole if whole else 0.0,
        over=float(over.mean()),
        saving_ns=max(token_ns, 0.0) * (float(most.mean()) - alike),
        ranks=ranks.rename_axis("rank").reset_index(),
    )
