"""When a rank of a pipeline computes: the time in its chunks, and outside of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Maybe, RankFacts, within_rank
from dlprof.analysis.pipeline.pipeline import SCHEDULE, steady
from dlprof.errors import NotMeasured


@within_rank
def idle_ns(
    chunks: Maybe[pd.DataFrame], steady_chunks: Maybe[pd.DataFrame], light_steps: Maybe[pd.DataFrame], rank: RankFacts
) -> float:
    """Return ns of the mean steady step that this rank's schedule.step() spends outside its chunks; 0: none known."""
    if not chunks or not isinstance(rank.facts.get("pipeline"), Mapping):
        return 0.0
    frame = steady(chunks, steady_chunks, light_steps)
    calls = frame[(frame["action"] == SCHEDULE).to_numpy()]
    n = int(light_steps.get()["steady"].sum())
    return float((calls["dur_ns"] - calls["busy_ns"]).clip(lower=0).sum()) / n if n else 0.0


@within_rank
def chunk_times(chunks: pd.DataFrame) -> iv.Intervals:
    """Return the time inside chunks, of the steps whose chunks were recorded."""
    rows = chunks[(chunks["action"] != SCHEDULE).to_numpy()]
    start = rows["start_ns"].to_numpy()
    return iv.union(start, start + rows["dur_ns"].to_numpy())


@within_rank
def has_pipeline(
    chunks: Maybe[pd.DataFrame], spans: Maybe[pd.DataFrame], steady_chunks: Maybe[pd.DataFrame], rank: RankFacts
) -> bool:
    """Return whether the rank's chunks are known: recorded, or told by a trace from elsewhere."""
    if chunks:
        return True
    try:
        return not rank.facts and bool(spans) and len(steady_chunks.get()) > 0
    except NotMeasured:
        return False


@within_rank
def outside_chunks(has_pipeline: bool, chunks: Maybe[pd.DataFrame], steady_chunks: Maybe[pd.DataFrame]) -> iv.Intervals:
    """Return the time inside a schedule.step() and outside its chunks, of the calls whose chunks are known."""
    if not has_pipeline:
        return iv.EMPTY
    frame = chunks.get() if chunks else steady_chunks.get()
    whole = (frame["action"] == SCHEDULE).to_numpy()
    detailed = np.isin(frame["step"].to_numpy(), frame["step"].to_numpy()[~whole])
    start = frame["start_ns"].to_numpy()
    end = start + frame["dur_ns"].to_numpy()
    calls = iv.union(start[whole & detailed], end[whole & detailed])
    return iv.subtract(calls, iv.union(start[~whole], end[~whole]))
