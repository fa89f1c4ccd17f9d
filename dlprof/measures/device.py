"""What the device does, and when: computation, communication and copies as sets of time that partition its span."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import intervals as iv
from dlprof.engine import RankData, per_rank
from dlprof.errors import NotMeasured
from dlprof.measures import host

WORK = ("kernel", "communication", "copy", "set")


@dataclass(frozen=True)
class DeviceSets:
    """The time in which a device computes, communicates, copies (or sets memory), and does any of these."""

    computation: iv.Intervals
    communication: iv.Intervals
    copy: iv.Intervals
    busy: iv.Intervals

    @property
    def exposed_communication(self) -> iv.Intervals:
        """Communication with no computation beside it."""
        return iv.subtract(self.communication, self.computation)

    @property
    def exposed_copy(self) -> iv.Intervals:
        """Copies with neither computation nor communication beside them."""
        return iv.subtract(iv.subtract(self.copy, self.computation), self.communication)


def has_device(rank: RankData) -> bool:
    """Tell whether the trace holds work of a device."""
    return rank.has("spans") and len(device_work(rank)) > 0


def device_work(rank: RankData) -> pd.DataFrame:
    """Give the spans of device work, in order of their start."""
    return rank.once(_device_work)


def _device_work(rank: RankData) -> pd.DataFrame:
    spans = rank.table("spans")
    return spans[host.is_on_device(rank) & host.is_kind(spans, *WORK)]


def device_sets(rank: RankData) -> DeviceSets:
    """Give the device's time; raises NotMeasured where the trace holds none."""
    return rank.once(_device_sets)


def _device_sets(rank: RankData) -> DeviceSets:
    work = device_work(rank)
    if not len(work):
        raise NotMeasured("the trace holds no work of a device")
    kinds = {k: host.cover(work, host.is_kind(work, *k)) for k in (("kernel",), ("communication",), ("copy", "set"))}
    computation, communication, copy = kinds.values()
    busy = iv.merge(computation, communication, copy)
    if not len(busy):
        raise NotMeasured("no work of the device in the trace takes any time")
    return DeviceSets(computation, communication, copy, busy)


@per_rank
def device_time(rank: RankData) -> pd.DataFrame:
    """Partition the device's span over the whole trace, from first event's start to last one's end (ns, one row).

    computation = |U(comp)|, exposed communication = |U(comm) − U(comp)|, exposed copy = |U(copy ∪ set) − U(comp) −
    U(comm)|, idle = span − |U(all)|: the four add up to the span. Holistic Trace Analysis and TraceLens define them so.
    """
    sets = device_sets(rank)
    span = int(sets.busy[-1, 1] - sets.busy[0, 0])
    return pd.DataFrame(
        {
            "span_ns": [span],
            "computation_ns": [iv.total(sets.computation)],
            "communication_ns": [iv.total(sets.communication)],
            "exposed_communication_ns": [iv.total(sets.exposed_communication)],
            "copy_ns": [iv.total(sets.copy)],
            "exposed_copy_ns": [iv.total(sets.exposed_copy)],
            "idle_ns": [span - iv.total(sets.busy)],
        }
    )


def late_host(rank: RankData) -> iv.Intervals:
    """Give the device's idle time for which the host is to blame: it had not yet launched what came next.

    Idle time before work that had been launched before the idling began is the device's own: a dependency on another
    stream, or the few µs that starting a kernel takes. Where a trace does not link launches, all idling is the host's.
    """
    return rank.once(_late_host)


def _late_host(rank: RankData) -> iv.Intervals:
    spans = rank.table("spans")
    busy = device_sets(rank).busy
    start = spans["start_ns"].to_numpy()
    begin, end = int(start[0]), int((start + spans["dur_ns"].to_numpy()).max())
    idle = iv.subtract(np.array([[begin, end]], dtype=np.int64), busy)
    work = device_work(rank)
    starts = work["start_ns"].to_numpy()
    following = np.searchsorted(starts, idle[:, 1], side="left")
    launch = np.where(following < len(work), work["launch"].to_numpy()[np.minimum(following, len(work) - 1)], -1)
    launched = launch_start(rank, launch)
    return idle[launched >= idle[:, 0]]


def launch_start(rank: RankData, launch: np.ndarray) -> np.ndarray:
    """Give when each launch was called, ns; the end of time where that is not known."""
    ids, called = rank.once(_calls)
    never = np.full(len(launch), np.iinfo(np.int64).max)
    if not len(ids):
        return never
    at = np.searchsorted(ids, launch, side="left")
    inside = at < len(ids)
    known = inside & (ids[np.minimum(at, len(ids) - 1)] == launch)
    return np.where(known, called[np.minimum(at, len(ids) - 1)], never)


def _calls(rank: RankData) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Give the calls that launched something, in order of their launches: launch, start_ns."""
    spans = rank.table("spans")
    ids = spans["launch"].to_numpy()
    calls = np.flatnonzero(host.is_kind(spans, "runtime") & (ids >= 0))
    order = calls[np.argsort(ids[calls], kind="stable")]  # of one launch's calls the earlier stays first
    return ids[order], spans["start_ns"].to_numpy()[order]
