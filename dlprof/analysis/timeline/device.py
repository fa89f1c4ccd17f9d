"""What the device does, and when: computation, communication and copies as sets of time that partition its span."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
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


@dataclass(frozen=True)
class DeviceSets:
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
