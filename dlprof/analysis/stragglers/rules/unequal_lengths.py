"""The ranks' batches have unequal lengths, and in each step all wait for the one with the most tokens.

Each rank draws its batches for itself. Where rows differ in length, another rank has the longest batch in each step,
and no rank is late for good: the mean of each is the same, and still the others wait in every exchange of gradients.

Needs the step logs of all ranks, with the tokens of each step: as padded, since padding is computed as well.

Saving: the length of the steps is fitted to the tokens of the mean rank, and to what the rank with the most has over
these. Ranks that wait for nobody need nothing for the second. The saving is what it costs per token, times the mean
over the steps of the most tokens of any rank, less the most of the ranks' means. What a rank costs that always has more
is no part of it: see straggler. It is capped at the time of the mean step in communication, which all waiting is.

What to change: a sampler that gives all ranks batches of alike length in the same step: sort the whole set (or large
pieces of it) by length, cut it into batches, and deal these out in turn (`LengthGroupedSampler` of transformers with
`train_sampling_strategy="group_by_length"`, before version 5 `group_by_length=True`; a distributed bucket sampler); or
batches of as many tokens each. Buckets that each rank makes for itself are worse than none.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from msgspec import Struct

from dlprof.analysis.engine import JOB, Frame, Job, across_ranks, needs, per_rank
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.panel import table
from dlprof.analysis.stragglers.own_time import MOST_ROWS, NOTABLE_SHARE
from dlprof.analysis.timeline.steady import steady_steps
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.units import duration, percent

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


class Unequal(Struct, frozen=True):
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


# What explains so little of how much the steps differ is not what they wait for.
_EXPLAINS = 0.25

_RANKS = {"rank": "rank", "tokens": "tokens a step", "most": "has the most in_share", "wait_ns": "waits_ns"}


def check(unequal: Unequal = needs(unequal)) -> Estimate:
    if unequal.saving_ns <= 0 or unequal.explained < _EXPLAINS:
        return nothing("how long a step takes does not go with what one rank has more tokens than the others")
    return Estimate(
        saving_ns=unequal.saving_ns,
        by_rank_ns=dict(zip(unequal.ranks["rank"].tolist(), unequal.ranks["wait_ns"].tolist(), strict=True)),
        noise_ns=unequal.noise * unequal.saving_ns,
        loses="is lost because all ranks wait for the one with the most tokens",
        seen=unequal,
    )


def explain(estimate: Estimate) -> Explanation:
    seen: Unequal = estimate.seen
    mean = float(seen.ranks["tokens"].mean())
    return Explanation(
        title="The rank with the most tokens in a step makes the others wait",
        summary=f"In the mean step it has {percent(seen.over / mean)} more than the mean rank, {mean:,.0f} tokens, and"
        f" no rank has the most in more than {percent(float(seen.ranks['most'].max()))} of the steps; the tokens"
        f" explain {percent(seen.explained)} of how much the steps differ, and 1,000 more on one rank cost"
        f" {duration(1_000 * seen.token_ns)}.",
        changes=(
            change(
                "a batch sampler that gives all ranks batches of alike length in the same step: sorted by length over"
                ' all ranks, and dealt out in turn (transformers: `train_sampling_strategy="group_by_length"`, before'
                " version 5 `group_by_length=True`), or as many tokens in each batch",
                numerics=True,
            ),
        ),
        evidence=table("Tokens of the ranks", seen.ranks, _RANKS),
        sure="Estimated from every steady step: as long as its mean rank's tokens ask for, with lengths alike. Batches"
        " are then of other samples, in another order.",
    )


RULE = Rule("Unequal lengths", check, explain, ("communication", "other"), notable=NOTABLE_SHARE)
