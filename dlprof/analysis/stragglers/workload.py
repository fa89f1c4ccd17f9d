"""How much each rank has to do in a step, which distinguishes more work from slower work."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis import settings
from dlprof.analysis.engine import Frame, Job, Maybe, maybe, needs, per_rank
from dlprof.analysis.experts.tokens import Balance
from dlprof.analysis.machine.samples import WAITED
from dlprof.analysis.step.partition import cpu_computation
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import device_work, has_device
from dlprof.analysis.timeline.host import on_training_thread
from dlprof.analysis.timeline.steps import Timing, launched_within, timing
from dlprof.errors import NotMeasured


@per_rank
def workload(
    timing: Timing = needs(timing),
    has_device: bool = needs(has_device),
    device_work: Maybe[Frame] = maybe(device_work),
    launched_within: Maybe[NDArray[np.int64]] = maybe(launched_within),
    on_training_thread: Maybe[Frame] = maybe(on_training_thread),
    cpu_computation: Maybe[iv.Intervals] = maybe(cpu_computation),
) -> pd.DataFrame:
    """Return one row, of the mean steady traced step: pieces of computation, piece_ns (of a mean one), copied_bytes.

    Pieces are kernels on a device, else the outermost operators of the training thread, without their
    waiting for collectives (in a function of the backward pass, say); copied_bytes go from the host
    to the device, NaN without a device.
    """
    if not len(timing.windows):
        raise NotMeasured("no steps were traced")
    copied = np.nan
    if has_device:
        work = device_work.get()
        inside = launched_within.get() >= 0
        pieces = work["dur_ns"].to_numpy()[inside & host.is_kind(work, "kernel")]
        copied = float(work["bytes"].to_numpy()[inside & host.is_one_of(work["copy"], "HtoD")].clip(min=0).sum())
    else:
        thread = on_training_thread.get()
        outermost = host.outermost(thread[host.is_kind(thread, "op")])
        start = outermost["start_ns"].to_numpy()
        took = iv.within(cpu_computation.get(), start, start + outermost["dur_ns"].to_numpy())
        pieces = took[iv.holds(iv.merge(timing.windows), start)]
    n = len(timing.windows)
    mean = float(pieces.mean()) if len(pieces) else 0.0
    return pd.DataFrame([{"pieces": len(pieces) / n, "piece_ns": mean, "copied_bytes": copied / n}])


@dataclass(frozen=True)
class Reason:
    """Why a rank computes longer than the others, what to do, and whether they have less to do for it."""

    said: str = ""
    do: str = ""
    shared: bool = False
    owner: str = ""  # the rule that answers for it


def longer_because(
    workload: pd.DataFrame,
    sample_means: Maybe[pd.DataFrame],
    held_down: Maybe[list[tuple[dict[Any, Any], str, float]]],
    expert_balance: Maybe[Balance],
    job: Job,
    late: int,
) -> Reason:
    """Return why a rank computes longer than the others, as far as it was recorded.

    In this order: more tokens for its experts, a larger part of the model, more kernels or operators, more bytes copied
    in, a slower clock, no free core for its main thread. Each must make up at least half of what its computation is
    longer by.
    """
    frame = workload.set_index("rank")
    mine, others = frame.loc[late], frame.drop(index=late).median()
    least = 1 + (mine["pieces"] * mine["piece_ns"] / (others["pieces"] * others["piece_ns"]) - 1) / 2
    if not least > 1:
        return Reason()
    more_ns = mine["pieces"] * mine["piece_ns"] - others["pieces"] * others["piece_ns"]
    if (balance := expert_balance.or_none()) is not None and balance.saving_ns > 0:
        routed = balance.ranks.set_index("rank")[["routed_ns", "ratio"]]
        if late in routed.index and routed["routed_ns"][late] - routed["routed_ns"].drop(late).median() >= more_ns / 2:
            said = f"its experts get {routed['ratio'][late]:.2f} × the mean rank's tokens"
            return Reason(said, "balance the tokens over the experts", owner="expert_imbalance")
    held = settings.held(job)
    holds, their = held.get(late, 0), median([n for rank, n in held.items() if rank != late] or [0])
    if holds and holds >= least * their:
        said = f"it holds {holds:,} parameters, the others {their:,.0f}"
        return Reason(said, "share out evenly what it holds: tables, layers, experts", shared=True)
    what = "operators" if np.isnan(mine["copied_bytes"]) else "kernels"
    if mine["pieces"] >= least * others["pieces"]:
        said = f"{mine['pieces']:,.0f} {what} a step, the others {others['pieces']:,.0f}"
        do = "give it the same work: the same layers, the same number of batches, nothing that only it computes"
        return Reason(said, do)
    if mine["copied_bytes"] >= least * others["copied_bytes"] > 0:
        said = f"{mine['copied_bytes'] / others['copied_bytes']:.2f} × the others' data a step"
        return Reason(said, "give it batches like the others': sort or bucket by length")
    clock, their_clock = _sampled(sample_means, "gpu", "sm_clock_mhz", late)
    if their_clock >= least * clock:
        said = f"its clock runs at {clock:,.0f} MHz, the others' at {their_clock:,.0f}"
        do = "look at its power limit, its cooling and who else uses it (`nvidia-smi -q -d CLOCK,PERFORMANCE`)"
        down = any(why and (row["rank"], row["source"]) == (late, "gpu") for row, why, _ in held_down.or_none() or [])
        return Reason(said, do, owner="throttled_clock" if down else "")
    waited, they = _sampled(sample_means, "processes", WAITED, late)
    if waited - they >= 1 - 1 / least:
        said = f"for {100 * waited:.0f} % of the time its main thread has no core, the others' {100 * they:.0f} %"
        return Reason(said, "find out what else runs on its host, or give its process cores of its own")
    return Reason(
        f"as many {what}, each {mine['piece_ns'] / others['piece_ns']:.2f} × as long",
        "give it the same work (shards, sequence lengths); then look at its device: clock, users, cooling",
    )


def _sampled(sample_means: Maybe[pd.DataFrame], source: str, metric: str, late: int) -> tuple[float, float]:
    """Return a sampled metric's mean on the late rank, and the median of the others'; NaN where it was not sampled."""
    means = sample_means.or_none()
    if means is None:
        return np.nan, np.nan
    chosen = means[(means["source"] == source) & (means["metric"] == metric)].groupby("rank")["mean"].sum()
    return float(chosen.get(late, np.nan)), float(chosen.drop(late, errors="ignore").median())
