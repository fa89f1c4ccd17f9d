"""Tokens per rank of a mixture of experts: who gets how many, and what their experts compute and others wait."""

from __future__ import annotations

import pandas as pd

from dlprof.analysis.engine import Frame, Maybe
from dlprof.analysis.experts.tokens import Balance
from dlprof.analysis.panel import Picture, table
from dlprof.errors import NotMeasured
from dlprof.result import Panel

# Of more ranks those with most tokens are shown.
MOST_ROWS = 32

_PER_TOKEN = {
    "rank": "rank",
    "tokens": "tokens a step",
    "ratio": "of the mean_times",
    "expert_ns": "computes between dispatch and combine_ns",
    "wait_ns": "waits in all-to-alls_ns",
}
_SENT = {"rank": "rank", "tokens": "tokens a step", "ratio": "of the mean_times"}


def tokens_of(found: Balance) -> Panel:
    """Return the table of the ranks' tokens, those with most first."""
    what = "tokens" if found.in_rows else "elements"
    note = (
        f"Of the traced steps, {found.dispatches:,.0f} dispatches a step, forward and backward pass. In the mean one"
        f" the fullest rank gets {found.uneven:.2f} × the mean rank's {what}. How many experts a rank has is not in the"
        " trace: sizes are a rank's, not an expert's."
    )
    if len(found.ranks) > MOST_ROWS:
        note += f" The {MOST_ROWS} ranks with most of {len(found.ranks)}."
    columns = {**_PER_TOKEN, "tokens": f"{what} a step"}
    return table("Tokens per rank", found.ranks.sort_values("ratio", ascending=False), columns, MOST_ROWS, note)


def draw(expert_balance: Maybe[Balance], destinations: Frame, routed: Frame) -> list[Panel]:
    """List what each rank gets; where that is not known of all ranks, what those that are here send to each."""
    found = expert_balance.or_none()
    if found is not None:
        return [tokens_of(found)]
    sent = destinations[destinations["rank"].isin(routed["rank"])]
    if not len(sent):
        raise NotMeasured("what goes to which rank is not known")
    by = sent.groupby(["members", "to"])["tokens"].sum().reset_index()
    names = [
        int(members.split(",")[to]) if members else to for members, to in zip(by["members"], by["to"], strict=True)
    ]
    mean = by.groupby("members")["tokens"].transform("mean")
    shown = pd.DataFrame({"rank": names, "tokens": by["tokens"], "ratio": by["tokens"] / mean})
    senders = sent["rank"].nunique()
    note = (
        f"Where the tokens of {senders} recorded rank{'s' if senders > 1 else ''} go, in the traced steps. What other"
        " ranks send is not known."
    )
    return [table("Tokens sent to each rank", shown.sort_values("ratio", ascending=False), _SENT, MOST_ROWS, note)]


PICTURE = Picture(draw)
