"""How long the bubbles of each pipeline are, what they are made of, and how long its stages."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, nan

import numpy as np
import pandas as pd

from dlprof.analysis.engine import Maybe, across_ranks
from dlprof.analysis.pipeline.pipeline import Pipe, closed_form
from dlprof.errors import NotMeasured
from dlprof.units import few


@across_ranks
def bubbles(pipelines: pd.DataFrame, pipes: Maybe[list[Pipe]]) -> pd.DataFrame:
    """Return the bubble of each rank: the columns of `pipeline`, what it is of which step, and what it comes from.

    `step_ns` is the synchronous step of the rank's pipeline, and `bubble` the idle share of it; where the rank with the
    first stage is not here, of its own. `simulated` is the bubble of the same chunks in the same order if launching and
    handing over took no time, `scheduled` that with stages and micro-batches alike besides, `closed` the closed form.

    The idle time is the sum of four, in ns of the mean step: schedule_ns, what even stages would leave idle;
    imbalance_ns, what uneven stages and micro-batches add to it; launch_ns, the host between chunks that wait for
    nobody; communication_ns, the rest, which is handing over. A stage that is longer than the others stands less idle
    than it would among even ones: its imbalance_ns is negative. NaN where a pipeline cannot be replayed.
    """
    frame = pipelines
    try:
        parts = [_parts(pipe) for pipe in pipes.get()]
    except NotMeasured:
        parts = []
    first = frame[frame["first_stage"]].set_index("ranks")["dur_ns"]
    frame = frame.assign(
        step_ns=frame["ranks"].map(first.groupby(level=0).first()).fillna(frame["dur_ns"]),
        closed=[
            closed_form(*of)
            for of in zip(frame["schedule"], frame["size"], frame["microbatches"], frame["chunks"], strict=True)
        ],
    )
    known = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame({c: [] for c in ("rank", *_PARTS)})
    known = frame[["rank"]].merge(known, on="rank", how="left").set_index(frame.index)
    # One set of figures: where chunks are known, all of it is of the calls that they are of.
    for column in ("step_ns", "busy_ns"):
        frame[column] = known[column].fillna(frame[column])
    return frame.assign(
        bubble=(1 - frame["busy_ns"] / frame["step_ns"]).clip(lower=0.0),
        **{c: known[c].astype(float) for c in _PARTS[2:]},
    )


_PARTS = (
    "step_ns",
    "busy_ns",
    "simulated",
    "scheduled",
    "schedule_ns",
    "imbalance_ns",
    "launch_ns",
    "communication_ns",
)


def _parts(pipe: Pipe) -> pd.DataFrame:
    """Return what a pipeline's idle time comes from, rank by rank; what each part is, `bubbles` says."""
    alike = pipe.lengths(pipe.even())
    even = pipe.again(alike)
    own = float(np.mean([pipe.again(took) for took in pipe.took]))
    launched = float(np.mean([pipe.again(took, pipe.launch_ns) for took in pipe.took])) + pipe.edge_ns
    rows = []
    for rank, row in zip(pipe.ranks, pipe.rows, strict=True):
        busy, idle = pipe.busy_ns[rank], even - sum(alike[a] for a in row)
        rows.append(
            {
                "rank": rank,
                "step_ns": pipe.step_ns,
                "busy_ns": busy,
                "simulated": 1 - busy / own,
                "scheduled": idle / even,
                "schedule_ns": idle,
                "imbalance_ns": own - busy - idle,
                "launch_ns": min(launched, pipe.step_ns) - own,
                "communication_ns": pipe.step_ns - min(launched, pipe.step_ns),
            }
        )
    return pd.DataFrame(rows)


@across_ranks
def stage_lengths(pipes: list[Pipe], pipelines: pd.DataFrame, why_not_replayed: Maybe[str]) -> pd.DataFrame:
    """Return how long each stage works on a micro-batch, and what uneven stages cost their pipeline.

    Columns: ranks (as `pipeline` has them), rank, stage, forward_ns, backward_ns (both halves of it), stage_ns (their
    sum); and of the pipeline, replayed with launching and handing over for nothing: slowdown (its step with the stages
    as they are ÷ with even ones), gain_ns (their difference), explained (the share of it that the longest stage gives
    when it alone takes the mean), saved_ns (what even stages save of the measured step, in which they wait for
    handing over and each other's bad luck more often), calls_a_step. Raises NotMeasured where no pipeline can be
    replayed.
    """
    parts = []
    for pipe in pipes:
        even, mean = pipe.even(), pipe.mean
        frame = pd.DataFrame({"stage": range(pipe.stages)})
        home = {stage: rank for rank, row in zip(pipe.ranks, pipe.rows, strict=True) for stage, _, _ in row}
        frame["rank"] = [home[s] for s in frame["stage"]]
        frame["forward_ns"] = [mean.get((s, "forward"), 0.0) for s in frame["stage"]]
        frame["backward_ns"] = [backward_ns(mean, s) for s in frame["stage"]]
        frame["stage_ns"] = frame["forward_ns"] + frame["backward_ns"]
        longest = int(frame["stage_ns"].to_numpy().argmax())
        now, ideal = pipe.again(pipe.lengths(mean)), pipe.again(pipe.lengths(even))
        fixed = pipe.again(pipe.lengths({k: even[k] if k[0] == longest else ns for k, ns in mean.items()}))
        frame["slowdown"] = now / ideal
        frame["gain_ns"] = now - ideal
        frame["saved_ns"] = pipe.saved_by_even(pipe.hand_over())
        frame["explained"] = (now - fixed) / (now - ideal) if now > ideal else nan
        parts.append(frame.assign(ranks=", ".join(map(str, pipe.ranks)), calls_a_step=_calls(pipelines, pipe)))
    if not parts:
        raise NotMeasured(why_not_replayed.get())
    return pd.concat(parts, ignore_index=True)


def _calls(pipelines: pd.DataFrame, pipe: Pipe) -> float:
    return float(pipelines.loc[pipelines["rank"] == pipe.ranks[0], "calls_a_step"].iloc[0])


def backward_ns(mean: Mapping[tuple[int, str], float], stage: int) -> float:
    """Return how long a whole backward pass of a stage takes, ns, be it recorded whole or in halves."""
    halves = mean.get((stage, "input"), nan) + mean.get((stage, "weight"), nan)
    return mean.get((stage, "backward"), halves if isfinite(halves) else 0.0)


@across_ranks
def why_not_replayed(pipelines: pd.DataFrame) -> str:
    """Say why no pipeline of a run can be replayed."""
    here = {int(str(r)) for r in pipelines["rank"]}
    wanted = {int(r) for ranks in pipelines["ranks"] for r in str(ranks).split(", ")}
    missing = sorted(wanted - here)
    if missing:
        lacking = few(missing, 8)
        return f"a pipeline is replayed from the chunks of all its ranks, and those of rank {lacking} are not here"
    return "the ranks of no pipeline have the chunks of the same step"
