"""What the device does, and when: computation, communication and copies as sets of time that partition its span; which
call of the host launched each piece of work; and why the device idles.

A launch is the runtime's or driver's call with the same correlation id, on whatever thread of the process. The nodes of
a graph share the call that launched the graph.

The work that ends a gap shows why the device had nothing to do. Launched after the device had run dry: until then the
host was late. Launched before, and the gap is short: that is what starting a kernel takes. Else the work was queued and
waited for something: an event of another stream, a function on the host, memory.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from msgspec import Struct
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Frame, Maybe, maybe, needs, per_rank, within_rank
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.host import is_on_device
from dlprof.errors import NotMeasured

# What a kernel takes that computes next to nothing, on V100s, A100s and an RTX 2080 Ti: a tenth of the kernels of their
# training jobs took 1.0 to 3.0 µs.
LEAST_KERNEL_NS = 2_000

WORK = ("kernel", "communication", "copy", "set")

NO_DEVICE_WORK = "the trace holds no work of a device (record ProfilerActivity.CUDA; with nsys, --trace=cuda)"

NOT_IN_STEPS = "the device's work in the trace was launched in none of its steady steps"


class DeviceSets(Struct, frozen=True):
    """The time in which a device computes, communicates, copies (or sets memory), and does any of these."""

    computation: iv.Intervals
    communication: iv.Intervals
    copy: iv.Intervals
    busy: iv.Intervals

    @property
    def exposed_communication(self) -> iv.Intervals:
        """Communication that no computation hides."""
        return iv.subtract(self.communication, self.computation)

    @property
    def exposed_copy(self) -> iv.Intervals:
        """Copies that neither computation nor communication hides."""
        return iv.subtract(iv.subtract(self.copy, self.computation), self.communication)


@within_rank
def device_work(
    spans: Frame = needs(schema.SPANS), is_on_device: NDArray[np.bool_] = needs(is_on_device)
) -> pd.DataFrame:
    """Return the spans of device work, in order of their start."""
    return spans[is_on_device & host.is_kind(spans, *WORK)]


@within_rank
def has_device(spans: Maybe[Frame] = maybe(schema.SPANS), device_work: Maybe[Frame] = maybe(device_work)) -> bool:
    """Return whether the trace holds work of a device."""
    return bool(spans) and len(device_work.get()) > 0


@within_rank
def exchanges_on_host(
    spans: Maybe[Frame] = maybe(schema.SPANS),
    is_on_device: Maybe[NDArray[np.bool_]] = maybe(is_on_device),
    has_device: bool = needs(has_device),
) -> bool:
    """Return whether ranks exchange on the host: on a CPU, and with gloo or MPI also between devices.

    These copy a device's tensors to the host and send them from there: no kernel of the device communicates.
    """
    if not has_device:
        return True
    exchanges = host.is_kind(spans.get(), "communication")
    return not (exchanges & is_on_device.get()).any() and bool(host.is_named(spans.get(), "gloo:", "mpi:").any())


@within_rank
def device_sets(device_work: Frame = needs(device_work)) -> DeviceSets:
    """Return the device's time; raises NotMeasured where the trace holds none."""
    if not len(device_work):
        raise NotMeasured(NO_DEVICE_WORK)
    computation, communication, copy = (
        host.cover(device_work, host.is_kind(device_work, *kinds))
        for kinds in (("kernel",), ("communication",), ("copy", "set"))
    )
    busy = iv.merge(computation, communication, copy)
    if not len(busy):
        raise NotMeasured("no work of the device in the trace takes any time")
    return DeviceSets(computation, communication, copy, busy)


@per_rank
def device_time(device_sets: DeviceSets = needs(device_sets)) -> pd.DataFrame:
    """Partition the device's span over the whole trace, from first event's start to last one's end (ns, one row).

    computation = |U(comp)|, exposed communication = |U(comm) − U(comp)|, exposed copy = |U(copy ∪ set) − U(comp) −
    U(comm)|, idle = span − |U(all)|: the four add up to the span. Holistic Trace Analysis and TraceLens define them so.
    """
    span = int(device_sets.busy[-1, 1] - device_sets.busy[0, 0])
    parts = ("computation", "communication", "exposed_communication", "copy", "exposed_copy")
    totals = {f"{part}_ns": iv.total(getattr(device_sets, part)) for part in parts}
    return pd.DataFrame([{"span_ns": span, **totals, "idle_ns": span - iv.total(device_sets.busy)}])


# The time of a launch that the trace does not hold.
UNKNOWN = np.iinfo(np.int64).max

NOT_LINKED = (
    "the trace does not link launches to kernels (ProfilerActivity.CUDA does so; with nsys, --trace=cuda; with"
    " rocprofv3, --hip-trace)"
)


class Launches(Struct, frozen=True):
    """The launch of each row of `device.device_work`, in its order, ns; UNKNOWN where the trace does not link it."""

    called: NDArray[np.int64]  # start of the call
    returned: NDArray[np.int64]  # end of the call

    @property
    def known(self) -> NDArray[np.bool_]:
        """Which rows have their launch in the trace."""
        known: NDArray[np.bool_] = self.called < UNKNOWN
        return known


