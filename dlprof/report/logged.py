"""The verdict on what has no steps: a profile of another tool alone, or a log of GPUs.

Where the device's own time goes, in words and as a table, and how far that is from what the device can do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dlprof.plain import plain
from dlprof.report import formatting
from dlprof.report.figures import shapes
from dlprof.report.figures.drawing import Figure
from dlprof.report.formatting import counted, duration, percent, quantity
from dlprof.result import Panel, Result
from dlprof.result.figures import GpuLog, Profile

# Memory fuller than FULL is reported, unless a GPU is idler than LOW.
FULL, LOW = 0.92, 0.8

_WHY = {
    "heat": "it is too hot",
    "power_brake": "its power supply brakes it",
    "hardware": "its hardware slows it down",
    "set": "its clock was set lower",
    "locked": "it stays far below its maximum",
    "limit": "its power limit was lowered",
}

_STEPS = "Where a step's time goes is not known without steps: record with dlprof wrap, or put a trace beside it."


def of_logs(result: Result) -> tuple[str, str, str] | None:
    """Return the sentence on such a run, one on what it cannot show, and the share in the first; None without logs."""
    said = [sentence for sentence in (_of_profiles(result.profiles), _of_gpus(result.gpu_logs)) if sentence]
    if not said:
        return None
    return " ".join(text for text, _ in said), _STEPS, said[0][1]


def described(result: Result) -> str:
    """Return what was read of a run without steps: "a profile of py-spy, 1,820 samples; 2 GPUs logged over 6.9 min"."""
    parts = [f"{plain(p.name, 60)}, of {plain(p.tool, 40)}: {quantity(p.total, p.unit)}" for p in result.profiles]
    if result.gpu_logs:
        longest = max(log.seconds for log in result.gpu_logs)
        over = f" over {duration(longest * 1e9)}" if longest > 0 else ""
        parts.append(f"{counted(len(result.gpu_logs), 'GPU')} logged{over}")
    return "; ".join(parts)


def _of_profiles(profiles: Sequence[Profile]) -> tuple[str, str] | None:
    """Say where most of the time was seen."""
    found = [p for p in profiles if p.function and 0 < p.share <= 1]
    if not found:
        return None
    top = max(found, key=lambda p: (p.own, p.share))
    file = plain(top.file.replace("\\", "/").rpartition("/")[2], 80)
    where = plain(top.function, 120)
    if not top.file.startswith("<"):
        where += f" ({file}:{top.line})" if top.line else f" ({file})"
    share, whole = percent(top.share), quantity(top.total, top.unit)
    if top.tool == "line_profiler":
        return f"{share} of the {whole} in {plain(top.function, 120)} is in line {top.line} of {file}.", share
    of = f"the {whole} that {plain(top.tool, 40)} {'counted' if top.counted else 'saw'}"
    about = "About " if top.counted else ""
    libraries = ", with what it calls of libraries" if top.own else ""
    return f"{about}{share} of {of} {'are' if top.unit == 'samples' else 'is'} in {where}{libraries}.", share


def _of_gpus(logs: Sequence[GpuLog]) -> tuple[str, str] | None:
    """Say what is worst: a clock that is held down, memory that is nearly full, or how idle the idlest GPU is."""
    if not logs:
        return None
    when = "" if all(log.at == "run" for log in logs) else ", over the whole log"
    slow = max(logs, key=lambda log: log.clock_lost)
    if slow.held_by and slow.clock_lost >= 0.02 and slow.sm_clock_mhz:
        share = percent(slow.clock_lost)
        clock = quantity(slow.sm_clock_mhz, "MHz")
        why = _WHY.get(slow.held_by, plain(slow.held_by, 40))
        return f"{_gpu(slow)} ran at {clock}, {share} below what it could: {why}.", share
    filled = {log.gpu: _filled(log) for log in logs}
    full = max(logs, key=lambda log: filled[log.gpu])
    busy = [log for log in logs if log.busy_share is not None]
    idlest = min(busy, key=lambda log: log.busy_share or 0.0, default=None)
    if filled[full.gpu] > FULL and (idlest is None or (idlest.busy_share or 0.0) >= LOW):
        share = percent(filled[full.gpu])
        return f"{share} of the memory of {_gpu(full)} was taken: a longer batch may end the job.", share
    if idlest is None:
        return _of_power(logs)
    share = percent(idlest.busy_share or 0.0)
    draws = f" and draws {quantity(idlest.power_w, 'W')}" if idlest.power_w is not None else ""
    limit = f" of {quantity(idlest.power_limit_w, 'W')}" if draws and idlest.power_limit_w else ""
    least = f", the least of {counted(len(busy), 'GPU')}" if len(busy) > 1 else ""
    return f"Some kernel runs on {_gpu(idlest)} {share} of the time{least}{draws and ','}{draws}{limit}{when}.", share


def _of_power(logs: Sequence[GpuLog]) -> tuple[str, str] | None:
    known = [log for log in logs if log.power_w is not None]
    if not known:
        return f"{counted(len(logs), 'GPU')} logged, without their use: {plain(logs[0].lacks, 200)} would bring it.", ""
    most = max(known, key=lambda log: log.power_w or 0.0)
    return f"{_gpu(most)} draws {quantity(most.power_w or 0.0, 'W')} on the mean; how busy it is was not logged.", ""


def _filled(log: GpuLog) -> float:
    if not log.memory_total_bytes or log.memory_used_bytes is None:
        return 0.0
    share = log.memory_used_bytes / log.memory_total_bytes
    return share if math.isfinite(share) and share <= 1 else 0.0


def _gpu(log: GpuLog) -> str:
    name = plain(log.gpu, 60)
    return f"GPU {name.partition(' ')[2]}" if " " in name else "the GPU"


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
