"""The time of each module in a mean step, by part: on the host, on the device, and of the step itself.

Also the FLOPs of each module, as counted in one step, else those of its matrix products from the trace's shapes; and
the cost of recording the names of modules in the traced steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from msgspec import Struct
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.compute.cpu_work import is_product
from dlprof.analysis.compute.operators import operator_work
from dlprof.analysis.compute.products import products
from dlprof.analysis.engine import RANK, Frame, Maybe, RankFacts, maybe, needs, per_rank, within_rank
from dlprof.analysis.modules.frames import (
    BACKWARD,
    CALLS,
    COMMUNICATION,
    COMPILED_GRAPH,
    FORWARD,
    OTHER,
    PARTS,
    RECOMPUTE,
    Frames,
    bucket_shares,
    module_frames,
    module_rows,
)
from dlprof.analysis.step.partition import cpu_computation
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import device_work, exchanges_on_host, has_device
from dlprof.analysis.timeline.host import is_on_device, training_lane
from dlprof.analysis.timeline.steps import Timing, launched_within, main_stream, timing
from dlprof.errors import NotMeasured

# The path of time outside modules, and the class of a CUDA graph's replay outside modules.
OUTSIDE = "(outside of modules)"
GRAPH = "CUDA graph"

# The tree of a larger model is cut at the depth at which it has no more modules than this.
MOST_MODULES = 2_000

Sums = NDArray[np.float64]  # one for each part of: no module, each module in order, graphs outside of modules


def sums(
    frames: Frames, module: NDArray[np.int64], part: NDArray[np.integer[Any]], values: NDArray[Any] | None = None
) -> Sums:
    """Return sums of values, or counts, by module (−1: none, their number: a graph) and part."""
    key = (module + 1) * len(PARTS) + part
    size = (len(frames.paths) + 2) * len(PARTS)
    return np.bincount(key, weights=None if values is None else values.astype(float), minlength=size).astype(float)


class Belongs(Struct, frozen=True):
    """What work belongs to: a module (their number: a graph outside modules), a part, a bucket (−1: none)."""

    module: NDArray[np.int64]
    part: NDArray[np.int64]
    bucket: NDArray[np.int64]
    shares: NDArray[np.float64] | None  # of the modules in each bucket; None: there is none

    def sums(self, frames: Frames, chosen: NDArray[np.bool_], values: NDArray[Any]) -> Sums:
        """Return what values of the chosen rows add up to by module and part; exchanges by their bucket's shares."""
        alone = self.bucket[chosen] < 0
        found = sums(frames, self.module[chosen][alone], self.part[chosen][alone], values[alone])
        if self.shares is not None and not alone.all():
            bucket = self.bucket[chosen][~alone]
            of = np.bincount(bucket, weights=values[~alone].astype(float), minlength=len(self.shares))
            found.reshape(-1, len(PARTS))[1:-1, COMMUNICATION] += of @ self.shares
        return found


def table(frames: Frames, flags: Mapping[str, NDArray[np.int64]], **columns: Sums) -> pd.DataFrame:
    """Return a row for each path, kind (the class) and part in which any of the sums is neither 0 nor unknown.

    A last column for each of the `flags` is 1 for the modules that it lists, else 0.
    """
    count, width = len(frames.paths), len(PARTS)
    order = np.append(np.arange(1, count + 1), [0, count + 1])
    frame = pd.DataFrame(
        {
            "path": np.repeat(np.array([*frames.paths, OUTSIDE, OUTSIDE], dtype=object), width),
            "kind": np.repeat(np.array([*frames.classes, "", GRAPH], dtype=object), width),
            "part": np.tile(np.array(PARTS, dtype=object), count + 2),
            **{name: values.reshape(count + 2, width)[order].reshape(-1) for name, values in columns.items()},
            **{name: np.repeat(np.isin(np.arange(count + 2), of), width).astype(int) for name, of in flags.items()},
        }
    )
    used = (frame[list(columns)].fillna(0.0).to_numpy() != 0).any(axis=1)
    return _folded(frame[used].reset_index(drop=True), list(flags))


def _folded(frame: pd.DataFrame, flags: Sequence[str]) -> pd.DataFrame:
    """Where there are too many modules, add the deepest ones to the modules around them."""
    paths = frame["path"]
    depth = paths.str.count(r"\.") + 1
    deep = int(depth.max()) if len(paths) else 0
    while paths.nunique() > MOST_MODULES and deep > 1:
        deep -= 1
        paths = paths.where(depth <= deep, paths.str.split(".").str[:deep].str.join("."))
    whole = paths == frame["path"]
    if whole.all():
        return frame
    classes = frame[whole].drop_duplicates("path").set_index("path")["kind"]
    folded = frame.assign(path=paths, kind=frame["kind"].where(whole, paths.map(classes).fillna("")))
    summed: pd.DataFrame = folded.groupby(["path", "kind", "part"], sort=False).sum(min_count=1).reset_index()
    return summed.assign(**{name: (summed[name] > 0).astype(int) for name in flags})


class Pieces(Struct, frozen=True):
    """Stretches of the host's time, each on a lane (its code), for a module (−1: none) and a part of the step."""

    lane: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    module: NDArray[np.int64]
    part: NDArray[np.int64]


