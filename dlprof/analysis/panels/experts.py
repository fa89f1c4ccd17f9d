"""Tokens that each rank's experts receive, how long these compute, and how long the rank waits for the others."""

from __future__ import annotations

import pandas as pd

from dlprof.analysis.communication.experts import Balance, destinations, expert_balance, routed
from dlprof.analysis.engine import Frame, Maybe, maybe, needs
from dlprof.analysis.panel import Picture, table
from dlprof.errors import NotMeasured
from dlprof.result import Panel
from dlprof.units import count

# If there are more ranks, those with most tokens are shown.
MOST_ROWS = 32


_SENT = {"rank": "rank", "tokens": "tokens a step", "ratio": "of the mean_times"}


def tokens_of(found: Balance) -> Panel:
    """Return the tokens that each rank receives, most first; of each expert where every rank holds one of a layer."""
    what = "tokens" if found.in_rows else "elements"
    columns = {"expert": "expert"} if found.layers else {}
    columns |= {
        "rank": "rank",
        "each": f"{what} a dispatch",
        "ratio": "of the mean_times",
        "expert_ns": "computation between dispatch and combine_ns",
        "wait_ns": "waits in all-to-alls_ns",
    }
    note = (
        f"Mean of the traced steps, with {found.dispatches:,.0f} dispatches a step: the all-to-alls that send tokens to"
        " experts in the forward pass, and their gradients in the backward pass. In the mean dispatch the fullest rank"
        f" gets {found.uneven:.2f} × the mean rank's {what}. "
    )
    if found.layers:
        if found.layers == 1:
            note += f"Each rank holds one expert, so its {what} are that expert's."
        else:
            note += f"Each rank holds one expert of each of {found.layers} layers; a row is the mean of these layers."
    else:
        note += (
            f"The sizes of the all-to-alls show {what} per rank. Tokens per expert are not in the trace:"
            f" {found.no_experts}."
        )
    if len(found.ranks) > MOST_ROWS:
        note += f" The {MOST_ROWS} ranks with most of {len(found.ranks)}."
    ranks = found.ranks.assign(each=found.ranks["tokens"] / found.ranks["count"])
    title = f"{what.capitalize()} per {'expert' if found.layers else 'rank'}"
    return table(title, ranks.sort_values("ratio", ascending=False, kind="stable"), columns, MOST_ROWS, note)


def draw(
    expert_balance: Maybe[Balance] = maybe(expert_balance),
    destinations: Frame = needs(destinations),
    routed: Frame = needs(routed),
) -> list[Panel]:
    """List what each rank receives; where ranks are missing, what the recorded ones send to each rank."""
    found = expert_balance.or_none()
    if found is not None:
        return [tokens_of(found)]
    sent = destinations[destinations["rank"].isin(routed["rank"])]
    if not len(sent):
        raise NotMeasured("how many tokens go to which rank is not known")
    by = sent.groupby(["members", "to"])["tokens"].sum().reset_index()
    names = [
        int(members.split(",")[to]) if members else to for members, to in zip(by["members"], by["to"], strict=True)
    ]
    mean = by.groupby("members")["tokens"].transform("mean")
    shown = pd.DataFrame({"rank": names, "tokens": by["tokens"], "ratio": by["tokens"] / mean})
    senders = sent["rank"].nunique()
    note = (
        f"What {count(senders, 'recorded rank')} sent in a traced step, forward and backward pass together. What the"
        " other ranks sent is not known. The sizes of the all-to-alls show tokens per rank, not per expert."
    )
    return [table("Tokens sent to each rank", shown.sort_values("ratio", ascending=False), _SENT, MOST_ROWS, note)]


PICTURE = Picture(draw)
