"""What the backward pass does besides its own: hooks that read values of gradients, and autograd's anomaly mode."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Frame, needs, within_rank
from dlprof.analysis.host.segments import HOOK, LEAST_TURNS, Loop
from dlprof.analysis.modules.functions import ENGINE
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.host import is_on_device
from dlprof.analysis.timeline.steps import Timing, timing

# What anomaly mode asks of every result of the backward pass (`evaluate_function` in torch/csrc/autograd/engine.cpp);
# nothing else in torch calls the second one.
ANOMALY = ("aten::isnan", "aten::_is_any_true")

_READS = ("aten::item", "aten::is_nonzero")

# How the engine sums gradients of one tensor.
_SUMS = ("aten::add", "aten::add_")


@within_rank
def hook_loops(
    timing: Timing = needs(timing),
    spans: Frame = needs(schema.SPANS),
    is_on_device: NDArray[np.bool_] = needs(is_on_device),
) -> list[Loop]:
    """Return the operators that are called around the functions of the backward pass, where each turn reads a value:
    those of anomaly mode, and of the script's hooks.
    """
    steps = iv.merge(timing.host_windows)
    ours = ~is_on_device & host.is_kind(spans, "op") & iv.holds(steps, spans["start_ns"].to_numpy())
    engine = ours & host.is_named(spans, ENGINE)
    lanes = spans["lane"].cat.codes.to_numpy()
    found = []
    for lane in np.unique(lanes[engine]).tolist():
        columns = ["name", "start_ns", "dur_ns"]
        functions = host.outermost(spans.loc[engine & (lanes == lane), columns])
        calls = host.outermost(spans.loc[ours & ~engine & (lanes == lane), columns])
        begins = functions["start_ns"].to_numpy()
        ends = begins + functions["dur_ns"].to_numpy()
        at = np.searchsorted(begins, calls["start_ns"].to_numpy(), side="right") - 1
        besides = host.is_named(calls, "aten::") & ~host.is_one_of(calls["name"], *_SUMS)
        besides &= (at >= 0) & (calls["start_ns"].to_numpy() < ends[np.maximum(at, 0)])
        found.append(calls[besides].assign(turn=at[besides], lane=lane))
    if not found:
        return []
    calls = pd.concat(found, ignore_index=True)
    calls["end_ns"] = calls["start_ns"] + calls["dur_ns"]
    calls["checks"], calls["reads"] = host.is_one_of(calls["name"], ANOMALY[1]), host.is_one_of(calls["name"], *_READS)
    turns = calls.groupby(["lane", "turn"]).agg(
        start=("start_ns", "min"), end=("end_ns", "max"), checks=("checks", "any"), reads=("reads", "any")
    )
    loops = []
    for mine in (turns[turns["checks"]], turns[turns["reads"] & ~turns["checks"]]):
        count = len(mine) / max(len(timing.windows), 1)
        if count >= LEAST_TURNS:
            inside = pd.MultiIndex.from_frame(calls[["lane", "turn"]]).isin(mine.index)
            names = tuple(str(name) for name in calls["name"][inside].astype(str).value_counts().index)
            times = iv.union(mine["start"].to_numpy(), mine["end"].to_numpy())
            loops.append(Loop(HOOK, names, frozenset(names), count, times, iv.EMPTY))
    return loops
