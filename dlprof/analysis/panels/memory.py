"""Panels of memory, as data that the page draws."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof.analysis.engine import Frame, Maybe, maybe, needs
from dlprof.analysis.memory.memory import memory_series
from dlprof.analysis.memory.snapshot import OTHERS, memory_curve, memory_holders, memory_peak, memory_state
from dlprof.analysis.panel import MOST_RANKS, Picture, points, table
from dlprof.analysis.step.run_clock import step_times
from dlprof.result import Panel
from dlprof.units import size


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
