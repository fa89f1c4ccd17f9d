"""What the wrappers that replicate a model do beside training it: DDP's search for unused parameters, DataParallel."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof import intervals as iv
from dlprof.engine import Measured, RankData, across_ranks, per_rank
from dlprof.errors import NotMeasured
from dlprof.measures import breakdown, device, host
from dlprof.measures.steps import standard_error, timing

# As PyTorch names them in a trace; first the search itself, which the training thread does after each forward pass.
_SEARCH = "torch.distributed.ddp.reducer::search_unused_parameters"
DATA_PARALLEL = "DataParallel.forward"
_REPLICATION = ("Broadcast", "Scatter", "Gather", "ReduceAddCoalesced")


@per_rank
def unused_searches(rank: RankData) -> pd.DataFrame:
    """Give for each steady traced step: step, search_ns, what DDP's search for unused parameters takes; flags_ns, the
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
    """Give the same for each rank's mean steady traced step, and noise_ns, the standard error of both together.

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
    """Give the time in which nothing is reduced but the flags: whole numbers, or the last that a step reduces."""
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
    """Give one row, ns of a steady traced step: forward_ns inside DataParallel, and copying_ns, in which it spreads and
    gathers the model, the inputs, the outputs and the gradients; noise_ns of that.

    Raises NotMeasured where the trace has no DataParallel.
    """
    spans = rank.table("spans")
    windows = timing(rank).windows
    within = iv.merge(windows)
    on_host = ~host.is_on_device(rank)
    forward = iv.intersect(within, host.cover(spans, on_host & host.is_named(spans, DATA_PARALLEL)))
    if not len(forward):
        raise NotMeasured("the trace holds no DataParallel")
    copying = iv.intersect(within, host.cover(spans, on_host & host.is_named(spans, *_REPLICATION)))
    each = iv.per_slot(copying, np.append(windows[:, 0], windows[-1, 1])).astype(float)
    n = len(windows)
    return pd.DataFrame(
        {
            "forward_ns": [iv.total(forward) / n],
            "copying_ns": [iv.total(copying) / n],
            "noise_ns": [standard_error(each)],
        }
    )
