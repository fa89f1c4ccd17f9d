"""What a check found: rows of parts, each passed, failed or skipped, with the figures said and true.

Everything that decides is here, as functions of plain numbers, so that it is tested where there is no GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeGuard

# rehearsed: the plumbing ran on a CPU, and its figures say nothing of a GPU.
# running: what stands in gpu.json while a check has not ended; it is all that is left of one that was cut off.
State = Literal["passed", "failed", "skipped", "rehearsed", "running"]


@dataclass(frozen=True)
class Part:
    """One comparison: what dlprof said, what the oracle says, and how far they may be apart, in words.

    `said` and `true` are in `unit`; None where there is none. `how` says how the oracle measured.
    """

    name: str
    state: State
    why: str = ""
    said: float | str | None = None
    true: float | str | None = None
    unit: str = ""
    limit: str = ""
    how: str = ""


@dataclass(frozen=True)
class Row:
    """What became of one check."""

    check: str
    state: State
    why: str = ""
    parts: tuple[Part, ...] = ()
    took_s: float = 0.0
    at: str = ""  # when it ended, UTC


def near(
    name: str, said: float | None, true: float | None, *, share: float = 0.0, points: float = 0.0, unit: str, how: str
) -> Part:
    """Return whether `said` is within `share` of `true`, or within `points` of it, whichever allows more.

    `points` is in the figures' unit. A figure that is missing or not finite fails: an oracle that measured nothing
    proves nothing.
    """
    allowed = max(share * abs(true), points) if _known(true) else 0.0
    in_points = f"{100 * points:.3g} points" if unit == "share" else figure(points, unit)
    limits = [f"{100 * share:.3g} %"] * bool(share) + [in_points] * bool(points)
    limit = f"± {' or '.join(limits)}"
    part = Part(name, "failed", said=said, true=true, unit=unit, limit=limit, how=how)
    if not _known(true):
        return replace(part, why="the oracle measured nothing")
    if not _known(said):
        return replace(part, why="dlprof says nothing")
    off = abs(said - true)
    # A difference that is the tolerance itself, but for the last bit of a float, is within it.
    if off <= allowed * (1 + 1e-9):
        return replace(part, state="passed")
    return replace(part, why=f"{figure(said, unit)} is said, {figure(true, unit)} is true")


def below(name: str, value: float | None, limit: float, *, unit: str, how: str) -> Part:
    """Return whether a figure is below a limit."""
    return _bounded(name, value, limit, "<", unit, how)


def above(name: str, value: float | None, limit: float, *, unit: str, how: str) -> Part:
    """Return whether a figure is above a limit."""
    return _bounded(name, value, limit, ">", unit, how)


def between(
    name: str, value: float | None, least: float, most: float, *, unit: str, how: str, beside: float | None = None
) -> Part:
    """Return whether a figure lies between two limits, both included; `beside` is an oracle's, and told alone."""
    limit = f"{figure(least, unit)} to {figure(most, unit)}"
    part = Part(name, "failed", said=value, true=beside, unit=unit, limit=limit, how=how)
    if not _known(value):
        return replace(part, why="there is no such figure")
    if least <= value <= most:
        return replace(part, state="passed")
    return replace(part, why=f"{figure(value, unit)}, not {limit}")


def same(name: str, said: object, true: object, *, how: str, unit: str = "") -> Part:
    """Return whether two values are equal; numbers exactly."""
    equal = said == true and said is not None
    told, known = _cell(said), _cell(true)
    why = "" if equal else f"{told} is said, {known} is true"
    return Part(name, "passed" if equal else "failed", why, told, known, unit, "equal", how)


def among(name: str, said: object, true: Sequence[object], *, how: str) -> Part:
    """Return whether a value is one of several."""
    told = _cell(said)
    known = " or ".join(map(str, true))
    why = "" if said in true else f"{told} is said, {known} is true"
    return Part(name, "failed" if why else "passed", why, told, known, limit="one of these", how=how)


def holds(name: str, true: bool, why: str, *, how: str = "") -> Part:
    """Return a part for something that holds or does not; `why` says what was found where it does not."""
    return Part(name, "passed" if true else "failed", "" if true else why, how=how)


def skipped(name: str, why: str) -> Part:
    """Return a part that could not be judged here, and why."""
    return Part(name, "skipped", why)


