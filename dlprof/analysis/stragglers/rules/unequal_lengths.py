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

from dlprof.analysis.engine import needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.panel import table
from dlprof.analysis.stragglers.lengths import Unequal, unequal
from dlprof.analysis.stragglers.own_time import NOTABLE_SHARE
from dlprof.units import duration, percent

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
