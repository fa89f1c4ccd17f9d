"""Links the work of a device to the calls of the host that launched it.

A launch is the runtime's or driver's call with the same correlation id, on whatever thread of the process. The nodes of
a graph share the call that launched the graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis.engine import Frame, needs, within_rank
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import device_work

# The time of a launch that the trace does not hold.
UNKNOWN = np.iinfo(np.int64).max

NOT_LINKED = (
    "the trace does not link launches to kernels (ProfilerActivity.CUDA does so; with nsys, --trace=cuda; with"
    " rocprofv3, --hip-trace)"
)


@dataclass(frozen=True)
class Launches:
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


@dataclass(frozen=True)
class Queue:
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
