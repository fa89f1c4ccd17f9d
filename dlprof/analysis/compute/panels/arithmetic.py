"""Which operators take a step's time, and what each computes."""

from __future__ import annotations

import numpy as np

from dlprof.analysis.compute.operators import heaviest_operators, of_ranks, operators
from dlprof.analysis.compute.peaks import device_peaks
from dlprof.analysis.engine import JOB, Frame, Job, needs
from dlprof.analysis.panel import Picture, table
from dlprof.result import Panel
from dlprof.units import quantity, short, size

_COLUMNS = {
    "what": "operator, shapes",
    "dtype": "type",
    "calls": "calls",
    "ns": "time a step_ns",
    "gflop": "GFLOP",
    "tflop_s": "TFLOP/s",
    "bytes": "moves_bytes",
    "bound": "bound by",
}


def draw(
    heaviest_operators: Frame = needs(heaviest_operators), operators: Frame = needs(operators), job: Job = needs(JOB)
) -> list[Panel]:
    """Return the roofline as a table: what each of the heaviest operators computes, moves and is bound by."""
    frame, ranks = heaviest_operators, operators["rank"].unique().tolist()
    names = [short(name.removeprefix("aten::"), 80) for name in frame["operator"]]
    several = [f"of {n} shapes" if n > 1 else "" for n in frame["shapes"]]
    what = [" ".join(filter(None, (n, s or o))) for n, s, o in zip(names, frame["shape"], several, strict=True)]
    frame = frame.assign(what=what, gflop=frame["flops"] / 1e9, tflop_s=frame["rate"] / 1e12)
    device, peaks, bandwidth = device_peaks(job.facts[ranks[0]], job.trace_facts[ranks[0]])
    tops = ", ".join(f"{quantity(peak, 'FLOP')}/s in {precision}" for precision, peak in peaks.items())
    known = f"{device} computes {tops} and moves {size(bandwidth)}/s at most (its data sheet)." if peaks else ""
    note = (
        "Time in a traced step: of the kernels that it launched, on a CPU its own. Bound by what takes longer at the"
        f" device's peaks, or by launching where a kernel takes less than 10 µs. {known}"
    ).strip()
    who, most = of_ranks(ranks)
    return [table(f"The heaviest operators of a step, {who}", frame.replace("", np.nan), _COLUMNS | most, note=note)]


PICTURE = Picture(draw)
