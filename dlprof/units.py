"""Writes figures for people: durations, sizes, shares and counts, with as many digits as are worth reading."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

MINUS = "\u2212"
UNKNOWN = "\u2014"

_TIMES = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"))
_FLOPS = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"))
_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def duration(ns: float) -> str:
    """Write nanoseconds in the unit that suits them: "214.6 ms", "18.3 µs"."""
    return quantity(ns, "ns")


def size(n: float) -> str:
    """Write bytes in decimal units, as disks and links are sold: "77.1 MB"."""
    return quantity(n, "bytes")


def percent(share: float) -> str:
    """Write a share of one as "31 %"; small ones keep a digit."""
    if not math.isfinite(share):
        return UNKNOWN
    value = 100 * share
    if 0 < abs(value) < 0.05:
        return "< 0.1 %"
    return f"{value:.{1 if 0 < abs(value) < 9.95 else 0}f} %".replace("-", MINUS)


def count(n: float, noun: str) -> str:
    """Write a number of things: 1 copy, 3 copies, 2.5 copies."""
    number = f"{n:,.0f}" if float(n).is_integer() or abs(n) >= 10 else f"{n:.1f}"
    plural = noun[:-1] + "ies" if noun.endswith("y") else noun + ("es" if noun.endswith(("tch", "ss")) else "s")
    return f"{number} {noun if number == '1' else plural}"


def digits(value: float) -> str:
    """Write a number with as many digits as are worth reading, and a comma between thousands."""
    if not math.isfinite(value):
        return UNKNOWN
    large = abs(value)
    whole = value == int(value) and large < 1e15
    form = ",.0f" if whole or large >= 999.95 else ".1f" if large >= 9.995 else ".2f" if large >= 0.01 else ".2g"
    text = format(int(value) if whole else value, form)
    return text.replace("-", MINUS) if "e" not in text else text


def scale(unit: str, largest: float) -> tuple[float, str]:
    """Return the divisor and the new unit for values of a unit: 4e6 "ns" are written in "ms"."""
    if unit == "share":
        return 0.01, "%"
    for divisor, name in {"ns": _TIMES, "bytes": _SIZES, "FLOP": _FLOPS}.get(unit, ()):
        # What would round to 1000 of the smaller unit is 1 of this one; ns are written whole.
        if abs(largest) >= (0.9995 if name == "µs" else 0.99995) * divisor:
            return divisor, name
    return 1.0, {"bytes": "B"}.get(unit, unit)


def quantity(value: float, unit: str) -> str:
    """Write a value of a unit; "ns", "bytes", "FLOP" and "share" take the multiple that suits them."""
    if not math.isfinite(value):
        return UNKNOWN
    if unit == "share":
        return percent(value)
    divisor, name = scale(unit, value)
    if unit == "ns":
        large = abs(value / divisor)
        form = ",.0f" if large >= 999.95 or name == "ns" else ".1f" if large >= 9.995 else ".2f"
        return f"{format(value / divisor, form).replace('-', MINUS)} {name}"
    return f"{digits(value / divisor)} {name}" if name else digits(value)


def often(n: float) -> str:
    """Write how often: once, twice, 10 times, 2.50 times."""
    return {1.0: "once", 2.0: "twice"}.get(n, f"{digits(n)} times")


def every(n: float, noun: str) -> str:
    """Write which of many: every step, every 2nd step, about every 5th step of one in 4.92."""
    whole = max(round(n), 1)
    ending = "th" if whole % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(whole % 10, "th")
    which = f"every {noun}" if whole == 1 else f"every {whole:,}{ending} {noun}"
    return which if abs(n - whole) < 0.02 * n else f"about {which}"


# The numbers that a person would type, per power of ten.
_TYPED = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)


def typed(n: float) -> int:
    """Return the least number that is not below n and that a person would type: 120, 150, 4000; any below 10."""
    if n <= 10:
        return math.ceil(n)
    power = 10.0 ** math.floor(math.log10(n))
    return next(round(of * power) for of in _TYPED if of * power >= n * (1 - 1e-9))


def current(value: object) -> str:
    """Write the value of a setting; None is "not set"."""
    return "not set" if value is None else str(value)


def few(things: Sequence[object], most: int) -> str:
    """List the first `most` things: "1, 2, 3 …"."""
    return ", ".join(map(str, things[:most])) + (" …" if len(things) > most else "")


def listed(ranks: Iterable[int]) -> str:
    """Write the first ranks, with ranges: "0, 1, 4 to 7"."""
    numbers = sorted(set(ranks))
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    texts: list[str] = []
    for run in runs:
        texts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else list(map(str, run))
    return ", ".join(texts[:8]) + (f" … ({count(len(numbers), 'rank')})" if len(texts) > 8 else "")


def ranks_named(ranks: Iterable[int]) -> str:
    """Write ranks as the subject of a sentence: "rank 3", "ranks 3 and 5", "ranks 0 to 7"."""
    numbers = sorted(set(ranks))
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    text = listed(numbers)
    before, sign, after = text.rpartition(", ")
    return f"ranks {before} and {after}" if sign and "…" not in text else f"ranks {text}"


def short(text: str, most: int) -> str:
    """Return a name cut to a maximum length, with an ellipsis if it was longer."""
    return text if len(text) <= most else text[: most - 1] + "…"


def used_by_others(foreign: float, cores: float, waited: float | None) -> str:
    """Write how much of the host's cores other programs used, and how long the training thread waited for one."""
    waits = "" if waited is None else f", and its training thread waited for one {percent(waited)} of the time"
    return f"programs outside the job used {digits(foreign)} of {cores:.0f} cores{waits}"


def is_now(value: object) -> str:
    """Say after the new value of a setting what it is now: " (is 4)"; nothing where that is not known."""
    return "" if value is None else f" (is {value})"
