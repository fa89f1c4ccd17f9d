"""What was measured of the links between ranks, in words: each collective and size, the model's α and β, slow pairs."""

from __future__ import annotations

from typing import Any

from dlprof.plain import plain
from dlprof.report import formatting
from dlprof.report.compare.summary import Summary
from dlprof.result import Panel
from dlprof.result.bandwidth import Bandwidth, Fit, Timing
from dlprof.units import count, percent

_NOTE = (
    "Time: the median of the samples, each the longest of all ranks. Spread: their 10th to 90th percentile, as a"
    " multiple of it. busbw: what each rank's link carries, by nccl-tests' factors."
)
_MOST_PAIRS = 4


def summary(measured: Bandwidth) -> Summary:
    """Return what is said of a measurement."""
    ranks = measured.ranks
    rows = tuple(_row(t, ranks) for t in sorted(measured.timings, key=lambda t: _order(measured, t)))
    columns = ("collective", "size_bytes", "count", "time_ns", "spread ×", "algbw/s_bytes", "busbw/s_bytes", "")
    return Summary(
        name="bandwidth",
        headline=_headline(measured),
        second=_fits(measured),
        lede=_lede(measured),
        notices=(*measured.warnings, *_slow(measured), *_lacking(measured)),
        table=Panel("table", "Collectives by size", rows, columns, note=_NOTE),
        good=not measured.warnings and not measured.slow_pairs,
    )


def _order(measured: Bandwidth, timing: Timing) -> int:
    """Return a collective's place: the rows of one stand together, as nccl-tests prints them."""
    return list(dict.fromkeys(t.collective for t in measured.timings)).index(timing.collective)


def _row(t: Timing, ranks: int) -> tuple[Any, ...]:
    if t.ns is None:
        return (t.collective, t.bytes, None, None, "", None, None, plain(t.why, 200))
    spread = f"{(t.low_ns or 0.0) / t.ns:.2f}–{(t.high_ns or 0.0) / t.ns:.2f}"
    return (t.collective, t.bytes, t.count, t.ns, spread, t.algbw, t.busbw(ranks), "" if t.correct else "WRONG")


def _lede(measured: Bandwidth) -> str:
    hosts = list(dict.fromkeys(measured.hosts))
    on = hosts[0] if len(hosts) == 1 else count(len(hosts), "host")
    device = measured.device or "CPU"
    versions = ", ".join(f"{name} {version}" for name, version in measured.versions.items())
    ranks = f"{count(measured.ranks, 'rank')} on {plain(on, 60)}"
    return " · ".join(filter(None, (measured.backend, ranks, device, measured.dtype, versions)))


def _headline(measured: Bandwidth) -> str:
    """Return the fastest bus bandwidth, of an all-reduce where there is one."""
    timed = [t for t in measured.timings if t.ns]
    if not timed:
        return "Nothing could be measured."
    names = [t.collective for t in timed]
    of = "all_reduce" if "all_reduce" in names else names[0]
    best = max((t for t in timed if t.collective == of), key=lambda t: t.busbw(measured.ranks) or 0.0)
    bus = formatting.quantity(best.busbw(measured.ranks) or 0.0, "bytes")
    return f"{of} reaches {bus}/s on the bus, with {formatting.quantity(best.bytes, 'bytes')}."


def _fits(measured: Bandwidth) -> str:
    """Return α and β of each collective, and how far the times are from the model."""
    if not measured.fits:
        return ""
    of = "; ".join(f"{fit.collective} {_fitted(fit)}" for fit in measured.fits)
    return f"To start a message, and to move its bytes, as fitted: {of}."


def _fitted(fit: Fit) -> str:
    alpha = formatting.duration(fit.alpha_s * 1e9)
    around = "" if fit.alpha_error_s is None else f" ± {formatting.duration(fit.alpha_error_s * 1e9)}"
    rate = f"{formatting.quantity(1 / fit.beta_s_per_byte, 'bytes')}/s" if fit.beta_s_per_byte > 0 else "not known"
    if fit.beta_s_per_byte > 0 and fit.beta_error_s_per_byte is not None:
        rate += f" ± {percent(fit.beta_error_s_per_byte / fit.beta_s_per_byte)}"
    off = "" if fit.alpha_error_s is None else f" (times {percent(fit.off)} off)"  # two points are on any line
    return f"{alpha}{around}, {rate}{off}"


def _slow(measured: Bandwidth) -> tuple[str, ...]:
    """Name the slow pairs of ranks with their hosts."""
    slow = measured.slow_pairs
    named = []
    for pair, factor in slow[:_MOST_PAIRS]:
        a, b = (f"rank {r} ({plain(measured.hosts[r], 40)})" for r in pair.ranks)
        rate = formatting.quantity(pair.bytes / pair.ns * 1e9, "bytes")
        named.append(
            f"{a} and {b} exchange at {rate}/s, {formatting.times(factor)} as long as the median of like pairs"
        )
    more = len(slow) - len(named)
    return (*named, *((f"and {count(more, 'slow pair')} more",) if more > 0 else ()))


def _lacking(measured: Bandwidth) -> tuple[str, ...]:
    return ("The time was up before all sizes were measured.",) if measured.state == "out_of_time" else ()
