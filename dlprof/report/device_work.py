"""Where the device's own time goes, in words and as a table, and how far that is from what the device can do."""

from __future__ import annotations

from dlprof.report import formatting
from dlprof.report.figures import shapes
from dlprof.report.figures.drawing import Figure
from dlprof.result import Panel, Result

# A device limits the step from this share of it on; with more than the step, kernels run beside each other, and their
# floors do not add up. Kinds with less of the time above the floor are not named, nor a floor of fused chains that is
# hardly lower; a larger speed-up is no bound.
_LIMITS, _BESIDE, _NAMED, _FUSED, _VAST = 0.9, 1.05, 0.15, 0.98, 10.0

_COLUMNS = ("kind", "kernels", "time a step_ns", "share", "TFLOP/s", "a second_bytes", "needs at least_ns", "above_ns")

_NOTE = (
    "Of a mean traced step. Needs at least: of each operator FLOPs ÷ peak or bytes ÷ bandwidth of the memory, the"
    " longer one, by the data sheet; what is not known counts as it is. This is a bound: on an H200, large copies"
    " reached 88 % of that bandwidth, and a product of 8192³ in bfloat16 68 % of that peak."
)


def sentences(result: Result) -> tuple[str, str]:
    """Return the floor of a step that the device limits, with the kinds that are farthest above theirs, and how much
    faster it could be by faster kernels alone; "" where it does not limit it, or no floor is known.
    """
    work, window = result.device_work, result.window
    if not work or work.floor_ns is None or not window or window.unit != "step" or not window.step_ns:
        return "", ""
    if not _LIMITS <= work.ns / window.step_ns <= _BESIDE:
        return "", ""
    duration, fused, above_ns = formatting.duration, work.fused_floor_ns, work.ns - work.floor_ns
    less = ""
    if fused and fused < _FUSED * work.floor_ns:
        less = f", or {duration(fused)} with chains of elementwise operators fused"
    said = (
        f"As written, the work of this step needs at least {duration(work.floor_ns)} on this GPU{less} (its FLOPs and"
        f" bytes at the data sheet's rates); its kernels take {duration(work.ns)}."
    )
    far = sorted(
        (row for row in work.rows if work.above_ns(row) > _NAMED * above_ns), key=lambda row: -work.above_ns(row)
    )
    named = [f"{'at least ' * bool(row.shared_ns)}{duration(work.above_ns(row))} in {row.kind}" for row in far[:2]]
    if named and above_ns > (1 - _LIMITS) * work.ns:
        said += f" Of the {duration(above_ns)} above that bound, they spend {' and '.join(named)}."
    faster = window.step_ns / max(window.step_ns - above_ns, work.floor_ns)
    most = f"Faster kernels alone could make it at most {formatting.times(faster)} faster."
    return said, most if faster <= _VAST else ""


def table(result: Result) -> Figure | None:
    """Return the table of the kinds; None where no device was traced."""
    work = result.device_work
    if work is None:
        return None
    rows = tuple(
        (
            *(row.kind, row.kernels, row.ns, row.ns / work.ns),
            *(None if n is None else n / row.ns * per for n, per in ((row.flops, 1e-3), (row.bytes, 1e9))),
            None if row.shared_ns else row.floor_ns,
            work.above_ns(row) if row.floor_ns is not None and work.above_ns(row) > 0 else None,
        )
        for row in work.rows
    )
    together = (
        f" Kinds without that figure share {formatting.duration(work.shared_floor_ns)}, and are above it or more."
    )
    note = _NOTE + together if work.shared_floor_ns else _NOTE
    note = f"Of a mean traced step. What it needs at least is not known: {work.why}." if work.why else note
    return shapes.panel(Panel("table", "Where the device's own time goes", rows, _COLUMNS, note=note))
