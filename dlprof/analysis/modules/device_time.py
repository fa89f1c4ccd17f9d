"""What modules take of a device."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import within_rank
from dlprof.analysis.modules.frames import Frames
from dlprof.analysis.modules.host_time import apart
from dlprof.analysis.modules.sums import Sums, sums
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.steps import Timing

# Calls that launch all nodes of a graph together.
_GRAPHS = ("cudaGraphLaunch", "hipGraphLaunch", "cuGraphLaunch")

Belongs = tuple[NDArray[np.int64], NDArray[np.int64]]  # module (their number: a graph) and part of each row


@within_rank
def device_belongs(
    spans: pd.DataFrame, device_work: pd.DataFrame, module_rows: pd.DataFrame, module_frames: Frames
) -> Belongs:
    """Return the module and the part of each row of the device's work; what graphs replay outside of modules is one."""
    rows = device_work.index.to_numpy()
    module, part = module_rows["module"].to_numpy()[rows], module_rows["part"].cat.codes.to_numpy()[rows]
    launch = spans["launch"].to_numpy()
    graphs = launch[host.is_kind(spans, "runtime") & host.is_named(spans, *_GRAPHS) & (launch >= 0)]
    replayed = (module < 0) & host.is_among(device_work["launch"].to_numpy(), graphs)
    return np.where(replayed, len(module_frames.paths), module), part.astype(np.int64)


@within_rank
def module_device(
    device_work: pd.DataFrame, device_belongs: Belongs, launched_within: NDArray[np.int64], module_frames: Frames
) -> tuple[Sums, Sums]:
    """Return the time of the device work that each module launched in the traced steps, and the bytes of its copies."""
    mine = launched_within >= 0
    module, part = device_belongs
    took = sums(module_frames, module[mine], part[mine], device_work["dur_ns"].to_numpy()[mine])
    copies = mine & host.is_kind(device_work, "copy") & (device_work["bytes"].to_numpy() > 0)
    return took, sums(module_frames, module[copies], part[copies], device_work["bytes"].to_numpy()[copies])


@within_rank
def device_exposed(
    device_work: pd.DataFrame,
    device_belongs: Belongs,
    main_stream: NDArray[np.bool_],
    timing: Timing,
    module_frames: Frames,
) -> Sums:
    """Return the time of the device's steps in which each module's work runs, where several run that of one.

    First comes computation on the stream that computes most, then other computation, exchanges, copies; of the same
    sort what began first.
    """
    module, part = device_belongs
    start = device_work["start_ns"].to_numpy()
    end = start + device_work["dur_ns"].to_numpy()
    computes = host.is_kind(device_work, "kernel")
    sorts = (
        computes & main_stream,
        computes & ~main_stream,
        host.is_kind(device_work, "communication"),
        host.is_kind(device_work, "copy", "set"),
    )
    left = iv.merge(timing.windows)
    found = sums(module_frames, np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
    for chosen in sorts:
        took = iv.within(left, *apart(start[chosen], end[chosen]))
        found += sums(module_frames, module[chosen], part[chosen], took)
        left = iv.subtract(left, iv.union(start[chosen], end[chosen]))
    return found
