"""Figures as people read them: a duration, a size, a share, with as many digits as are worth reading."""

from __future__ import annotations

import math


def duration(ns: float) -> str:
    """Write ns in the unit that leaves one to three digits before the point."""
    return _scaled(ns, ((1e9, "s"), (1e6, "ms"), (1e3, "µs")), "ns")


def size(n: float) -> str:
    """Write bytes in decimal units, as disks and links are sold."""
    return _scaled(n, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")), "bytes")


def percent(share: float) -> str:
    """Write a share in percent, to two digits."""
    value = share * 100
    if not math.isfinite(value):
        return "unknown"
    return f"{value:.0f} %" if abs(value) >= 9.5 else f"{value:.1f} %"


def count(n: float, noun: str) -> str:
    """Write a number of things: 1 copy, 3 copies, 2.5 copies."""
    number = f"{n:,.0f}" if float(n).is_integer() or abs(n) >= 10 else f"{n:.1f}"
    plural = noun[:-1] + "ies" if noun.endswith("y") else noun + ("es" if noun.endswith("ch") else "s")
    return f"{number} {noun if number == '1' else plural}"


def _scaled(value: float, units: tuple[tuple[float, str], ...], smallest: str) -> str:
    if not math.isfinite(value):
        return "unknown"
    for divisor, unit in units:
        if abs(value) >= 0.9995 * divisor:
            v = value / divisor
            return (
                f"{v:,.0f} {unit}" if abs(v) >= 99.95 else f"{v:.1f} {unit}" if abs(v) >= 9.995 else f"{v:.2f} {unit}"
            )
    return f"{value:.0f} {smallest}"
