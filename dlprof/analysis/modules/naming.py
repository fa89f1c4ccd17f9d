"""What it costs the traced steps that dlprof names each module's forward pass in them."""

from __future__ import annotations

import pandas as pd

from dlprof.analysis.engine import RankFacts, per_rank
from dlprof.analysis.timeline.steps import Timing
from dlprof.errors import NotMeasured


@per_rank
def module_naming(timing: Timing, rank: RankFacts) -> pd.DataFrame:
    """Return one row, of a traced step: ranges (calls of modules that were named), ns (what that took the host), share.

    The recorder measures in its own process what a range takes while the profiler records. Raises NotMeasured where it
    named no module.
    """
    window = rank.facts.get("window") or {}
    told = window.get("modules") or {}
    first, last = window.get("first_step"), window.get("last_step")
    if not told.get("ranges") or not told.get("ns_each") or first is None or last is None:
        raise NotMeasured("no module was named while the trace was recorded")
    ranges = told["ranges"] / (last - first + 1)
    ns = ranges * told["ns_each"]
    step_ns = float((timing.host_windows[:, 1] - timing.host_windows[:, 0]).mean()) if len(timing.windows) else 0.0
    return pd.DataFrame([{"ranges": ranges, "ns": ns, "share": ns / step_ns if step_ns else float("nan")}])
