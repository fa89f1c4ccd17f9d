"""What pinning a batch takes: all batches of a loader pass one thread, however many workers make them.

With `pin_memory=True` a thread of the training process receives every batch, copies it into page-locked memory, and
frees the shared memory that it came in (torch/utils/data/_utils/pin_memory.py).
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.engine import RankFacts, per_rank
from dlprof.analysis.input.handover import HOSTS_DIFFER, told
from dlprof.analysis.input.loader import in_steady
from dlprof.analysis.timeline.steps import Timing
from dlprof.errors import DoesNotApply

# A loop that waits for this share of its step (XProf's bound for input) while its workers would make batches in less
# than this share of the time waits for what is between the two.
_WAITS, _FASTER = 0.05, 0.8


@per_rank
def pinning(
    loading: pd.DataFrame,
    loader_means: pd.DataFrame,
    worker_means: pd.DataFrame,
    fetch_series: pd.DataFrame,
    light_steps: pd.DataFrame,
    timing: Timing,
    has_device: bool,
    rank: RankFacts,
) -> pd.DataFrame:
    """Return one row: pin_ns, what pinning takes its thread for a batch, batch_bytes (−1: not known), and known.

    known: 1 where the thread was timed, or is what the loop waits for; then it takes as long as a batch comes after
    another. 0: the usual time for so many bytes, and no longer than that. Raises DoesNotApply where no thread pins.
    """
    loader, means = settings.loader_of(rank.facts), loader_means.iloc[0]
    workers = loader.get("num_workers")
    if not (has_device and loader.get("pin_memory") is True and workers):
        raise DoesNotApply("no thread of a loader pins batches")
    tensors, size = (float(fetch_series[name].mean()) for name in ("tensors", "tensor_bytes"))
    timed = loading[(loading["kind"] == "pin") & (loading["dur_ns"] > 0)]
    timed = timed[in_steady(light_steps, timed["start_ns"].to_numpy())]
    usual = told(tensors, size, np.nan).usual.taking_ns
    if len(timed):
        pin, known = float(timed["dur_ns"].sum() / timed["count"].sum()), True
    else:
        each = timing.step_ns * means["loaders"] / max(means["step_batches"], 1.0)
        waits, made = timing.phases.get("fetch", 0.0) / timing.step_ns, float(worker_means["dur_ns"].max()) / workers
        known = waits >= _WAITS and made < _FASTER * each <= _FASTER * HOSTS_DIFFER * usual
        pin = each if known else min(usual, each)
    return pd.DataFrame({"pin_ns": [pin], "batch_bytes": [size], "known": [int(known)]})
