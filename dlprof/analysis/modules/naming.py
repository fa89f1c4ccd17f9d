"""The cost, in the traced steps, of recording the names of modules."""

from __future__ import annotations

import pandas as pd

from dlprof.analysis.engine import RANK, RankFacts, needs, per_rank
from dlprof.analysis.timeline.steps import Timing, timing
from dlprof.errors import NotMeasured


@per_rank
def module_naming(timing: Timing = needs(timing), rank: RankFacts = needs(RANK)) -> pd.DataFrame:
    """Return one row: ranges (named calls of modules in a traced step), ns (their cost on the host), share of the step.

    The recorder measures the cost of a range in its own process while the profiler records. Raises NotMeasured where no
    module was named.
    """
    window = rank.facts.get("window") or {}
    told = window.get("modules") or {}
    first, last = window.get("first_step"), window.get("last_step")
    if not told.get("ranges") or not told.get("ns_each") or first is None or last is None:
        raise NotMeasured("no names of modules were recorded in the trace")
    ranges = told["ranges"] / (last - first + 1)
    ns = ranges * told["ns_each"]
    step_ns = float((timing.host_windows[:, 1] - timing.host_windows[:, 0]).mean()) if len(timing.windows) else 0.0
    return pd.DataFrame([{"ranges": ranges, "ns": ns, "share": ns / step_ns if step_ns else float("nan")}])
