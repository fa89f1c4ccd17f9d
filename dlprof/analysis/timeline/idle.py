"""Why a device has nothing to do: the host was late, a kernel took its time to start, or queued work waited.

The work that ends a gap shows why. Launched after the device had run dry: until then the host was late. Launched
before, and the gap is short: that is what starting a kernel takes. Else the work was queued and waited for something:
an event of another stream, a function on the host, memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Frame, needs, within_rank
from dlprof.analysis.timeline.device import DeviceSets, device_sets, device_work
from dlprof.analysis.timeline.launches import UNKNOWN, Launches, launches

# From one queued kernel to the next a device takes a few µs, tens where a trace's clock is coarse. What lasts longer is
# a wait. From a launch on an idle device to the start of its kernel it takes somewhat more.
LATENCY_NS = 20_000
START_NS = 50_000


@dataclass(frozen=True)
class Idle:
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
