"""One rank is late, and all others wait for it.

Synchronous training runs at the pace of its slowest rank. The others show the loss as communication: they sit in a
collective that cannot begin. The culprit shows least of it, for it arrives last and waits for nobody.

Needs the traces of all ranks: collectives are matched by process group and order, and waiting is the latest start less
one's own. A rank's own time is the step less that waiting. On a CPU run the light layer tells it for every step; on a
GPU only the traced steps do, and a difference that comes and goes between them is not told.

Saving: every step replayed with the late rank at the mean pace of the next slowest; its jitter stays.

What to change depends on what the late rank does with its own time, which the table tells: a slower loader, more or
longer inputs, more layers, a checkpoint that only it writes, a throttled or shared device.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pandas as pd

from dlprof.diagnosis import LEAST_NOISE, Clear, Rule
from dlprof.engine import Measured, by_rank
from dlprof.errors import NotMeasured
from dlprof.measures.breakdown import breakdown, part
from dlprof.measures.collectives import waits
from dlprof.measures.lateness import Lead, lead, light_own_time, traced_own_time
from dlprof.measures.replay import own_time
from dlprof.measures.steps import mean_step_ns, step_means
from dlprof.result import Finding, Panel
from dlprof.units import duration, percent

# Notable from 5 % of a step on; other tools grade 5, 10 and 20 %.
NOTABLE_SHARE = 0.05

# More rows than this nobody reads: the slowest and the fastest are shown.
MOST_ROWS = 16


def check(run: Measured) -> Finding | Clear:
    """Find the rank with the longest own time, and what its lead over the next costs."""
    steps = run.frame(waits)
    steps = steps.assign(own_ns=steps.groupby("step")["dur_ns"].transform("mean") - steps["wait_ns"])
    late, source = _lead(run)
    culprit, step = late.rank, mean_step_ns(run)
    # Traced steps are slower than others; the share of them is what carries over.
    share = late.saving_ns / late.step_ns if late.behind_ns > 0 else 0.0
    if share < NOTABLE_SHARE:
        return Clear(f"the slowest rank ({culprit}) costs {percent(share)} of a step")
    last = steps[steps["rank"] == culprit]
    table = _table(run, steps)
    why, cause = _cause(run, culprit)
    return Finding(
        title=f"Rank {culprit} makes the others wait",
        summary=f"It is last in {int(last['last'].sum())} of {int(last['matched'].sum())} collectives and waits"
        f" {duration(last['wait_ns'].mean())} a step, the others {duration(_others(steps, culprit))}; {why}.",
        verdict=f"{percent(share)} of each step all ranks wait for rank {culprit}.",
        saving_ns=share * step,
        noise_ns=late.noise_ns * late.saving_ns / late.behind_ns,
        advice=(cause,),
        evidence=table,
        ranks=(culprit,),
        sure=f"Estimated by replaying the steps with the late rank at the pace of the next slowest one, {source}.",
    )


def _lead(run: Measured) -> tuple[Lead, str]:
    """Find the late rank from every step where the light layer can tell, else from the traced ones."""
    traced = lead(run.frame(traced_own_time))
    try:
        whole = lead(run.frame(light_own_time))
    except NotMeasured:
        return traced, "in the traced steps"
    # What one short window shows must exceed what such windows show by chance.
    traced = replace(traced, noise_ns=max(traced.noise_ns, whole.window_noise_ns))
    told = whole.saving_ns >= NOTABLE_SHARE * whole.step_ns and whole.behind_ns >= LEAST_NOISE * whole.noise_ns
    missed = traced.behind_ns >= LEAST_NOISE * traced.noise_ns
    return (traced, "in the traced steps") if missed and not told else (whole, "in every steady step")


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


RULE = Rule(
    "straggler",
    "A late rank",
    (breakdown, light_own_time, own_time, step_means, traced_own_time, waits),
    check,
    saves_from=("communication", "pipeline_bubble"),
)
