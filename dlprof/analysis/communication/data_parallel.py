"""What the wrappers that replicate a model do beside training it: DDP's search for unused parameters, DataParallel."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Job, Maybe, across_ranks, per_rank
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.steady import standard_error
from dlprof.analysis.timeline.steps import Timing
from dlprof.analysis.timeline.what_if import WhatIf
from dlprof.errors import NotMeasured

# As PyTorch names them in a trace; first the search itself, which the training thread does after each forward pass.
_SEARCH = "torch.distributed.ddp.reducer::search_unused_parameters"
DATA_PARALLEL = "DataParallel.forward"
_REDUCING = ("BroadcastBackward", "ReduceAddCoalesced")
# Of a step's computing: a layer's gradients, of its inputs and of its weights, take as much each as its forward pass.
_BACKWARD = 2 / 3
_REPLICATION = ("Broadcast", "Scatter", "Gather", *_REDUCING)


@per_rank
def unused_searches(
    on_training_thread: pd.DataFrame,
    timing: Timing,
    spans: pd.DataFrame,
    has_device: bool,
    is_on_device: NDArray[np.bool_],
    exposed_communication: Maybe[iv.Intervals],
) -> pd.DataFrame:
    """Return for each steady traced step: step, search_ns, what DDP's search for unused parameters takes; flags_ns, the
    exposed part of the all_reduce that tells all ranks what was used.

    Raises NotMeasured where the trace has no such search.
    """
    windows = timing.windows
    search = iv.intersect(iv.merge(windows), host.cover(on_training_thread, host.is_named(on_training_thread, _SEARCH)))
    if not len(search):
        raise NotMeasured("the trace holds no search for unused parameters")
    flags = iv.intersect(_flags(spans, has_device, is_on_device, windows), exposed_communication.get())
    edges = np.append(windows[:, 0], windows[-1, 1])
    return pd.DataFrame(
        {
            "step": timing.numbers if len(timing.numbers) else np.arange(len(windows)),
            "search_ns": iv.per_slot(search, edges).astype(float),
            "flags_ns": iv.per_slot(flags, edges).astype(float),
        }
    )


@across_ranks
def unused_search(unused_searches: pd.DataFrame, job: Job) -> pd.DataFrame:
    """Return the same for each rank's mean steady traced step, and noise_ns, the standard error of both together.

    Whoever comes first to the flags waits there for the last; without them it would wait in the next exchange. So of
    a step's flags the least of all ranks counts.
    """
    each = unused_searches
    if not job.missing_ranks:
        each = each.assign(flags_ns=each.groupby("step")["flags_ns"].transform("min"))
    means = each.groupby("rank")[["search_ns", "flags_ns"]].mean()
    # The ranks do the same: a step's mean over them is one value.
    both = (each["search_ns"] + each["flags_ns"]).groupby(each["step"]).mean().to_numpy(dtype=float)
    return means.assign(noise_ns=standard_error(both)).reset_index()


def _flags(
    spans: pd.DataFrame, has_device: bool, is_on_device: NDArray[np.bool_], windows: iv.Intervals
) -> iv.Intervals:
    """Return the time in which nothing is reduced but the flags: whole numbers, or the last that a step reduces."""
    reduces = host.is_kind(spans, "communication") & host.is_one_of(spans["collective"], "all_reduce")
    mine = reduces & (is_on_device if has_device else host.is_named(spans, "gloo:", "mpi:"))
    numbers = host.is_one_of(spans["dtype"], "int32", "int64")
    if (mine & numbers).any():
        flags = mine & numbers
    elif has_device:
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
def replication(
    spans: pd.DataFrame,
    timing: Timing,
    is_on_device: NDArray[np.bool_],
    device_work: Maybe[pd.DataFrame],
    what_if: Maybe[WhatIf],
    has_device: bool,
    partition: Maybe[dict[str, iv.Intervals]],
) -> pd.DataFrame:
    """Return one row, ns of a steady traced step: forward_ns of host inside DataParallel, and copying_ns, in which it
    spreads and gathers the model, the inputs, the outputs and the gradients; noise_ns of that; gain_ns, how much
    shorter the mean steady step would be without; reduced_ns, what an all-reduce of the gradients between the trace's
    devices takes, at the speed at which they are added up on the first one; and backward_ns, computing that can hide
    it.

    Copying is the device's with nothing computed beside it, and the host's where the trace links no launch to what it
    launched. Raises NotMeasured where the trace has no DataParallel.
    """
    on_host = ~is_on_device
    forward = iv.intersect(
        iv.merge(timing.host_windows), host.cover(spans, on_host & host.is_named(spans, DATA_PARALLEL))
    )
    if not len(forward):
        raise NotMeasured("the trace holds no DataParallel")
    calls = on_host & host.is_named(spans, *_REPLICATION)
    copying, gain = host.cover(spans, calls), np.nan
    reducing = host.cover(spans, calls & host.is_named(spans, *_REDUCING))
    rows = _launched_in(spans, device_work.get(), calls)
    if rows.any():
        work = device_work.get()
        others = host.cover(work, ~rows & host.is_kind(work, "kernel"))
        copying = iv.subtract(host.cover(work, rows), others)
        gradients = _launched_in(spans, device_work.get(), calls & host.is_named(spans, *_REDUCING))
        reducing = iv.subtract(host.cover(work, gradients), others)
    edges = np.append(timing.windows[:, 0], timing.windows[-1, 1])
    each = iv.per_slot(iv.intersect(iv.merge(timing.windows), copying), edges).astype(float)
    with suppress(NotMeasured):
        asked = what_if.get()
        durations = np.where(rows[asked.replay.rows], -1, asked.replay.durations)
        gain = asked.gain_ns(durations=durations, other=((host.cover(spans, calls), 0.0),))
    return pd.DataFrame(
        {
            "forward_ns": [iv.total(forward) / len(timing.windows)],
            "copying_ns": [float(each.mean())],
            "noise_ns": [standard_error(each)],
            "reduced_ns": [
                _all_reduced(device_work, has_device)
                * iv.total(iv.intersect(iv.merge(timing.windows), reducing))
                / len(timing.windows)
            ],
            "backward_ns": [_BACKWARD * iv.total(partition.get().get("computation", iv.EMPTY)) / len(timing.windows)],
            "gain_ns": [gain if rows.any() and np.isfinite(gain) else float(each.mean())],
        }
    )


def _all_reduced(device_work: Maybe[pd.DataFrame], has_device: bool) -> float:
    """Return how many times the bytes of a reduction to one device an all-reduce moves (nccl-tests, PERFORMANCE.md)."""
    lanes: list[str] = list(device_work.get()["lane"].unique()) if has_device else []
    devices = len({lane.partition(":")[0] for lane in lanes})
    return 2 * (devices - 1) / devices if devices > 1 else 1.0


def _launched_in(spans: pd.DataFrame, device_work: pd.DataFrame, calls: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which rows of the device's work were launched within some spans of the host, by the same thread."""
    lane, start = spans["lane"].cat.codes.to_numpy(), spans["start_ns"].to_numpy()
    launching = host.is_kind(spans, "runtime") & (spans["launch"].to_numpy() >= 0)
    found = np.zeros(len(spans), dtype=bool)
    for thread in np.unique(lane[calls]):
        mine = launching & (lane == thread)
        found[mine] = iv.holds(host.cover(spans, calls & (lane == thread)), start[mine])
    rows: NDArray[np.bool_] = np.isin(device_work["launch"].to_numpy(), spans["launch"].to_numpy()[found])
    return rows
