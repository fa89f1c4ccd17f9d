"""Lines of the script between the phases of the step take a notable part of it.

What a script does in every step besides fetching, forward, backward and the optimizer: metrics, logging, histograms of
weights, batches made by an own function. On a CPU all of it stands between two steps.

Needs the step log, and stacks (py-spy): the log says how long a step is in none of its phases, the stacks in which
lines it is then. The lines of a loss and of setting gradients to zero are left out. On a CPU only: what holds up a
device is judged by `host_bound`.

Saving: the named lines gone, which is the most that any change can give. Where `host_bound` is larger, the time in
which these lines compute nothing is its, and what they take besides counts here.

What to change: what the lines say: log every k steps, keep metrics as tensors and read them rarely, make batches with a
DataLoader's workers, replace loops in Python.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from dlprof.analysis.engine import Frame, Maybe, by_rank
from dlprof.analysis.estimate import LEAST_SHARE, Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.host.stacks import shown
from dlprof.analysis.panel import table
from dlprof.units import duration, percent

# A step of training always does a little between its phases: from this share on it is worth a look.
NOTABLE_SHARE = 0.05

MOST_LINES = 3


def check(lines_between: Frame, between_twice: Maybe[Frame], mean_step_ns: float) -> Estimate:
    lines = lines_between[lines_between["ns"] >= LEAST_SHARE * mean_step_ns]
    told = between_twice.or_none()
    if told is not None and not told["lines_first"].any():
        lines = _left(lines, by_rank(told, "both_ns"))
        lines = lines[lines["ns"] >= LEAST_SHARE * mean_step_ns]
    if not len(lines):
        return nothing("no line between the phases takes a notable part of the step")
    return Estimate(
        gone_ns=by_rank(lines, "ns"),
        noise_ns=math.hypot(*lines[lines["rank"] == lines["rank"].iloc[0]]["noise_ns"]),
        loses="goes to lines of the script between the phases of the step",
        seen=lines,
    )


def _left(lines: Frame, told: Mapping[int, float]) -> Frame:
    """Return the lines with what they take besides the time of each rank that is told elsewhere, by their shares."""
    whole = lines.groupby("rank")["ns"].transform("sum")
    left = (1 - lines["rank"].map(told).fillna(0.0) / whole.clip(lower=1.0)).clip(lower=0.0)
    return lines.assign(ns=lines["ns"] * left, noise_ns=lines["noise_ns"] * left)


def explain(estimate: Estimate, mean_step_ns: float) -> Explanation:
    rank = estimate.worst
    lines = estimate.rows(estimate.seen).sort_values("ns", ascending=False)
    places = [shown(*place) for place in lines[["function", "file", "line"]].itertuples(index=False)]
    named = [f"{place}: {percent(ns / mean_step_ns)}" for place, ns in zip(places, lines["ns"], strict=True)]
    more = f" and {len(named) - MOST_LINES} more lines" if len(named) > MOST_LINES else ""
    first = percent(lines["ns"].iloc[0] / mean_step_ns)
    return Explanation(
        title="Lines between the phases take a notable part of each step",
        summary=f"{duration(estimate.by_rank_ns[rank])} of a step of rank {rank} are in the script's own lines outside"
        f" of fetching, forward, backward and the optimizer: {', '.join(named[:MOST_LINES])} of the step{more}.",
        changes=(
            change(f"run {places[0]} every k steps, or not at all: at most {first} of the step"),
            change("replace loops over values in Python by operations on tensors"),
        ),
        evidence=table(
            f"The script's lines between the phases, rank {rank}",
            lines.assign(place=places, share=lines["ns"] / mean_step_ns),
            {"place": "line", "ns": "of a step_ns", "share": "share"},
        ),
        sure="How long a step is in no phase was measured in every steady step; how that divides, from the stacks. The"
        " saving is these lines gone, the most that any change can give.",
    )


_SAVES_FROM = ("host", "computation", "other")
RULE = Rule(
    "The script's lines between the phases", check, explain, _SAVES_FROM, notable=NOTABLE_SHARE, only_with="cpu"
)
