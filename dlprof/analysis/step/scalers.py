"""Gradient scalers: how often they skipped an optimizer step, and their scale over the job."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof import schema
from dlprof.analysis.engine import RANK, Frame, Maybe, RankFacts, maybe, needs, per_rank
from dlprof.analysis.timeline.steady import light_steps
from dlprof.errors import DoesNotApply, NotMeasured

# Changes of the scale that travel between processes; of more, so many are chosen evenly.
MOST_CHANGES = 1_000

NO_SCALER = "no gradient scaler (torch.amp.GradScaler) was used"
ON_DEVICE = (
    "a fused optimizer skips steps on the device, and the host does not know which (call `get_scale()` now and then)"
)


@per_rank
def scalers(
    loss_scale: Maybe[Frame] = maybe(schema.LOSS_SCALE),
    light_steps: Frame = needs(light_steps),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return a row for each gradient scaler.

    Columns: scaler, known (whether the host saw the skipped steps), interval (steps after which the scale grows),
    first_scale, scale (the last one), least_scale (NaN: not known), skipped (in the whole job), at_first (of these, the
    ones before the first step that was not skipped), steady_skipped (in steady steps, without those at first), steady
    (number of steady steps), after_growth (of steady_skipped, the ones right after the scale had grown).
    """
    if rank.facts.get("grad_scaler") is False and loss_scale.or_none() is None:
        raise DoesNotApply(NO_SCALER)
    frame = loss_scale.get().astype({"kind": "str"})
    if not len(frame):
        raise DoesNotApply(NO_SCALER)
    begin = light_steps["start_ns"].to_numpy()
    at = np.searchsorted(begin, frame["at_ns"].to_numpy(), side="right") - 1
    end = begin + light_steps["dur_ns"].to_numpy()
    steady = light_steps["steady"].to_numpy(dtype=bool)
    inside = (at >= 0) & steady[at.clip(min=0)] & (frame["at_ns"].to_numpy() < end[at.clip(min=0)])
    steps = int(steady.sum())
    rows = [
        _scaler(frame[frame["scaler"] == number], inside[frame["scaler"] == number], steps)
        for number in frame["scaler"].unique()
    ]
    return pd.DataFrame(rows)


def _scaler(rows: pd.DataFrame, inside: np.ndarray, steady: int) -> dict[str, float]:
    kind, step, scale = (rows[c].to_numpy() for c in ("kind", "step", "scale"))
    skipped, count = kind == "skipped", rows["count"].to_numpy()
    # Consecutive skipped steps at the very beginning find the scale: they happen once.
    own = np.flatnonzero(skipped)
    first = np.zeros(len(rows), dtype=bool)
    first[own[step[own] == step[0] + np.arange(len(own))]] = kind[0] == "began"
    counted = skipped & inside & ~first
    before = np.roll(kind, 1) == "grown"
    known = scale[~np.isnan(scale)]
    return {
        "scaler": int(rows["scaler"].iloc[0]),
        "known": "unknown" not in kind,
        "interval": int(rows["interval"].max()),
        "first_scale": float(scale[0]),
        "scale": float(scale[-1]),
        "least_scale": float(known.min()) if len(known) else np.nan,
        "skipped": int(count[skipped].sum()),
        "at_first": int(count[first].sum()),
        "steady_skipped": int(count[counted].sum()),
        "steady": steady,
        "after_growth": int(count[counted & before].sum()),
    }


@per_rank
def scale_changes(loss_scale: Frame = needs(schema.LOSS_SCALE)) -> pd.DataFrame:
    """Return the changes of each scaler's scale, in order: scaler, step, scale, skipped (whether a step was)."""
    frame = loss_scale[loss_scale["scale"].notna()]
    if not len(frame):
        raise NotMeasured("no scale is known")
    chosen = np.unique(np.linspace(0, len(frame) - 1, min(len(frame), MOST_CHANGES)).round().astype(int))
    frame = frame.iloc[chosen].reset_index(drop=True)
    return frame[["scaler", "step", "scale"]].assign(skipped=frame["kind"].astype("str") == "skipped")
