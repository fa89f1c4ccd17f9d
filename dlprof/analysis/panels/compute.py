"""Panels of what the device computes, copies and holds: operators, kernels, the loss scale, memory."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pandas as pd

from dlprof.analysis.compute.kernels import UNITS
from dlprof.analysis.compute.operators import (
    heaviest_kernels,
    heaviest_operators,
    of_ranks,
    operators,
    work,
)
from dlprof.analysis.compute.peaks import device_peaks
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, MeasureFailed, maybe, needs
from dlprof.analysis.host.parts import ON_DEVICE
from dlprof.analysis.memory.copies import copies
from dlprof.analysis.memory.memory import memory_series
from dlprof.analysis.memory.snapshot import OTHERS, memory_curve, memory_holders, memory_peak, memory_state
from dlprof.analysis.panel import MOST_RANKS, Picture, points, table
from dlprof.analysis.step.scalers import scale_changes, scalers
from dlprof.analysis.step.whole_job import step_times
from dlprof.errors import NotMeasured
from dlprof.result import Panel
from dlprof.units import quantity, short, size

_ARITHMETIC_COLUMNS = {
    "what": "operator, shapes",
    "dtype": "type",
    "calls": "calls",
    "ns": "time a step_ns",
    "gflop": "GFLOP",
    "tflop_s": "TFLOP/s",
    "bytes": "moves_bytes",
    "bound": "bound by",
}


def draw_arithmetic(
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
    return [
        table(
            f"The heaviest operators of a step, {who}", frame.replace("", np.nan), _ARITHMETIC_COLUMNS | most, note=note
        )
    ]


ARITHMETIC_PICTURE = Picture(draw_arithmetic)

_KERNELS_COLUMNS = {
    "name": "kernel",
    "unit": "runs on",
    "calls": "calls",
    "ns": "time a step_ns",
    "call_ns": "a call_ns",
    "share": "share",
}

_COPY_COLUMNS = {
    "copy": "way",
    "memory": "host memory",
    "count": "copies",
    "bytes": "size_bytes",
    "copy_ns": "time_ns",
    "exposed_ns": "exposed_ns",
    "rate": "rate per second_bytes",
}


def draw_kernels(
    heaviest_kernels: Maybe[Frame] = maybe(heaviest_kernels),
    work: Maybe[Frame] = maybe(work),
    copies: Maybe[Frame] = maybe(copies),
) -> list[Panel]:
    """List the kernels, as the mean of the ranks, and the copies of the rank with the least hidden ones."""
    panels = []
    with suppress(NotMeasured, MeasureFailed):
        ranks = work.get().loc[work.get()["kind"] == "kernel", "rank"].unique().tolist()
        panels.append(_kernels(heaviest_kernels.get(), ranks))
    with suppress(NotMeasured, MeasureFailed):
        exposed = copies.get().groupby("rank")["exposed_ns"].sum()
        panels += [copy_table(copies.get(), int(str(exposed.idxmax())))] if len(exposed) else []
    return panels


def _kernels(heaviest_kernels: pd.DataFrame, ranks: list[int]) -> Panel:
    note = (
        "Of a traced step; shares are of the time in all kernels. What a kernel multiplies on is known from its name"
        " alone; –: it multiplies nothing."
    )
    known = int(heaviest_kernels["known"].iloc[0])
    if known > len(heaviest_kernels):
        note += f" The longest {len(heaviest_kernels)} of {known:,} kernels."
    who, most = of_ranks(ranks)
    frame = heaviest_kernels.assign(unit=heaviest_kernels["kind"].map(UNITS))
    return table(f"Kernels, {who}", frame, _KERNELS_COLUMNS | most, note=note)


def copy_table(copies: pd.DataFrame, rank: int) -> Panel:
    """List the copies of one rank, the most exposed first."""
    mine = copies[copies["rank"] == rank].sort_values("exposed_ns", ascending=False).replace("", np.nan)
    moved, took = mine["bytes"], mine["copy_ns"]
    mine = mine.assign(bytes=moved.where(moved >= 0), rate=(moved / took * 1e9).where((moved > 0) & (took > 0)))
    return table(f"Copies of a mean step on rank {rank}", mine, _COPY_COLUMNS)


KERNELS_PICTURE = Picture(draw_kernels)


def draw_loss_scale(scale_changes: Frame = needs(scale_changes), scalers: Maybe[Frame] = maybe(scalers)) -> list[Panel]:
    """Draw the scale of each scaler over the steps; all ranks have the same, so one is drawn."""
    rank = scale_changes["rank"].min()
    mine = scale_changes[scale_changes["rank"] == rank]
    lines = np.log2(mine.groupby(["step", "scaler"])["scale"].last().unstack().ffill())
    known = scalers.get()
    known = known[known["rank"] == rank]
    note = " ".join(
        f"Scaler {row['scaler']} skipped {row['skipped']:,} steps, {row['at_first']:,} of them before its scale first"
        f" fitted; its scale is {row['scale']:,.6g}."
        if row["known"]
        else f"For scaler {row['scaler']} only the beginning is known: {ON_DEVICE}."
        for row in known.to_dict("records")
    )
    names = tuple(f"scaler {number}" if len(lines.columns) > 1 else "scale" for number in lines.columns)
    note = f"Logarithm to base 2, on rank {rank}. {note}"
    return [Panel("lines", "Loss scale", points(pd.DataFrame(lines)), ("step", *names), note=note)]


LOSS_SCALE_PICTURE = Picture(draw_loss_scale)


def draw_memory(
    memory_series: Frame = needs(memory_series), step_times: pd.Series[float] = needs(step_times)
) -> list[Panel]:
    """Draw the memory allocated and reserved over the run, in bytes."""
    lines: dict[str, pd.Series[float]] = {}
    for kind in ("reserved", "allocated"):
        by_rank = memory_series.pivot_table(index="step", columns="rank", values=f"{kind}_bytes")
        if len(by_rank.columns) > MOST_RANKS:
            lines[f"most {kind} of a rank"] = by_rank.max(axis=1)
        else:
            lines |= {f"rank {rank} {kind}": by_rank[rank] for rank in by_rank}
    table = pd.DataFrame(lines)
    times = np.interp(table.index.to_numpy(), step_times.index.to_numpy(), step_times.to_numpy())
    note = "Allocated: held by tensors at the end of a step. Reserved: taken from the device by PyTorch's allocator."
    rows = points(table.set_axis(pd.Index(np.atleast_1d(times)), axis=0))
    return [Panel("lines", "GPU memory of PyTorch", rows, ("time_ns", *lines), unit="bytes", note=note)]


MEMORY_PICTURE = Picture(draw_memory)

MOST_DEVICES = 4  # drawn, those with the highest peaks

MOST_LINES = 25

LINES = {"site": "line", "via": "calls", "bytes": "allocated_bytes", "share": "share", "blocks": "blocks"}


def draw_memory_snapshot(
    memory_peak: Frame = needs(memory_peak),
    memory_holders: Frame = needs(memory_holders),
    memory_curve: Maybe[Frame] = maybe(memory_curve),
    memory_state: Frame = needs(memory_state),
) -> list[Panel]:
    """Draw the allocated bytes of each device by line, stacked, and list the lines at the peak."""
    panels = []
    curve = memory_curve.or_none()
    peaks = memory_peak.sort_values("peak_bytes", ascending=False, kind="stable").head(MOST_DEVICES)
    for row in peaks.to_dict("records"):
        of = f"rank {row['rank']}, GPU {row['device']}"
        if curve is not None and len(drawn := _of(curve, row)):
            panels.append(_areas(drawn, of, row, _of(memory_state, row)))
        when = "at the peak" if row["events"] else "when the snapshot was taken"
        held = _of(memory_holders, row)
        note = f"{size(row['peak_bytes'])} allocated, {size(row['reserved_bytes'])} reserved."
        held = held[held["moment"] == "peak"]
        panels.append(table(f"Allocated GPU memory {when}, {of}", held, LINES, most=MOST_LINES, note=note))
    return panels


def _of(frame: pd.DataFrame, row: dict[object, object]) -> pd.DataFrame:
    """Return the rows of a rank's device."""
    return frame[(frame["rank"] == row["rank"]) & (frame["device"] == row["device"])]


