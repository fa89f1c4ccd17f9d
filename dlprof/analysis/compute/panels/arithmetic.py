"""What one step computes, and which operators take its time."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pandas as pd

from dlprof.analysis.compute.peaks import device_peaks
from dlprof.analysis.compute.top_kernels import of_ranks
from dlprof.analysis.engine import Job, Maybe
from dlprof.analysis.panel import Picture, table
from dlprof.errors import NotMeasured
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
    operator_flops: Maybe[pd.DataFrame],
    heaviest_operators: Maybe[pd.DataFrame],
    operators: Maybe[pd.DataFrame],
    job: Job,
) -> list[Panel]:
    """Draw the floating-point operations of one step, a bar an operator, and a table of the heaviest operators."""
    panels = []
    with suppress(NotMeasured):
        panels.append(_flops(operator_flops.get()))
    with suppress(NotMeasured):
        panels.append(_heaviest(heaviest_operators.get(), operators.get()["rank"].unique().tolist(), job))
    return panels


def _flops(operator_flops: pd.DataFrame) -> Panel:
    named = operator_flops["operator"].str.removeprefix("aten::") + " · " + operator_flops["dtype"]
    sums = operator_flops.groupby(named, sort=False)["flops"].sum().sort_values(ascending=False, kind="stable")
    rows = tuple((sums / operator_flops["rank"].nunique()).items())
    note = "Counted in one step that is not among those timed; two floating-point operations a multiplication."
    return Panel("bars", "What one step computes, by operator", rows, unit="FLOP", note=note)


def _heaviest(heaviest_operators: pd.DataFrame, ranks: list[int], job: Job) -> Panel:
    """Return the roofline as a table: what each of the heaviest operators computes, moves and is bound by."""
    frame = heaviest_operators
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
    return table(f"The heaviest operators of a step, {who}", frame.replace("", np.nan), _COLUMNS | most, note=note)


PICTURE = Picture(draw)