@within_rank
def outside_calls(
    spans: Frame = needs(schema.SPANS),
    is_on_device: NDArray[np.bool_] = needs(is_on_device),
    module_rows: Frame = needs(module_rows),
) -> Pieces:
    """Return the calls of the host that lie in no frame and in no other such call."""
    called = host.is_kind(spans, "op", "runtime") | (
        host.is_kind(spans, "communication") & host.is_named(spans, *CALLS)
    )
    rows = np.flatnonzero(called & ~is_on_device & (module_rows["frame"].to_numpy() < 0))
    lane = spans["lane"].cat.codes.to_numpy()[rows].astype(np.int64)
    order = np.argsort(lane, kind="stable")
    rows, lane = rows[order], lane[order]
    start = spans["start_ns"].to_numpy()[rows]
    end = start + spans["dur_ns"].to_numpy()[rows]
    outer = np.ones(len(rows), dtype=bool)
    for code in np.unique(lane):
        mine = np.flatnonzero(lane == code)
        reach = np.maximum.accumulate(end[mine])
        outer[mine[1:]] = start[mine[1:]] >= reach[:-1]
    part = np.where(host.is_kind(spans, "communication")[rows], COMMUNICATION, OTHER)[outer]
    return Pieces(lane[outer], start[outer], end[outer], np.full(len(part), -1), part)


@within_rank
def host_pieces(module_frames: Frames = needs(module_frames), outside_calls: Pieces = needs(outside_calls)) -> Pieces:
    """Return the host's time in the innermost frame of each lane, and in calls outside of all frames; the pieces of a
    lane do not overlap.
    """
    found = [(np.empty(0, dtype=np.int64),) * 5]
    framed = {}
    for code, (at, inner) in module_frames.by_lane.items():
        keep = np.flatnonzero((inner[:-1] >= 0) & (at[1:] > at[:-1]))
        start, end, frame = at[keep], at[keep + 1], inner[keep]
        framed[code] = iv.union(start, end)
        found.append((np.full(len(keep), code), start, end, module_frames.module[frame], module_frames.part[frame]))
    calls = outside_calls
    for code in np.unique(calls.lane).tolist():
        mine = calls.lane == code
        for part in np.unique(calls.part[mine]):
            chosen = mine & (calls.part == part)
            left = iv.subtract(iv.union(calls.start[chosen], calls.end[chosen]), framed.get(code, iv.EMPTY))
            lane, module, parts = (np.full(len(left), value) for value in (code, -1, part))
            found.append((lane, left[:, 0], left[:, 1], module, parts))
    return Pieces(*(np.concatenate(column) for column in zip(*found, strict=True)))


@within_rank
def module_host(
    host_pieces: Pieces = needs(host_pieces),
    module_frames: Frames = needs(module_frames),
    timing: Timing = needs(timing),
) -> Sums:
    """Return the time of the traced steps that threads spend in each module itself, and the training thread outside."""
    steps = iv.merge(timing.host_windows)
    took = iv.within(steps, host_pieces.start, host_pieces.end)
    found = sums(module_frames, host_pieces.module, host_pieces.part, took)
    outside = iv.subtract(steps, iv.union(host_pieces.start, host_pieces.end))
    return found + _outside(module_frames, iv.total(outside))


def _outside(module_frames: Frames, ns: int) -> Sums:
    return sums(module_frames, np.array([-1]), np.array([OTHER]), np.array([ns]))


@within_rank
def cpu_exposed(
    host_pieces: Pieces = needs(host_pieces),
    module_frames: Frames = needs(module_frames),
    timing: Timing = needs(timing),
    spans: Frame = needs(schema.SPANS),
    is_on_device: NDArray[np.bool_] = needs(is_on_device),
    module_rows: Frame = needs(module_rows),
    training_lane: str = needs(training_lane),
    cpu_computation: iv.Intervals = needs(cpu_computation),
    bucket_shares: Maybe[NDArray[np.float64]] = maybe(bucket_shares),
) -> Sums:
    """Return the pieces of the training thread's steps, except exchanges without simultaneous computation.

    Where exchanges overlap, the one that began first counts.
    """
    steps = iv.merge(timing.host_windows)
    marks = np.flatnonzero(host.is_kind(spans, "communication") & ~is_on_device)
    start = spans["start_ns"].to_numpy()[marks]
    end = start + spans["dur_ns"].to_numpy()[marks]
    waited = iv.subtract(iv.intersect(iv.union(start, end), steps), cpu_computation)
    categories = spans["lane"].cat.categories.tolist()
    mine = host_pieces.lane == (categories.index(training_lane) if training_lane in categories else -1)
    piece = host_pieces
    own = iv.within(iv.subtract(steps, waited), piece.start[mine], piece.end[mine])
    found = sums(module_frames, piece.module[mine], piece.part[mine], own)
    module, bucket = (module_rows[name].to_numpy()[marks].astype(np.int64) for name in ("module", "bucket"))
    belongs = Belongs(module, np.full(len(marks), COMMUNICATION), bucket, bucket_shares.or_none())
    found += belongs.sums(module_frames, np.ones(len(marks), dtype=bool), iv.within(waited, *apart(start, end)))
    rest = iv.subtract(iv.subtract(steps, iv.union(piece.start[mine], piece.end[mine])), waited)
    return found + _outside(module_frames, iv.total(rest))


def apart(start: NDArray[np.int64], end: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return intervals, in order of start, each without what those before it cover."""
    if not len(start):
        return start, end
    reach = np.maximum.accumulate(np.append(start[:1], end))[:-1]
    begin = np.maximum(start, reach)
    return begin, np.maximum(begin, end)


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
    outside_calls: Pieces = needs(outside_calls),
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
    begun = iv.holds(steps, outside_calls.start) & (outside_calls.part != COMMUNICATION)
    return found + sums(module_frames, outside_calls.module[begun], outside_calls.part[begun])


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
    module = np.where(replayed, len(module_frames.paths), module)
    return Belongs(module, part, bucket, bucket_shares.or_none())


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
    module = module_frames.places(counted["path"].astype(str))
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
    graphs = np.flatnonzero(host.is_named(spans, COMPILED_GRAPH) & ~is_on_device)
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
