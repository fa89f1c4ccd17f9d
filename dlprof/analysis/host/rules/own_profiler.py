"""The script's own profiler of torch is on while it trains.

`torch.profiler.profile` and `torch.autograd.profiler.profile` write down every operator, and when they end they sort
what they have. They are for a few steps: around a whole training they slow each step, and their memory grows.

Needs the step log. dlprof's own trace makes way for such a profiler, so that no step is traced meanwhile.

Saving: where steps were recorded with the profiler and without it, the difference of their medians, in the steps that
have it. Where all have it, on a CPU, a share of the time that the profiler took to end, spread over its steps: both
grow with the operators that it wrote down. In 24 runs of three small networks on two cores, writing down took 0.2 of
the time that ending took, 0.12 of it with shapes; by a factor of two more or less. On a GPU nothing is said without
steps that have no profiler, as the device may hide what the host spends.

What to change: no profiler in a job that is not looked into, or a schedule that profiles a few steps:
`torch.profiler.profile(schedule=torch.profiler.schedule(wait=10, warmup=2, active=3, repeat=1))`, with `step()` after
each step.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof.analysis.engine import RANK, Frame, RankFacts, by_rank, needs, per_rank
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.panel import table
from dlprof.analysis.timeline.steady import device_type, light_steps, standard_error
from dlprof.errors import NotMeasured
from dlprof.units import count, duration, percent

# Steps with and without the profiler are compared from so many of each on.
_ENOUGH = 10

# What writing down takes, as a share of what ending takes; the second with shapes.
_OF_ENDING = (0.2, 0.12)

_COLUMNS = {"share": "of the steps have it_share", "on_ns": "a step with it_ns", "off_ns": "a step without it_ns"}
_COLUMNS |= {"exit_ns": "it took to end_ns", "cost_ns": "costs the mean step_ns"}


@per_rank
def own_profilers(light_steps: Frame = needs(light_steps), rank: RankFacts = needs(RANK)) -> pd.DataFrame:
    """Return what a profiler of the script's own costs the mean steady step, one row; none where there was none.

    Columns: steps (with it), share (of the steady ones), on_ns and off_ns (their medians; off_ns 0: all have it),
    exit_ns (of its ends; 0: not known), cost_ns (−1: not known) and its standard error noise_ns.
    """
    columns = ["steps", "share", "on_ns", "off_ns", "exit_ns", "cost_ns", "noise_ns"]
    known = (rank.facts.get("window") or {}).get("theirs") or []
    steady = light_steps[light_steps["steady"]]
    number, length = steady["step"].to_numpy(), steady["length_ns"].to_numpy(dtype=float)
    on = np.zeros(len(steady), bool)
    for one in known:
        first, last = one["first_step"], one["last_step"]
        on |= (number >= first) & ((number <= last) if last is not None else True)
    if not on.any():
        return pd.DataFrame(columns=columns).astype(float)
    yes, no = length[on], length[~on]
    took = [one["exit_ns"] for one in known]
    exit_ns = 0.0 if None in took else float(sum(took))
    cost, noise, off_ns = -1.0, 0.0, 0.0
    if min(len(yes), len(no)) >= _ENOUGH:
        off_ns = float(np.median(no))
        cost = max(float(np.median(yes)) - off_ns, 0.0) * on.mean()
        noise = float(np.hypot(standard_error(yes), standard_error(no))) * on.mean()
    elif exit_ns and device_type(rank) == "cpu":
        # Those of all its steps, also of the ones that warmed up: its ends are of all of these.
        steps = sum(one["last_step"] - one["first_step"] for one in known)
        cost = exit_ns / max(steps, 1) * _OF_ENDING[any(one["shapes"] for one in known)] * on.mean()
    row = (int(on.sum()), on.mean(), np.median(yes), off_ns, exit_ns, cost, noise)
    return pd.DataFrame([row], columns=columns)


def check(own_profilers: Frame = needs(own_profilers)) -> Estimate:
    if own_profilers.empty:
        return nothing("no profiler of the script's own ran in the steady steps")
    if (own_profilers["cost_ns"] < 0).all():
        row = own_profilers.iloc[0]
        raise NotMeasured(
            f"the script's own profiler is on in {percent(row['share'])} of the steady steps: what it costs is not"
            " known without others to compare with"
        )
    known = own_profilers[own_profilers["cost_ns"] >= 0]
    return Estimate(
        gone_ns=by_rank(known, "cost_ns"),
        noise_ns=float(known["noise_ns"].max()),
        loses="is what the script's own profiler costs",
        seen=known,
    )


def explain(estimate: Estimate) -> Explanation:
    mine = estimate.rows(estimate.seen)
    row = mine.iloc[0]
    ends = f" Ending took it {duration(row['exit_ns'])}." if row["exit_ns"] else ""
    compared = f": {duration(row['on_ns'])} with it, {duration(row['off_ns'])} without" if row["off_ns"] else ""
    sure = (
        "Measured: the medians of the steps with and without it."
        if row["off_ns"]
        else "Estimated from how long the profiler took to end, which grows with what it wrote down, as the steps do:"
        " by a factor of two more or less."
    )
    return Explanation(
        title="The script's own profiler is on",
        summary=f"PyTorch's profiler, which the script runs, is on in {count(int(row['steps']), 'steady step')} of rank"
        f" {estimate.worst}, {percent(row['share'])} of them{compared}.{ends}",
        changes=(
            change(
                "take the profiler from around the training; to look into some steps, `torch.profiler.profile(schedule="
                "torch.profiler.schedule(wait=10, warmup=2, active=3, repeat=1))`"
            ),
        ),
        evidence=table(f"The script's own profiler on rank {estimate.worst}", mine, _COLUMNS),
        sure=sure,
    )


_SAVES_FROM = ("computation", "communication", "optimizer_host", "host", "launch_latency", "other")
RULE = Rule("The script's own profiler", check, explain, _SAVES_FROM, error=0.5)
