"""A mixture of experts sends some ranks more tokens than others, and these wait for the fullest rank's experts.

Tokens go to the ranks of their experts, and back, by all-to-alls: nobody's come back before the rank with most tokens
is through. The router decides, so who that is may change with each layer and step; where it is always the same rank,
that one is a straggler, and this rule answers for it.

Needs the traces of all ranks with the sizes of their all-to-alls, of two steps or more. NCCL's have them from torch 2.2
on. gloo's have them where inputs are recorded (`--shapes`), and in dlprof's own recordings, which note them themselves.
Kernels that exchange tokens without all-to-alls (DeepEP) tell no sizes. Sizes that are the same in each step are no
tokens: tables of embeddings, or experts with a fixed capacity, which drop tokens instead of waiting.

Saving: in each layer, the slowest rank's experts with as many tokens as the mean rank gets, by what a token takes in
the measured steps; no more than what the ranks wait for each other in all-to-alls. It is the most that balance can
give: no router balances each layer of each step, and transfers are taken to last as long as they do.

What to change: weigh the router's auxiliary loss more, or choose experts with a bias that balances them; bound what an
expert takes by a capacity factor; put experts with many tokens on different ranks, or copies of them on several. All
but the last change what the model learns.
"""

from __future__ import annotations

from dlprof.analysis.engine import by_rank
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change
from dlprof.analysis.experts.panels.tokens import tokens_of
from dlprof.analysis.experts.tokens import Balance
from dlprof.units import duration

# As of a straggler, which a full rank is: no router is even in every step.
NOTABLE_SHARE = 0.05


def check(expert_balance: Balance) -> Estimate:
    ranks = expert_balance.ranks
    over = ((ranks["ratio"] - 1) * ranks["routed_ns"]).clip(lower=0.0)
    cost = expert_balance.saving_ns
    return Estimate(
        saving_ns=cost,
        by_rank_ns=by_rank(expert_balance.ranks.assign(ns=cost * over / (over.max() or 1.0)), "ns"),
        noise_ns=expert_balance.noise_ns,
        loses="is lost as ranks wait for the experts of the rank with most tokens",
        summary=f"the fullest rank gets {expert_balance.uneven:.2f} × the mean rank's tokens",
        seen=expert_balance,
    )


def explain(estimate: Estimate) -> Explanation:
    found: Balance = estimate.seen
    most = found.ranks.sort_values("ratio").iloc[-1]
    always = f"Over all of them rank {int(most['rank'])} gets most, {most['ratio']:.2f} × the mean."
    if most["ratio"] - 1 < (found.uneven - 1) / 2:
        always = "Which rank that is changes: over all dispatches no rank gets much more than the mean."
    waits = found.ranks["wait_ns"]
    waiting = "" if waits.isna().all() else f" Ranks wait up to {duration(float(waits.max()))} a step in all-to-alls."
    return Explanation(
        title="Experts get uneven numbers of tokens",
        summary=f"In the mean dispatch the fullest rank gets {found.uneven:.2f} × the mean rank's tokens. {always}"
        f"{waiting}",
        changes=(
            change("weigh the router's auxiliary load-balancing loss more, or balance it by a bias", numerics=True),
            change("bound the tokens of an expert by a capacity factor: what is over is dropped", numerics=True),
            change("place experts that get many tokens on different ranks, or copies of them on several"),
        ),
        evidence=tokens_of(found),
        sure=f"Estimated from {found.steps} traced steps with the mean rank's tokens on each rank, by what a token"
        " takes in them. No router is so even: it is the most that balance can give.",
        at_most=True,
    )


RULE = Rule("Uneven tokens among experts", check, explain, ("computation", "communication"), notable=NOTABLE_SHARE)