def _areas(curve: pd.DataFrame, of: str, row: dict[object, object], state: pd.DataFrame) -> Panel:
    wide = curve.pivot_table(index=["moment", "at_ns"], columns="site", values="bytes", sort=False).fillna(0.0)
    lines = [c for c in curve["site"].drop_duplicates() if c != OTHERS] + [c for c in wide.columns if c == OTHERS]
    moments, at = (wide.index.get_level_values(level).to_numpy() for level in ("moment", "at_ns"))
    timed = bool((at >= 0).all())
    failed = state.loc[state["moment"] == "oom", "at_ns"]
    marks = tuple((float(t - at.min()), "out of memory", "other") for t in failed) if timed else ()
    peak = float(row["at_ns"] - at.min()) if timed else None
    marks += ((peak, "peak", "other"),) if peak is not None else ()
    rows = points(wide[lines].set_axis(pd.Index(at - at.min() if timed else moments), axis=0))
    first = "since the first event_ns" if timed else "events of the allocator"
    note = "By the line of the script that allocated it. Memory allocated before the recording has no line."
    return Panel("areas", f"GPU memory by line, {of}", rows, (first, *lines), unit="bytes", note=note, marks=marks)


MEMORY_SNAPSHOT_PICTURE = Picture(draw_memory_snapshot)
