"""Autograd's anomaly mode is on: every function's stack is kept, and every gradient is searched for NaN.

`torch.autograd.set_detect_anomaly(True)` and `detect_anomaly()` are for debugging. In the forward pass they write down
Python's stack at each operator, and in the backward pass they ask after each function whether its result holds a NaN,
and wait for the answer.

Needs a trace, on a GPU one that links launches to kernels: nothing else in torch calls `aten::_is_any_true` after the
functions of the backward pass.

Saving: the traced steps without these questions (on a GPU replayed), and without the share of the time in which the
training thread was seen to write down stacks, where stacks were recorded. The rest of what the forward pass spends for
it, no recording shows: the gain may be larger.

What to change: `torch.autograd.set_detect_anomaly(False)`, or no such call; only around the steps that are debugged.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis import settings
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, by_rank, maybe, needs, per_rank
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.host.gaps import ANOMALY, HOST, SAVES_FROM, Loop, hook_loops
from dlprof.analysis.host.stacks import of_training
from dlprof.analysis.panel import table
from dlprof.analysis.timeline.device import Launches, launches
from dlprof.analysis.timeline.steps import Timing, timing
from dlprof.analysis.timeline.what_if import WhatIf, what_if
from dlprof.units import digits, duration

_COLUMNS = {"checks": "results checked a step", "host_ns": "host a step_ns", "kept_ns": "writing down stacks_ns"}


@per_rank
def anomaly_checks(
    hook_loops: list[Loop] = needs(hook_loops),
    what_if: WhatIf = needs(what_if),
    launches: Launches = needs(launches),
    stacks: Maybe[Frame] = maybe(schema.STACKS),
) -> pd.DataFrame:
    """Return what anomaly mode costs in a mean steady step, one row: checks, host_ns (of them), kept_ns (in which the
    training thread wrote down stacks; 0: not known) and gain_ns. No row where it is off.
    """
    columns = ["checks", "host_ns", "kept_ns", "gain_ns"]
    loops = [loop for loop in hook_loops if ANOMALY[1] in loop.inner]
    if not loops:
        return pd.DataFrame(columns=columns)
    times, checks = iv.merge(*(loop.times for loop in loops)), sum(loop.turns for loop in loops)
    replay, kept_ns = what_if.replay, _writing(stacks) * what_if.measured_ns
    forward = iv.intersect(what_if.phases["forward"], iv.merge(what_if.host.calls, what_if.host.python))
    left = 1 - min(kept_ns / max(what_if.host_ns(forward), 1.0), 1.0)
    begins = np.array([wait.begin for wait in replay.waits], dtype=np.int64)
    gain = what_if.gain_ns(
        durations=np.where(iv.holds(times, launches.called[replay.rows]), -1, replay.durations),
        other=((times, 0.0), (forward, left)),
        free=np.flatnonzero(iv.holds(times, begins)).tolist(),
    )
    return pd.DataFrame([(checks, what_if.host_ns(times), kept_ns, gain)], columns=columns)


@per_rank
def anomaly_on_cpu(
    hook_loops: list[Loop] = needs(hook_loops),
    timing: Timing = needs(timing),
    stacks: Maybe[Frame] = maybe(schema.STACKS),
) -> pd.DataFrame:
    """Return the same of a job that computes on the CPU, where nothing overlaps: all that the checks take is gained."""
    loops = [loop for loop in hook_loops if ANOMALY[1] in loop.inner]
    if not loops:
        return pd.DataFrame(columns=["checks", "host_ns", "kept_ns", "gain_ns"])
    times, checks = iv.merge(*(loop.times for loop in loops)), sum(loop.turns for loop in loops)
    host_ns, kept_ns = iv.total(times) / len(timing.windows), _writing(stacks) * timing.step_ns
    return pd.DataFrame(
        [(checks, host_ns, kept_ns, host_ns + kept_ns)], columns=["checks", "host_ns", "kept_ns", "gain_ns"]
    )


def _writing(stacks: Maybe[pd.DataFrame]) -> float:
    """Return the share of the training thread's samples that write down a stack; 0 where none was recorded."""
    seen = stacks.or_none()
    if seen is None:
        return 0.0
    mine = of_training(seen)
    mine = mine[mine["role"] == "main"]
    in_traceback = mine["stack"].astype(str).str.contains("traceback.py:", regex=False)
    return float(mine["samples"][in_traceback].sum() / max(mine["samples"].sum(), 1))


def check(
    anomaly_checks: Maybe[Frame] = maybe(anomaly_checks),
    anomaly_on_cpu: Maybe[Frame] = maybe(anomaly_on_cpu),
    job: Job = needs(JOB),
) -> Estimate:
    found = (anomaly_on_cpu if settings.on_cpu(job) else anomaly_checks).get()
    if found.empty:
        return nothing("anomaly mode is off")
    return Estimate(
        gone_ns=by_rank(found, "gain_ns"), noise_of=HOST, loses="is lost to autograd's anomaly mode", seen=found
    )


def explain(estimate: Estimate) -> Explanation:
    mine = estimate.rows(estimate.seen)
    row = mine.iloc[0]
    return Explanation(
        title="Autograd's anomaly mode is on",
        summary=f"Rank {estimate.worst} asks {digits(round(row['checks']))} times a step whether a gradient holds a"
        f" NaN, and waits for each answer: {duration(row['host_ns'])} of the host's time.",
        changes=(
            change(
                "`torch.autograd.set_detect_anomaly(False)`, and no `detect_anomaly()`: anomaly mode is for debugging"
            ),
        ),
        evidence=table(f"Anomaly mode in a step of rank {estimate.worst}", mine, _COLUMNS),
        sure="Estimated from the traced steps without these questions. What the forward pass spends for anomaly"
        " mode is known in part only: the gain may be larger.",
    )


RULE = Rule(
    "Anomaly mode",
    check,
    explain,
    (*SAVES_FROM, "computation", "copy"),
    error=0.5,  # of what the forward pass spends, no recording shows all
    of_host=True,
)