def named(prefix: str, parts: Sequence[Part]) -> list[Part]:
    """Return parts with the name of what they speak of before their own."""
    return [replace(part, name=f"{prefix}: {part.name}") for part in parts]


def subject(part: Part) -> str:
    """Return what a part speaks of: what its name begins with."""
    return part.name.partition(": ")[0]


def subjects(parts: Sequence[Part]) -> dict[str, dict[str, Part]]:
    """Return parts by the subject that their names begin with, then by the rest; without subjects all of it skipped."""
    found: dict[str, dict[str, Part]] = {}
    for part in parts:
        found.setdefault(subject(part), {})[part.name.partition(": ")[2]] = part
    return {name: of for name, of in found.items() if any(part.state != "skipped" for part in of.values())}


def rehearsed(part: Part) -> Part:
    """Return a part of a rehearsal: its figures are a CPU's, and are neither passed nor failed."""
    return part if part.state == "skipped" else replace(part, state="rehearsed", why="")


def row_of(check: str, parts: Sequence[Part], broken: str = "", rehearsal: bool = False) -> Row:
    """Return the row of a check: failed with its first failure, or with what broke it; passed where a part passed.

    Parts that were skipped do not fail a row, as a machine may have one GPU only; a row of nothing else is skipped. In
    a rehearsal no row passes: what holds on a CPU was seen there alone.
    """
    failures = [f"{p.name}: {p.why}" for p in parts if p.state == "failed"]
    failures += [broken] if broken else []
    if failures:
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        return Row(check, "failed", failures[0] + more, tuple(parts))
    done = [p for p in parts if p.state != "skipped"]
    if not done:
        why = parts[0].why if parts else "nothing was checked"
        return Row(check, "skipped" if parts else "failed", why, tuple(parts))
    state: State = "rehearsed" if rehearsal else "passed"
    left = len(parts) - len(done)
    return Row(check, state, f"{left} of {len(parts)} parts skipped" if left else "", tuple(parts))


def exit_code(rows: Sequence[Row]) -> int:
    """Return 0 where every check ran and passed (or, in a rehearsal, was rehearsed), else 1."""
    return 0 if rows and all(r.state in ("passed", "rehearsed") for r in rows) else 1


def to_json(row: Row) -> dict[str, Any]:
    """Return a row as plain data; numbers that are not finite become null, as JSON has none."""
    data = asdict(row)
    for part in data["parts"]:
        for key in ("said", "true"):
            if isinstance(part[key], float) and not math.isfinite(part[key]):
                part[key] = None
    return data


def from_json(data: Mapping[str, Any]) -> Row:
    """Return a row from its plain data."""
    return Row(**{**data, "parts": tuple(Part(**part) for part in data["parts"])})


def line(part: Part) -> str:
    """Return a part as a line of the log."""
    figures = []
    if part.said is not None:
        figures.append(f"said {figure(part.said, part.unit)}")
    if part.true is not None:
        figures.append(f"true {figure(part.true, part.unit)}")
    if part.limit and figures:
        figures.append(part.limit)
    told = f": {', '.join(figures)}" if figures else ""
    return f"{part.state:9} {part.name}{told}{f' ({part.why})' if part.why else ''}"


def _bounded(name: str, value: float | None, limit: float, sign: str, unit: str, how: str) -> Part:
    text = f"{sign} {figure(limit, unit)}"
    part = Part(name, "failed", said=value, unit=unit, limit=text, how=how)
    if not _known(value):
        return replace(part, why="there is no such figure")
    if value < limit if sign == "<" else value > limit:
        return replace(part, state="passed")
    return replace(part, why=f"{figure(value, unit)}, not {text}")


def _known(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _cell(value: object) -> float | str | None:
    return (
        value if value is None or (isinstance(value, (int, float, str)) and not isinstance(value, bool)) else str(value)
    )


def figure(value: object, unit: str) -> str:
    """Return a figure as people write it, a share as per cent; "" for None."""
    if value is None:
        return ""
    if isinstance(value, str) or not isinstance(value, (int, float)):
        return str(value)
    if unit == "share":
        return f"{100 * value:.3g} %"
    return f"{value:,.4g}{f' {unit}' if unit else ''}"
