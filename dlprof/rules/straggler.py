"""One rank is late, and all others wait for it.

Synchronous training runs at the pace of its slowest rank. The others show the loss as communication: they sit in a
collective that cannot begin. The culprit shows least of it, for it arrives last and waits for nobody.

Needs the traces of all ranks: collectives are matched by process group and order, and waiting is the latest start less
one's own. A rank's own time is the step less that waiting.

Saving: the step as it were if the straggler's own time were that of the next slowest rank.

What to change depends on what the late rank does with its own time, which the table tells: a slower loader, more or
longer inputs, more layers, a checkpoint that only it writes, a throttled or shared device.
"""

from __future__ import annotations

from statistics import median

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.diagnosis import Clear, Rule
from dlprof.engine import Measured, by_rank
from dlprof.errors import NotMeasured
from dlprof.measures.breakdown import breakdown, part
from dlprof.measures.collectives import waits
from dlprof.measures.replay import own_time
from dlprof.measures.steps import mean_step_ns, standard_error, step_means
from dlprof.result import Finding, Panel
from dlprof.units import duration, percent

# Notable from 5 % of a step on; other tools grade 5, 10 and 20 %.
NOTABLE_SHARE = 0.05

# More rows than this nobody reads: the slowest and the fastest are shown.
MOST_ROWS = 16


def check(run: Measured) -> Finding | Clear:
    """Find the rank with the longest own time, and what its lead over the next costs."""
    steps = run.frame(waits)
    # Ranks that wait for each other have one step; that one trace began earlier than another makes no rank slower.
    common = steps.groupby("step")["dur_ns"].transform("mean")
    steps = steps.assign(own_ns=common - steps["wait_ns"])
    culprit, behind = _behind(steps)
    step = mean_step_ns(run)
    # Traced steps are slower than others; the share of them is what carries over.
    share = max(0.0, float(behind.mean())) / float(steps["dur_ns"].mean())
    if share < NOTABLE_SHARE:
        return Clear(f"the slowest rank ({culprit}) is behind the next by {percent(share)} of a step")
    last = steps[steps["rank"] == culprit]
    table = _table(run, steps)
    why, cause = _cause(run, culprit)
    return Finding(
        title=f"Rank {culprit} makes the others wait",
        summary=f"It is last in {int(last['last'].sum())} of {int(last['matched'].sum())} collectives and waits"
        f" {duration(last['wait_ns'].mean())} a step, the others {duration(_others(steps, culprit))}; {why}.",
        verdict=f"{percent(share)} of each step all ranks wait for rank {culprit}.",
        saving_ns=share * step,
        noise_ns=standard_error(behind),
        advice=(cause,),
        evidence=table,
        ranks=(culprit,),
        sure="Estimated as the late rank brought to the own time of the next slowest one, in the traced steps.",
    )


def _behind(steps: pd.DataFrame) -> tuple[int, NDArray[np.float64]]:
    """Give the rank with the longest own time and, for each traced step, by how much that exceeds the next one's, ns.

    A handful of traced steps on a busy machine says little. Where the light layer tells how unusual each of them was
    for each rank, that is taken off, if it makes the figure surer (a control variate).
    """
    best: tuple[int, NDArray[np.float64]] | None = None
    for values in (steps["own_ns"], steps["own_ns"] - steps["loose_ns"]):
        own = steps.assign(own=values).pivot_table(index="step", columns="rank", values="own").dropna()
        if not len(own) or own.shape[1] < 2:
            continue
        culprit = int(str(own.mean().idxmax()))
        next_one = own.drop(columns=culprit).mean().idxmax()
        # Signed: a rank that is late by chance in some steps is early by chance in others.
        behind = (own[culprit] - own[next_one]).to_numpy(dtype=float)
        if best is None or standard_error(behind) < standard_error(best[1]):
            best = culprit, behind
    if best is None:
        raise NotMeasured("no step was traced on every rank")
    return best


def _others(steps: pd.DataFrame, culprit: int) -> float:
    return float(steps[steps["rank"] != culprit]["wait_ns"].mean())


def _cause(run: Measured, culprit: int) -> tuple[str, str]:
    """Tell in which part of its own time the late rank exceeds the median of the others most, and what to do."""
    waiting = by_rank(run.frame(own_time), "wait_ns")

    def more(*categories: str) -> float:
        """Give by how much the culprit exceeds the median of the others."""
        ns = part(run, *categories)
        if categories == ("communication",):
            ns = {r: max(0.0, t - waiting.get(r, 0.0)) for r, t in ns.items()}
        return ns[culprit] - median(t for r, t in ns.items() if r != culprit)

    by = {c: more(c) for c in ("computation", "input_wait", "copy", "communication")} | {
        "host": more("host", "optimizer_host")
    }
    cause = max(by, key=lambda c: by[c])
    words = {
        "computation": (
            "computes longer",
            "give it the same work (shards, sequence lengths, layers); then look at its device: clock, users, cooling",
        ),
        "input_wait": ("waits longer for its data", "speed up its loader: see input_wait, and its disk and cores"),
        "copy": ("copies longer", "look at its link to the device and at its pinned memory"),
        "communication": ("transfers longer", "look at its link: a slow network card or a wrong route"),
    }
    does, do = words.get(
        cause, ("spends longer on the host", "look at what only this rank does: logging, saving, its cores")
    )
    return f"it {does} than the others ({duration(by[cause])} a step more)", do


def _table(run: Measured, steps: pd.DataFrame) -> Panel:
    by = steps.groupby("rank").agg(
        own=("own_ns", "mean"), wait=("wait_ns", "mean"), last=("last", "sum"), matched=("matched", "sum")
    )
    computing, waiting = part(run, "computation"), part(run, "input_wait")
    by = by.sort_values("own", ascending=False)
    shown = by if len(by) <= MOST_ROWS else pd.concat([by.head(MOST_ROWS // 2), by.tail(MOST_ROWS // 2)])
    rows = tuple(
        (
            r,
            duration(row["own"]),
            duration(row["wait"]),
            f"{int(row['last'])} of {int(row['matched'])}",
            duration(computing.get(r, 0.0)),
            duration(waiting.get(r, 0.0)),
        )
        for r, row in zip((int(str(x)) for x in shown.index), shown.to_dict("records"), strict=True)
    )
    columns = ("rank", "own time", "waits for others", "came last", "computation", "input wait")
    note = "" if len(by) <= MOST_ROWS else f"The slowest and the fastest {MOST_ROWS // 2} of {len(by)} ranks."
    return Panel("table", "Who waits for whom, per traced step", rows, columns, note=note)


RULE = Rule("straggler", "A late rank", (breakdown, own_time, step_means, waits), check)
