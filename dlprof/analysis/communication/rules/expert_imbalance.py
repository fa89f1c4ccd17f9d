"""A mixture of experts sends some ranks more tokens than others, and all ranks wait for the fullest rank's experts.

Tokens travel to the ranks of their experts and back by all-to-alls, so no rank gets its tokens back before the rank
with most tokens is done. The router decides, so the fullest rank may change with each layer and step. If it is always
the same rank, that rank is a straggler, and this rule reports it instead of `straggler`.

Needs the traces of all ranks with the sizes of their all-to-alls, and two steps or more. NCCL's kernels have them from
torch 2.2 on; gloo's where inputs are recorded (`--shapes`), and in recordings by dlprof, which note them. Kernels that
exchange tokens without all-to-alls (DeepEP) show no sizes. Sizes that are the same in each step are not tokens, but
sharded embedding tables or experts with a fixed capacity, which drop tokens instead of waiting. Sizes are those of
ranks: tokens per expert are known only where dlprof recorded that each rank holds one expert of a layer.

Saving: in each layer, the time of the slowest rank's experts less their time with the mean rank's number of tokens, by
the measured time of a token; at most the time that ranks wait for each other in all-to-alls. Transfers are assumed to
take as long as now. It is an upper limit: no router balances each layer of each step.

What to change: increase the weight of the router's auxiliary loss, or balance the experts with a bias; limit the tokens
of an expert with a capacity factor; put experts with many tokens on different ranks, or replicate them. All but the
last change what the model learns.
"""

from __future__ import annotations

from dlprof.analysis.communication.experts import Balance, expert_balance
from dlprof.analysis.engine import by_rank, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change
from dlprof.analysis.panels.communication import tokens_of
from dlprof.units import duration

# As of a straggler, which a full rank is: no router is even in every step.
NOTABLE_SHARE = 0.05


def check(expert_balance: Balance = needs(expert_balance)) -> Estimate:
    ranks = expert_balance.ranks
    over = ((ranks["ratio"] - 1) * ranks["routed_ns"]).clip(lower=0.0)
    cost = expert_balance.saving_ns
    return Estimate(
        saving_ns=cost,
        by_rank_ns=by_rank(expert_balance.ranks.assign(ns=cost * over / (over.max() or 1.0)), "ns"),
        noise_ns=expert_balance.noise_ns,
        loses="is lost while ranks wait for the experts of the rank with most tokens",
        summary=f"the fullest rank gets {expert_balance.uneven:.2f} × the mean rank's tokens",
        seen=expert_balance,
    )


def explain(estimate: Estimate) -> Explanation:
    found: Balance = estimate.seen
    most = found.ranks.sort_values("ratio").iloc[-1]
    always = f"On average rank {int(most['rank'])} gets most, {most['ratio']:.2f} × the mean."
    if most["ratio"] - 1 < (found.uneven - 1) / 2:
        always = "The fullest rank changes: over all dispatches no rank gets much more than the mean."
    waits = found.ranks["wait_ns"]
    waiting = "" if waits.isna().all() else f" Ranks wait up to {duration(float(waits.max()))} a step in all-to-alls."
    return Explanation(
        title="Experts get uneven numbers of tokens",
        summary=f"In the mean dispatch the fullest rank gets {found.uneven:.2f} × the mean rank's tokens. {always}"
        f"{waiting}",
        changes=(
            change("put experts that get many tokens on different ranks, or replicate them"),
            change(
                "increase the weight of the router's auxiliary load-balancing loss, or balance the experts with a bias",
                numerics=True,
                training=True,
            ),
            change("limit each expert's tokens (capacity factor): others are dropped", numerics=True, training=True),
        ),
        evidence=tokens_of(found),
        sure=f"Estimated from {found.steps} traced steps, as if each rank got the mean number of tokens. No router is"
        " that even, so this is the most that balance can save.",
        at_most=True,
    )


RULE = Rule("Uneven tokens among experts", check, explain, ("computation", "communication"), notable=NOTABLE_SHARE)
