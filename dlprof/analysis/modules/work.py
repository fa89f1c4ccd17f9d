"""The time of each module in a mean step, by part: on the host, on the device, and of the step itself."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Frame, Maybe, maybe, needs, per_rank, within_rank
from dlprof.analysis.modules.compiled import GRAPH
from dlprof.analysis.modules.device_time import device_exposed, module_device
from dlprof.analysis.modules.exchanges import CALLS
from dlprof.analysis.modules.flops import module_flops
from dlprof.analysis.modules.frames import COMMUNICATION, Frames, module_frames
from dlprof.analysis.modules.host_time import cpu_exposed, module_host, outside_calls
from dlprof.analysis.modules.rows import module_rows
from dlprof.analysis.modules.sums import Sums, sums, table
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import device_work, exchanges_on_host, has_device
from dlprof.analysis.timeline.host import is_on_device
from dlprof.analysis.timeline.steps import Timing, launched_within, timing


@within_rank
def traced_exchanges(
    spans: Frame = needs(schema.SPANS),
    is_on_device: NDArray[np.bool_] = needs(is_on_device),
    device_work: Frame = needs(device_work),
    launched_within: NDArray[np.int64] = needs(launched_within),
    exchanges_on_host: bool = needs(exchanges_on_host),
    timing: Timing = needs(timing),
) -> NDArray[np.int64]:
    """Return the rows of the exchanges of the steady traced steps: on the device, or on the host from issue to end."""
    if not exchanges_on_host:
        mine = host.is_kind(device_work, "communication") & (launched_within >= 0)
        rows: NDArray[np.int64] = device_work.index.to_numpy()[mine]
        return rows
    lasting = host.is_kind(spans, "communication") & ~is_on_device & ~host.is_named(spans, *CALLS)
    return np.flatnonzero(lasting & iv.holds(iv.merge(timing.host_windows), spans["start_ns"].to_numpy()))


@within_rank
def module_calls(
    module_rows: Frame = needs(module_rows),
    module_frames: Frames = needs(module_frames),
    traced_exchanges: NDArray[np.int64] = needs(traced_exchanges),
    timing: Timing = needs(timing),
    spans: Frame = needs(schema.SPANS),
    is_on_device: NDArray[np.bool_] = needs(is_on_device),
) -> Sums:
    """Return the number of module calls, functions of the backward pass and exchanges in the traced steps."""
    steps = iv.merge(timing.host_windows)
    counted = (module_frames.part != COMMUNICATION) & iv.holds(steps, module_frames.start)
    counted &= ~module_frames.pieces
    # A wrapper such as DistributedDataParallel has the name of the module that it wraps and calls: that is one call.
    around = module_frames.parent
    wrapped = module_frames.calls & (around >= 0) & (module_frames.module == module_frames.module[around])
    counted &= ~(wrapped & module_frames.calls[around])
    found = sums(module_frames, module_frames.module[counted], module_frames.part[counted])
    module, part = module_rows["module"].to_numpy(), module_rows["part"].cat.codes.to_numpy()
    found += sums(module_frames, module[traced_exchanges], part[traced_exchanges])
    calls = outside_calls(spans, is_on_device, module_rows)
    begun = iv.holds(steps, calls.start) & (calls.part != COMMUNICATION)
    return found + sums(module_frames, np.full(int(begun.sum()), -1), calls.part[begun])


@per_rank
def module_work(
    module_calls: Sums = needs(module_calls),
    module_host: Sums = needs(module_host),
    has_device: bool = needs(has_device),
    module_device: Maybe[tuple[Sums, Sums]] = maybe(module_device),
    device_exposed: Maybe[Sums] = maybe(device_exposed),
    cpu_exposed: Maybe[Sums] = maybe(cpu_exposed),
    module_flops: Maybe[Sums] = maybe(module_flops),
    module_frames: Frames = needs(module_frames),
    timing: Timing = needs(timing),
    spans: Frame = needs(schema.SPANS),
    is_on_device: NDArray[np.bool_] = needs(is_on_device),
    module_rows: Frame = needs(module_rows),
) -> pd.DataFrame:
    """Return the time of each module in a mean steady traced step, without the modules that it calls.

    A row for each path, kind (its class; outside modules "" or GRAPH) and part (PARTS of frames.py). Time outside
    modules has the path OUTSIDE. Columns, of a mean step:

    calls: of the module; in the backward pass, of functions; else exchanges, or calls outside modules.
    host_ns: time that threads spend in it. All rows add up to the time in which threads are in modules, in functions of
    the backward pass or in calls, plus the training thread's steps where no thread is in any.
    device_ns: of all device work that it launched, overlapped or not. 0 on a CPU.
    exposed_ns: its part of the step. With a device: the time in which its work runs; where several pieces overlap, that
    on the stream that computes most counts first, then other computation, exchanges, copies. All rows and the device's
    idle time add up to the steps. On a CPU: the training thread's time, and exchanges that no computation overlaps; all
    rows add up to the steps.
    flops: NaN where not known. copied_bytes: of its copies on the device.
    compiled: 1 where torch.compile compiled the module as one region: modules inside have no rows.
    fused: 1 where the modules of its compiled kernels are known; a kernel of several modules counts to the one around.

    Raises NotMeasured where the trace has no names of modules.
    """
    none = np.zeros_like(module_host)
    device_ns, copied = module_device.get() if has_device else (none, none)
    flops = module_flops.or_none()
    columns = {
        "calls": module_calls,
        "host_ns": module_host,
        "device_ns": device_ns,
        "exposed_ns": device_exposed.get() if has_device else cpu_exposed.get(),
        "flops": np.full_like(none, np.nan) if flops is None else flops,
        "copied_bytes": copied,
    }
    steps = len(timing.windows)
    regions = np.flatnonzero(host.is_named(spans, *host.COMPILED) & ~is_on_device)
    # Dynamo has regions without a graph, too; an old trace shows regions alone.
    graphs = np.flatnonzero(host.is_named(spans, GRAPH) & ~is_on_device)
    whole = np.setdiff1d(graphs, module_frames.divided) if len(graphs) else regions
    regions = np.setdiff1d(regions, graphs)
    start, module = spans["start_ns"].to_numpy(), module_rows["module"].to_numpy()
    divided = np.sort(start[module_frames.divided])
    first, last = (
        np.searchsorted(divided, at) for at in (start[regions], start[regions] + spans["dur_ns"].to_numpy()[regions])
    )
    flags = {"compiled": np.unique(module[whole]), "fused": np.unique(module[regions[first < last]])}
    return table(module_frames, flags, **{name: values / steps for name, values in columns.items()})
