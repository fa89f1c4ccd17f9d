"""The time of each module in a mean step, by part: on the host, on the device, and of the step itself.

Also the FLOPs of each module, as counted in one step, else those of its matrix products from the trace's shapes; and
the cost of recording the names of modules in the traced steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.compute.cpu_work import is_product
from dlprof.analysis.compute.operators import operator_work
from dlprof.analysis.compute.products import products
from dlprof.analysis.engine import RANK, Frame, Maybe, RankFacts, maybe, needs, per_rank, within_rank
from dlprof.analysis.modules.compiled import GRAPH
from dlprof.analysis.modules.exchanges import CALLS, bucket_shares, nearest
from dlprof.analysis.modules.frames import BACKWARD, COMMUNICATION, FORWARD, PARTS, RECOMPUTE, Frames, module_frames
from dlprof.analysis.modules.host_time import apart, cpu_exposed, module_host, outside_calls
from dlprof.analysis.modules.rows import module_rows
from dlprof.analysis.modules.sums import Sums, shared, sums, table
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import device_work, exchanges_on_host, has_device
from dlprof.analysis.timeline.host import is_on_device
from dlprof.analysis.timeline.steps import Timing, launched_within, main_stream, timing
from dlprof.errors import NotMeasured


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


@within_rank
def shaped_flops(
    operator_work: Frame = needs(operator_work),
    spans: Frame = needs(schema.SPANS),
    module_rows: Frame = needs(module_rows),
    module_frames: Frames = needs(module_frames),
) -> Sums:
    """Return the FLOPs of each module's operators in the traced steps, NaN where a product's are not known: a trace
    lacks a convolution's stride and attention's shapes. Raises NotMeasured where no shape is known.
    """
    owners = operator_work["owner"].to_numpy()
    rows = np.unique(owners[owners >= 0])
    keys = [spans[column].cat.codes.to_numpy()[rows].astype(np.int64) for column in ("name", "shape", "dtype")]
    each, of = np.unique(np.column_stack(keys), axis=0, return_inverse=True)
    texts = [spans[column].cat.categories for column in ("name", "shape", "dtype")]
    operators = [[str(text[code]) for text, code in zip(texts, row, strict=True)] for row in each.tolist()]
    flops = np.array([products(*one)[0] if one[1] else np.nan for one in operators])
    if np.isnan(flops).all():
        raise NotMeasured("the trace has no shapes of operators (record_shapes=True)")
    flops[np.isnan(flops) & ~np.array([is_product(operator) for operator, _, _ in operators], dtype=bool)] = 0.0
    found = flops[of.reshape(-1)]
    module, part = module_rows["module"].to_numpy()[rows], module_rows["part"].cat.codes.to_numpy()[rows]
    return sums(module_frames, module, part, found)


@within_rank
def module_flops(
    modules: Maybe[Frame] = maybe(schema.MODULES),
    shaped_flops: Maybe[Sums] = maybe(shaped_flops),
    module_frames: Frames = needs(module_frames),
    timing: Timing = needs(timing),
) -> Sums:
    """Return the FLOPs of each module in the traced steps; raise NotMeasured where they are not known.

    The recorder's count of one step by module includes convolutions and attention; the shapes are those of products.
    """
    counted = modules.or_none()
    if counted is None or not (counted["forward_flops"] > 0).any():
        return shaped_flops.get()
    place = {path: n for n, path in reversed(list(enumerate(module_frames.paths)))}
    module = np.array([nearest(str(path), place) for path in counted["path"]], dtype=np.int64)
    found = np.zeros_like(sums(module_frames, module[:0], module[:0]))
    for column, part in _COUNTED.items():
        each = np.maximum(counted[column].to_numpy(), 0)
        found += sums(module_frames, module, np.full(len(module), part), each)
    return found * len(timing.windows)


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
    # Dynamo also has regions without a graph; an old trace shows only regions.
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


# Calls that launch all nodes of a graph at once.
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


_COUNTED = {"forward_flops": FORWARD, "recompute_flops": RECOMPUTE, "backward_flops": BACKWARD}


@per_rank
def module_naming(timing: Timing = needs(timing), rank: RankFacts = needs(RANK)) -> pd.DataFrame:
    """Return one row: ranges (named calls of modules in a traced step), ns (their cost on the host), share of the step.

    The recorder measures the cost of a range in its own process while the profiler records. Raises NotMeasured where no
    module was named.
    """
    window = rank.facts.get("window") or {}
    recorded = window.get("modules") or {}
    first, last = window.get("first_step"), window.get("last_step")
    if not recorded.get("ranges") or not recorded.get("ns_each") or first is None or last is None:
        raise NotMeasured("no names of modules were recorded in the trace")
    ranges = recorded["ranges"] / (last - first + 1)
    ns = ranges * recorded["ns_each"]
    step_ns = float((timing.host_windows[:, 1] - timing.host_windows[:, 0]).mean()) if len(timing.windows) else 0.0
    return pd.DataFrame([{"ranges": ranges, "ns": ns, "share": ns / step_ns if step_ns else float("nan")}])
