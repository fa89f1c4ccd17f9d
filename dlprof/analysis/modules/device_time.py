"""Device time of modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Frame, Maybe, maybe, needs, within_rank
from dlprof.analysis.modules.exchanges import bucket_shares
from dlprof.analysis.modules.frames import PARTS, Frames, module_frames
from dlprof.analysis.modules.host_time import apart
from dlprof.analysis.modules.rows import module_rows
from dlprof.analysis.modules.sums import Sums, shared, sums
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import device_work
from dlprof.analysis.timeline.steps import Timing, launched_within, timing
from dlprof.analysis.timeline.traced import main_stream

# Calls that launch all nodes of a graph together.
_GRAPHS = ("cudaGraphLaunch", "hipGraphLaunch", "cuGraphLaunch")


@dataclass(frozen=True)
class Belongs:
    """What device work belongs to: a module (their number: a graph outside modules), a part, a bucket (−1: none)."""

    module: NDArray[np.int64]
    part: NDArray[np.int64]
    bucket: NDArray[np.int64]
    shares: NDArray[np.float64]  # of the modules in each bucket

    def sums(self, frames: Frames, chosen: NDArray[np.bool_], values: NDArray[Any]) -> Sums:
        """Return what values of the chosen rows add up to by module and part."""
        alone = self.bucket[chosen] < 0
        found = sums(frames, self.module[chosen][alone], self.part[chosen][alone], values[alone])
        if alone.all():
            return found
        return found + shared(frames, self.bucket[chosen][~alone], values[~alone], self.shares)


@within_rank
def device_belongs(
    spans: Frame = needs(schema.SPANS),
    device_work: Frame = needs(device_work),
    module_rows: Frame = needs(module_rows),
    module_frames: Frames = needs(module_frames),
    bucket_shares: Maybe[NDArray[np.float64]] = maybe(bucket_shares),
) -> Belongs:
    """Return what each row of device work belongs to; a graph's replay outside modules is one piece."""
    rows = device_work.index.to_numpy()
    module, bucket = (module_rows[name].to_numpy()[rows].astype(np.int64) for name in ("module", "bucket"))
    launch = spans["launch"].to_numpy()
    graphs = launch[host.is_kind(spans, "runtime") & host.is_named(spans, *_GRAPHS) & (launch >= 0)]
    replayed = (module < 0) & host.is_among(device_work["launch"].to_numpy(), graphs)
    part = module_rows["part"].cat.codes.to_numpy()[rows].astype(np.int64)
    shares = bucket_shares.or_none()
    none = np.empty((0, len(module_frames.paths)))
    module = np.where(replayed, len(module_frames.paths), module)
    return Belongs(module, part, bucket, none if shares is None else shares)


@within_rank
def module_device(
    device_work: Frame = needs(device_work),
    device_belongs: Belongs = needs(device_belongs),
    launched_within: NDArray[np.int64] = needs(launched_within),
    module_frames: Frames = needs(module_frames),
) -> tuple[Sums, Sums]:
    """Return the time of the device work that each module launched in the traced steps, and the bytes of its copies."""
    mine = launched_within >= 0
    size = device_work["bytes"].to_numpy()
    copies = mine & host.is_kind(device_work, "copy") & (size > 0)
    took = device_belongs.sums(module_frames, mine, device_work["dur_ns"].to_numpy()[mine])
    return took, device_belongs.sums(module_frames, copies, size[copies])


@within_rank
def device_exposed(
    device_work: Frame = needs(device_work),
    device_belongs: Belongs = needs(device_belongs),
    main_stream: NDArray[np.bool_] = needs(main_stream),
    timing: Timing = needs(timing),
    module_frames: Frames = needs(module_frames),
) -> Sums:
    """Return each module's part of the device's steps: the time in which its work runs.

    Where several pieces overlap, computation on the stream that computes most counts first, then other computation,
    exchanges, copies; of the same sort the one that began first.
    """
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
    found = np.zeros((len(module_frames.paths) + 2) * len(PARTS))
    for chosen in sorts:
        took = iv.within(left, *apart(start[chosen], end[chosen]))
        found += device_belongs.sums(module_frames, chosen, took)
        left = iv.subtract(left, iv.union(start[chosen], end[chosen]))
    return found
