"""The steps of an inference server, prefill and decode apart: how long, how many requests and tokens, how busy."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Frame, Job, Maybe, maybe, needs, per_rank
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import DeviceSets, device_sets
from dlprof.analysis.timeline.traced import TracedSteps, trace_window
from dlprof.errors import DoesNotApply
from dlprof.read.kineto.serving import serving_step

NO_SERVING = "no inference server's steps are in the trace"


def engine_of(job: Job) -> str:
    """Return which inference server the traces are of, "" where they are of none."""
    return next((str(facts["serving"]) for facts in job.trace_facts.values() if facts.get("serving")), "")


@per_rank
def serving_steps(
    spans: Frame = needs(schema.SPANS),
    traced_steps: Frame = needs(schema.TRACED_STEPS),
    trace_window: TracedSteps = needs(trace_window),
    device_sets: Maybe[DeviceSets] = maybe(device_sets),
) -> pd.DataFrame:
    """Return a row for each traced step of an inference server.

    Columns: step, phase (prefill, decode, prefill and decode, other), requests, tokens (−1: not told), dur_ns (on the
    device's clock where the trace holds a device), busy_ns (of it, that the device worked; NaN without a device).
    Raises DoesNotApply where the trace is of no inference server.
    """
    codes = spans["name"].cat.codes.to_numpy()
    known = {
        code: found for code, name in enumerate(spans["name"].cat.categories) if (found := serving_step(str(name)))
    }
    marked = np.flatnonzero(np.isin(codes, list(known)) & host.is_kind(spans, "annotation"))
    marks = zip(spans["start_ns"].to_numpy()[marked].tolist(), codes[marked].tolist(), strict=True)
    by_start = {start: known[code] for start, code in marks}
    starts = dict(zip(traced_steps["step"], traced_steps["start_ns"], strict=True))
    rows = [
        (int(number), found.phase, found.requests, found.tokens, *window)
        for number, window in zip(trace_window.numbers, trace_window.windows.tolist(), strict=False)
        if (found := by_start.get(int(starts.get(number, -1)))) is not None
    ]
    if not rows:
        raise DoesNotApply(NO_SERVING)
    frame = pd.DataFrame(rows, columns=["step", "phase", "requests", "tokens", "begin", "end"])
    begin, end = frame["begin"].to_numpy(), frame["end"].to_numpy()
    sets = device_sets.or_none()
    busy = np.full(len(frame), np.nan) if sets is None else iv.within(sets.busy, begin, end).astype(float)
    return frame.assign(dur_ns=end - begin, busy_ns=busy).drop(columns=["begin", "end"])
