"""Memory: a bar for each rank, the modules of the rank with the highest peak, and the predicted peak of each change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from msgspec import Struct

from dlprof import units
from dlprof.plain import NBSP, plain
from dlprof.report import formatting, looks
from dlprof.report.figures import drawing
from dlprof.report.figures.drawing import Figure, Table, axis, drawn, rounded
from dlprof.report.figures.modules import spelled
from dlprof.result import Result
from dlprof.result.figures import DeviceMemory, Footprint, MemoryChange, MemoryPart

BARS = 64  # of the ranks with the highest peaks
LABELLED = 16  # bars with sizes inside
MOST_MODULES = 24
LEAST = 0.002  # of a bar; less than a pixel is not in the legend

_MODULES = ("module", "class", "total", "parameters", "gradients", "optimizer state", "activations")
_CHANGES = ("change", "peak", "range", "of present", "largest batch", "step for the same samples", "note")

_ORDER = {name: place for place, name in enumerate(looks.MEMORY)}

_HOW = {"most": "at most", "least": "at least"}
_MOMENTS = {"backward": "at the start of the backward pass", "gradients": "at the end of the last backward pass"}
_KNOWN = {
    "counted": "counted tensor by tensor",
    "allocator": "from PyTorch's allocator",
    "driver": "from the GPU's driver",
    "process": "from the operating system",
    "difference": "the peak less all other parts",
}


class Memory(Struct, frozen=True):
    """What the page shows of memory."""

    bars: Figure
    rank: str
    modules: Table | None
    changes: Table | None


def shown(footprint: Footprint | None) -> Memory | None:
    """Return what the page shows; None where memory was not counted."""
    if footprint is None or not footprint.devices:
        return None
    bars = _bars(footprint.devices)
    return Memory(bars, f"rank {footprint.rank}", _modules(footprint), _changes(footprint))


def sentence(footprint: Footprint | None) -> str:
    """Name the largest parts of the highest peak among the ranks, in one line; "" where memory was not counted."""
    if footprint is None or not footprint.devices:
        return ""
    fullest = footprint.devices[0]
    parts = sorted(fullest.parts, key=lambda p: -p.bytes)[:3]
    of = f" of {formatting.quantity(fullest.total_bytes, 'bytes')}" if fullest.total_bytes else ""
    named = ", ".join(f"{_look(p.part).name.lower()} {formatting.about(p.bytes / fullest.bytes)}" for p in parts)
    who = [f"rank {fullest.rank}"] if len({d.rank for d in footprint.devices}) > 1 else []
    host = "host " if fullest.device == "cpu" else ""
    who += [plain(fullest.device, 20)] if not host else []
    whose = f" ({', '.join(who)})" if who else ""
    return f"Peak {host}memory{whose}: {formatting.quantity(fullest.bytes, 'bytes')}{of} ({named})."


class AtEnd(Struct, frozen=True):
    """The memory of a job that ended for want of it, bytes by part, as they were counted in an earlier step.

    They are scaled to what it needed at the end, where that is known. `then`: with the first change, None: not known.
    `limit`: what there was, at least `whole`.
    """

    parts: Mapping[str, float]
    then: float | None
    limit: float

    @property
    def whole(self) -> float:
        """All parts."""
        return sum(self.parts.values())


def at_end(result: Result) -> AtEnd | None:
    """Return the memory of a job that ran out of it; None: it did not, or its memory was not counted."""
    failed = result.found[0] if result.found else None
    if failed is None or failed.id != "out_of_memory" or result.footprint is None or not result.footprint.devices:
        return None
    of_rank = [d for d in result.footprint.devices if d.rank == result.footprint.rank and d.bytes > 0]
    peak = failed.changes[0].peak_bytes if failed.changes else None
    if not of_rank or (peak is None and len(of_rank) > 1) or (peak is not None and not 0 < peak[0] < math.inf):
        return None
    # Of a rank's GPU and host, the one whose count comes nearest to what was needed.
    device = min(of_rank, key=lambda d: abs(math.log(d.bytes / peak[0])) if peak else 0.0)
    needed, then = peak or (device.bytes, None)
    parts = {_look_name(p.part): p.bytes * needed / device.bytes for p in device.parts if p.bytes > 0}
    known = sorted(parts, key=lambda name: _ORDER.get(name, len(_ORDER)))
    return AtEnd({name: parts[name] for name in known}, then, max(needed, device.total_bytes or 0.0))


def _bars(devices: Sequence[DeviceMemory]) -> Figure:
    shown = sorted(devices[:BARS], key=lambda d: (d.rank, d.device))
    several = len({d.device for d in shown}) > 1
    labels = [f"rank {d.rank}" + (f" · {plain(d.device, 12)}" if several else "") for d in shown]
    there = dict.fromkeys(p.part for d in shown for p in d.parts)
    order = sorted(there, key=lambda part: _ORDER.get(f"held-{part}", len(_ORDER)))
    sizes = [{p.part: p for p in d.parts} for d in shown]
    largest = max(max(d.bytes, d.total_bytes or 0.0) for d in shown)
    divisor, unit = units.scale("bytes", largest)
    roomy = len(shown) <= LABELLED
    data = []
    for part in order:
        look = _look(part)
        values = [max(_bytes(of, part), 0.0) for of in sizes]
        texts = [formatting.quantity(v, "bytes") if v >= 0.08 * largest else "" for v in values]
        hover = (f"{label} · {_described(look.name, of.get(part))}" for label, of in zip(labels, sizes, strict=True))
        x = [rounded(v / divisor) for v in values]
        inside = drawing.bar_text(texts, drawing.inside(look.light), 11.5) if roomy else {}
        data.append(
            drawing.bars(x, list(range(len(shown))), look.light, hover, int(roomy), name=drawn(look.name), **inside)
        )
    totals = sorted({d.total_bytes for d in shown if d.total_bytes})
    lines = [
        {"type": "line", "x0": rounded(t / divisor), "x1": rounded(t / divisor), "yref": "paper", "y0": 0, "y1": 1,
         "line": {"color": drawing.HOT, "width": 1.5, "dash": "dot"}}
        for t in totals
    ]  # fmt: skip
    arranged = drawing.layout(
        (30 if roomy else 9) * len(shown) + 36,
        drawing.margin(labels),
        barmode="stack",
        bargap=0.28 if roomy else 0,
        xaxis=axis(unit, range=[0, rounded(1.02 * largest / divisor)], nticks=8),
        yaxis=drawing.lanes(labels if roomy else labels[:: -(-len(labels) // 16)]),
        shapes=lines,
        uniformtext={"mode": "hide", "minsize": 10},
    )
    rows = [
        (label, d.device, *(formatting.quantity(_bytes(of, p), "bytes") if p in of else "" for p in order),
         formatting.quantity(d.bytes, "bytes"))
        for label, d, of in zip(labels, shown, sizes, strict=True)
    ]  # fmt: skip
    table = drawing.plain_table(
        ("rank", "device", *(_look(p).name for p in order), "total"),
        rows,
        (False, False, *(True for _ in order), True),
    )
    moment = next((_MOMENTS[d.moment] for d in shown if d.moment in _MOMENTS), "")
    notes = [f"The peak is {moment}." if moment else ""]
    notes.append("Dotted line: the GPU's memory." if totals else "")
    notes.append(drawing.more(len(devices) - len(shown), "ranks"))
    legend = tuple(f"held-{p}" for p in order if any(_bytes(of, p) >= LEAST * largest for of in sizes))
    label = f"Stacked bars of memory by part; {formatting.counted(len(shown), 'bar')}."
    return Figure(label, {"data": data, "layout": arranged}, table, legend, " ".join(filter(None, notes)))


def _look(part: str) -> looks.Category:
    return looks.look(_look_name(part))


def _look_name(part: str) -> str:
    return f"held-{part}" if f"held-{part}" in looks.MEMORY else part


def _bytes(of: Mapping[str, MemoryPart], part: str) -> float:
    return of[part].bytes if part in of else 0.0


def _described(name: str, part: MemoryPart | None) -> str:
    if part is None:
        return name
    known = _KNOWN.get(part.known, plain(part.known, 40))
    return f"{name}: {formatting.quantity(part.bytes, 'bytes')}, {known}"


def _modules(footprint: Footprint) -> Table | None:
    if not footprint.modules:
        return None
    rows = [
        (
            spelled(m.module) + (f" ×{NBSP}{m.modules}" if m.modules > 1 else ""),
            plain(m.kind, 60),
            *(
                formatting.quantity(n, "bytes") if n else ""
                for n in (m.bytes, m.parameter, m.gradient, m.optimizer, m.activation)
            ),
        )
        for m in footprint.modules[:MOST_MODULES]
    ]
    table = drawing.plain_table(_MODULES, rows, (False, False, True, True, True, True, True))
    return Table(table.columns, table.rows, table.numeric, drawing.more(len(footprint.modules) - len(rows), "rows"))


def _changes(footprint: Footprint) -> Table | None:
    if not footprint.changes:
        return None
    fullest = next((d for d in footprint.devices if d.rank == footprint.rank), footprint.devices[0])
    now, total = fullest.bytes, fullest.total_bytes
    step = "" if footprint.now_ns is None else formatting.duration(footprint.now_ns)
    rows = [("present", formatting.quantity(now, "bytes"), "", "", "", step, "")]
    for change in footprint.changes:
        then = units.UNKNOWN
        if change.then_ns is not None:
            then = f"{_HOW.get(change.bound, '')} {formatting.duration(change.then_ns)}".strip()
        fits = "" if change.times is None or change.change == "batch" else f"{units.digits(change.times)} × present"
        fits = "does not fit" if total and change.then_bytes > total else fits
        share = formatting.percent(change.then_bytes / now) if now else ""
        rows.append(
            (
                described(change),
                formatting.quantity(change.then_bytes, "bytes"),
                _between(change),
                share,
                fits,
                then,
                plain(change.why, 200),
            )
        )
    # Columns that are empty for all changes are left out.
    kept = [i for i in range(len(_CHANGES)) if i < 2 or any(row[i] not in ("", units.UNKNOWN) for row in rows)]
    numeric = (False, True, True, True, True, True, False)
    table = drawing.plain_table(
        [_CHANGES[i] for i in kept], [[row[i] for i in kept] for row in rows], [numeric[i] for i in kept]
    )
    return Table(table.columns, table.rows, table.numeric)


def _between(change: MemoryChange) -> str:
    """Return the least and the most that the peak may be, in words; "": it is not known, or they are one."""
    if change.least_bytes is None or change.most_bytes is None:
        return ""
    return f"{formatting.quantity(change.least_bytes, 'bytes')} to {formatting.quantity(change.most_bytes, 'bytes')}"


def number(text: str) -> bool:
    """Return whether a text is a number."""
    return text.replace(".", "", 1).isdecimal()


def described(change: MemoryChange) -> str:
    """Return a change in words."""
    value = plain(change.value, 120)
    if change.change == "batch":
        return f"{units.digits(float(value)) if number(value) else value} × batch"
    if change.change == "shard":
        stage, _, ranks = value.partition("/")
        return f"FSDP (ZeRO 3) over {ranks} ranks" if stage == "3" else f"ZeRO {stage} over {ranks} ranks"
    known = {
        "autocast": "autocast to 16 bits",
        "16_bits": "model and optimizer in 16 bits",
        "checkpoint": f"checkpointing of {value}",
        "checkpoint_only": f"checkpointing of {value} only",
        "fused_attention": "fused attention",
        "8_bit": "optimizer state in 8 bits",
        "offload": "optimizer state on the host",
        "microbatches": f"{value} micro-batches",
        "schedule": f"pipeline schedule {value}",
    }
    return known.get(change.change, plain(f"{change.change} {value}", 120))
