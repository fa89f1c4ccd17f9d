"""What a step does besides training, every time: forward passes that no backward pass uses, and the script's lines."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof.analysis.engine import Frame, Maybe, across_ranks, maybe, needs, per_rank
from dlprof.analysis.host.stacks import LEAST_SAMPLES, own_lines
from dlprof.analysis.source.line_shares import call_sites
from dlprof.analysis.source.patches import Call
from dlprof.analysis.timeline.stalls import Pattern, patterns, periodic, stall_means
from dlprof.analysis.timeline.steady import standard_error, steady_steps
from dlprof.analysis.timeline.steps import phases_of_step
from dlprof.errors import NotMeasured


@per_rank
def unused_forward(
    steady_steps: Frame = needs(steady_steps), patterns: Maybe[tuple[Pattern, ...]] = maybe(patterns)
) -> pd.DataFrame:
    """Return one row: the time and number of forward passes of a steady step that no backward pass uses.

    Columns: ns and its standard error noise_ns, share (of the time in forward passes), forwards (of a step), backwards.
    Steps with periodic extra work are left out. Raises NotMeasured where it was not recorded.
    """
    between = [n for one in patterns.or_none() or () if not one.trains for n in one.steps]
    steps = steady_steps[~steady_steps["step"].isin(between)]
    unused = steps["unused_forward_ns"].to_numpy(dtype=float)
    if not len(steps) or (unused < 0).any():
        raise NotMeasured("which forward passes a backward pass uses was not recorded, or no steady step was")
    # In most steps: work in only a few of them is not part of each.
    ns = float(unused.mean()) if np.median(unused) > 0 else 0.0
    row = {
        "ns": ns,
        "noise_ns": standard_error(unused),
        "share": ns / max(float(steps["forward_ns"].mean()), 1.0),
        "forwards": float(steps["forwards"].median()),
        "backwards": float(steps["backwards"].median()),
    }
    return pd.DataFrame([row])


@across_ranks
def lines_between(
    own_lines: Frame = needs(own_lines),
    phases_of_step: Frame = needs(phases_of_step),
    stall_means: Maybe[Frame] = maybe(stall_means),
    periodic: Maybe[Frame] = maybe(periodic),
    call_sites: Maybe[list[Call]] = maybe(call_sites),
) -> pd.DataFrame:
    """Return what the script's lines between the phases take of the mean steady step: rank, function, file, line, ns.

    The stacks say how the time divides, the step log how much it is, without stalls and what comes every n-th step.
    `noise_ns` is the error of the share of so few samples. Lines of a loss, also of one that the script writes out, or
    of setting gradients to zero are left out. Raises NotMeasured where too few stacks were seen between the phases.
    """
    lines = own_lines[(own_lines["doing"] == "rest") & ~own_lines["trains"].astype(bool)]
    if not len(lines) or lines["samples"].max() < LEAST_SAMPLES:
        raise NotMeasured("too few stacks were seen between the phases of the steps")
    losses = [call for call in call_sites.or_none() or () if call.kind == "loss"]
    places = zip(lines["file"].astype(str), lines["line"], strict=True)
    lines = lines[[not any(is_at(call, file, line) for call in losses) for file, line in places]]
    rest = phases_of_step[phases_of_step["phase"] == "rest"].set_index("rank")["ns"]
    for known, column in ((stall_means.or_none(), "mean_ns"), (periodic.or_none(), "cost_ns")):
        if known is not None and len(known):
            rest = rest - known.groupby("rank")[column].sum().reindex(rest.index).fillna(0.0)
    share = lines["seen"] / lines["samples"]
    of = lines["rank"].map(rest.clip(lower=0.0)).astype(float)
    noise = np.sqrt(share * (1 - share) / lines["samples"]) * of
    return lines.assign(ns=share * of, noise_ns=noise)[["rank", "function", "file", "line", "ns", "noise_ns"]]


def is_at(call: Call, file: str, line: int) -> bool:
    """Return whether a recorded call, whose file may be named from the script's folder, is on a line."""
    return call.line <= line <= max(call.span.end_line, call.line) and file.endswith(call.file)
