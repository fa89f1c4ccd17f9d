"""What the wrappers that replicate a model do beside training it: DDP's search for unused parameters, DataParallel."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import intervals as iv
from dlprof.engine import Measured, RankData, across_ranks, per_rank
from dlprof.errors import NotMeasured
from dlprof.measures import breakdown
from dlprof.timeline import device, host
from dlprof.timeline.steps import standard_error, timing
from dlprof.timeline.what_if import what_if

# As PyTorch names them in a trace; first the search itself, which the training thread does after each forward pass.
_SEARCH = "torch.distributed.ddp.reducer::search_unused_parameters"
DATA_PARALLEL = "DataParallel.forward"
_REDUCING = ("BroadcastBackward", "ReduceAddCoalesced")
# Of a step's computing: a layer's gradients, of its inputs and of its weights, take as much each as its forward pass.
_BACKWARD = 2 / 3
_REPLICATION = ("Broadcast", "Scatter", "Gather", *_REDUCING)


@per_rank
def unused_searches(rank: RankData) -> pd.DataFrame:
    """Return for each steady traced step: step, search_ns, what DDP's search for unused parameters takes; flags_ns, the
    exposed part of the all_reduce that tells all ranks what was used.

    Raises NotMeasured where the trace has no such search.
    """
    thread = host.on_training_thread(rank)
    t = timing(rank)
    windows = t.windows
    search = iv.intersect(iv.merge(windows), host.cover(thread, host.is_named(thread, _SEARCH)))
    if not len(search):
        raise NotMeasured("the trace holds no search for unused parameters")
    flags = iv.intersect(_flags(rank, windows), breakdown.exposed_communication(rank))
    edges = np.append(windows[:, 0], windows[-1, 1])
    return pd.DataFrame(
        {
            "step": t.numbers if len(t.numbers) else np.arange(len(windows)),
            "search_ns": iv.per_slot(search, edges).astype(float),
            "flags_ns": iv.per_slot(flags, edges).astype(float),
        }
    )


@across_ranks(unused_searches)
def unused_search(run: Measured) -> pd.DataFrame:
    """Return the same for each rank's mean steady traced step, and noise_ns, the standard error of both together.

    Whoever comes first to the flags waits there for the last; without them it would wait in the next exchange. So of
    a step's flags the least of all ranks counts.
    """
    each = run.frame(unused_searches)
    if not run.missing_ranks:
        each = each.assign(flags_ns=each.groupby("step")["flags_ns"].transform("min"))
    means = each.groupby("rank")[["search_ns", "flags_ns"]].mean()
    # The ranks do the same: a step's mean over them is one value.
    both = (each["search_ns"] + each["flags_ns"]).groupby(each["step"]).mean().to_numpy(dtype=float)
    return means.assign(noise_ns=standard_error(both)).reset_index()


def _flags(rank: RankData, windows: iv.Intervals) -> iv.Intervals:
    """Return the time in which nothing is reduced but the flags: whole numbers, or the last that a step reduces."""
    spans = rank.table("spans")
    reduces = host.is_kind(spans, "communication") & host.is_one_of(spans["collective"], "all_reduce")
    if device.has_device(rank):
        mine = reduces & host.is_on_device(rank)
    else:
        mine = reduces & host.is_named(spans, "gloo:", "mpi:")
    numbers = host.is_one_of(spans["dtype"], "int32", "int64")
    if (mine & numbers).any():
        flags = mine & numbers
    elif device.has_device(rank):
        return iv.EMPTY
    else:
        start = spans["start_ns"].to_numpy()
        rows = np.flatnonzero(mine)
        last = np.searchsorted(start[rows], windows[:, 1]) - 1
        first = np.searchsorted(start[rows], windows[:, 0])
        flags = np.zeros(len(spans), dtype=bool)
        # One alone would be the gradients'.
        flags[rows[last[last > first]]] = True
    return iv.subtract(host.cover(spans, flags), host.cover(spans, mine & ~flags))


@per_rank
def replication(rank: RankData) -> pd.DataFrame:
    """Return one row, ns of a steady traced step: forward_ns of host inside DataParallel, and copying_ns, in which it
    spreads and gathers the model, the inputs, the outputs and the gradients; noise_ns of that; gain_ns, how much
    shorter the mean steady step would be without; reduced_ns, what an all-reduce of the gradients between the trace's
    devices takes, at the speed at which they are added up on the first one; and backward_ns, computing that can hide
    it.

    Copying is the device's with nothing computed beside it, and the host's where the trace links no launch to what it
    launched. Raises NotMeasured where the trace has no DataParallel.
    """
    spans, t = rank.table("spans"), timing(rank)
    on_host = ~host.is_on_device(rank)
    forward = iv.intersect(iv.merge(t.host_windows), host.cover(spans, on_host & host.is_named(spans, DATA_PARALLEL)))
    if not len(forward):
        raise NotMeasured("the trace holds no DataParallel")
    calls = on_host & host.is_named(spans, *_REPLICATION)
    copying, gain = host.cover(spans, calls), np.nan
    reducing = host.cover(spans, calls & host.is_named(spans, *_REDUCING))
    rows = _launched_in(rank, calls)
    if rows.any():
        work = device.device_work(rank)
        others = host.cover(work, ~rows & host.is_kind(work, "kernel"))
        copying = iv.subtract(host.cover(work, rows), others)
        gradients = _launched_in(rank, calls & host.is_named(spans, *_REDUCING))
        reducing = iv.subtract(host.cover(work, gradients), others)
    edges = np.append(t.windows[:, 0], t.windows[-1, 1])
    each = iv.per_slot(iv.intersect(iv.merge(t.windows), copying), edges).astype(float)
    with suppress(NotMeasured):
        asked = what_if(rank)
        durations = np.where(rows[asked.replay.rows], -1, asked.replay.durations)
        gain = asked.gain_ns(durations=durations, other=((host.cover(spans, calls), 0.0),))
    return pd.DataFrame(
        {
            "forward_ns": [iv.total(forward) / len(t.windows)],
            "copying_ns": [float(each.mean())],
            "noise_ns": [standard_error(each)],
            "reduced_ns": [_all_reduced(rank) * iv.total(iv.intersect(iv.merge(t.windows), reducing)) / len(t.windows)],
            "backward_ns": [
                _BACKWARD * iv.total(breakdown.partition(rank).get("computation", iv.EMPTY)) / len(t.windows)
            ],
            "gain_ns": [gain if rows.any() and np.isfinite(gain) else float(each.mean())],
        }
    )


def _all_reduced(rank: RankData) -> float:
    """Return how many times the bytes of a reduction to one device an all-reduce moves (nccl-tests, PERFORMANCE.md)."""
    lanes: list[str] = list(device.device_work(rank)["lane"].unique()) if device.has_device(rank) else []
    devices = len({lane.partition(":")[0] for lane in lanes})
    return 2 * (devices - 1) / devices if devices > 1 else 1.0


def _launched_in(rank: RankData, calls: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which rows of the device's work were launched within some spans of the host, by the same thread."""
    spans, work = rank.table("spans"), device.device_work(rank)
    lane, start = spans["lane"].cat.codes.to_numpy(), spans["start_ns"].to_numpy()
    launching = host.is_kind(spans, "runtime") & (spans["launch"].to_numpy() >= 0)
    found = np.zeros(len(spans), dtype=bool)
    for thread in np.unique(lane[calls]):
        mine = launching & (lane == thread)
        found[mine] = iv.holds(host.cover(spans, calls & (lane == thread)), start[mine])
    rows: NDArray[np.bool_] = np.isin(work["launch"].to_numpy(), spans["launch"].to_numpy()[found])
    return rows