@within_rank
def launches(spans: Frame = needs(schema.SPANS), device_work: Frame = needs(device_work)) -> Launches:
    """Return the launches of a rank's device work; of several calls with one id the first counts."""
    ids, launch = spans["launch"].to_numpy(), device_work["launch"].to_numpy()
    calls = np.flatnonzero(host.is_kind(spans, "runtime") & (ids >= 0))
    if not len(calls):
        return Launches(*[np.full(len(launch), UNKNOWN)] * 2)
    calls = calls[np.argsort(ids[calls], kind="stable")]
    at = calls[np.minimum(np.searchsorted(ids[calls], launch), len(calls) - 1)]
    known, called = ids[at] == launch, spans["start_ns"].to_numpy()[at]
    returned = called + spans["dur_ns"].to_numpy()[at]
    return Launches(np.where(known, called, UNKNOWN), np.where(known, returned, UNKNOWN))


class Queue(Struct, frozen=True):
    """How much work was launched and had not begun, over time: the length from each instant on."""

    at: NDArray[np.int64]  # ns, ascending
    length: NDArray[np.int64]

    def mean(self, start: int, end: int) -> float:
        """Return the mean length between two instants; 0 where the queue is not known there."""
        if end <= start or not len(self.at):
            return 0.0
        edges = np.clip(np.append(self.at, max(end, int(self.at[-1]))), start, end)
        return float((np.diff(edges) * self.length).sum() / (end - start))


@within_rank
def launch_queue(launches: Launches = needs(launches), device_work: Frame = needs(device_work)) -> Queue:
    """Return the length of a rank's launch queue: +1 at each launch, −1 when the work begins.

    Work whose launch is unknown is not counted. A graph is one launch, which begins with its first node.
    """
    known = launches.known
    called, of = np.unique(launches.called[known], return_inverse=True)
    begun = np.full(len(called), UNKNOWN)
    np.minimum.at(begun, of, device_work["start_ns"].to_numpy()[known])
    at = np.concatenate((called, np.maximum(begun, called)))
    order = np.argsort(at, kind="stable")
    return Queue(at[order], np.cumsum(np.repeat((1, -1), len(called))[order]))


# From one queued kernel to the next a device takes a few µs, tens where a trace's clock is coarse. What lasts longer is
# a wait. From a launch on an idle device to the start of its kernel it takes somewhat more.
LATENCY_NS = 20_000
START_NS = 50_000


class Idle(Struct, frozen=True):
    """The idle time of a rank's device from the start of its trace to the end, by cause; disjoint.

    `late`: the host had not launched what came next. `latency`: launched, and about to start. `queued`: launched, and
    waiting for something on the device. `assumed`: what of `late` comes before work whose launch is not in the trace;
    that it is the host's is assumed.
    """

    late: iv.Intervals
    latency: iv.Intervals
    queued: iv.Intervals
    assumed: iv.Intervals


@within_rank
def idle(
    device_sets: DeviceSets = needs(device_sets),
    spans: Frame = needs(schema.SPANS),
    device_work: Frame = needs(device_work),
    launches: Launches = needs(launches),
) -> Idle:
    """Return why the device idles; raise NotMeasured where the trace holds no work of a device."""
    busy = device_sets.busy
    start = spans["start_ns"].to_numpy()
    begin, end = int(start[0]), int((start + spans["dur_ns"].to_numpy()).max())
    gaps = iv.subtract(np.array([[begin, end]], dtype=np.int64), busy)
    row = first_after(device_work, gaps)
    returned = np.where(row >= 0, launches.returned[np.maximum(row, 0)], UNKNOWN)
    # The later nodes of a graph were launched with the first one, whenever that call returns.
    later = (row >= 0) & ~first_of_launch(device_work)[np.maximum(row, 0)] & (returned < UNKNOWN)
    until = np.where(later, gaps[:, 0], np.clip(returned, gaps[:, 0], gaps[:, 1]))
    late = np.column_stack((gaps[:, 0], until))[until > gaps[:, 0]]
    waiting = iv.subtract(gaps, late)
    launched_late = iv.holds(late, waiting[:, 0] - 1)
    short = waiting[:, 1] - waiting[:, 0] <= np.where(launched_late, START_NS, LATENCY_NS)
    return Idle(late, waiting[short], waiting[~short], gaps[returned == UNKNOWN])


def first_of_launch(device_work: pd.DataFrame) -> NDArray[np.bool_]:
    """Return which rows of the device's work are the first of what their launch launched."""
    launch = device_work["launch"].to_numpy()
    first = np.zeros(len(launch), dtype=bool)
    first[np.unique(launch, return_index=True)[1]] = True  # rows are in order of their start
    return first


def first_after(device_work: pd.DataFrame, gaps: iv.Intervals) -> NDArray[np.int64]:
    """Return the row of `device.device_work` that ended each gap; −1: none did."""
    starts = device_work["start_ns"].to_numpy()
    row = np.searchsorted(starts, gaps[:, 1], side="left")
    return np.where(row < len(starts), row, -1)
