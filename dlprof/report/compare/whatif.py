"""What a run's step would be with something changed, in words."""

from __future__ import annotations

from typing import Any

from dlprof.plain import plain
from dlprof.report import formatting
from dlprof.report.compare.summary import Summary
from dlprof.result import Panel
from dlprof.result.scale import Answer, Answers
from dlprof.result.stored import plain as data_of
from dlprof.units import digits

FORMAT = 1

_NOTE = "Predicted by replaying the recording; nothing was run."
_SEVERAL = " Each change alone, then all together: their gains overlap."


def summary(name: str, found: Answers) -> Summary:
    """Return what is said of the answers; `name` is the run's."""
    rows = [*found.alone, *([found.together] if found.together else [])]
    samples = found.throughput.samples_per_s if found.throughput else None
    unit = "samples/s" if samples else "steps/s"
    rate = samples or 1e9 / found.step_ns
    table = Panel(
        "table",
        "Predicted step",
        (
            ("present", found.step_ns, None, _rounded(rate)),
            *(_row(a, found.step_ns, rate, together=a is found.together) for a in rows),
        ),
        ("change", "step_ns", "faster_times", unit),
        note=_NOTE + (_SEVERAL if found.together else ""),
    )
    last = found.together or next((a for a in found.alone if a.step_ns is not None), found.alone[-1])
    bars = tuple((row[0], row[1]) for row in table.rows if row[1] is not None)
    return Summary(
        name=name,
        headline=_headline(last, found.step_ns),
        table=table,
        lede=f"{name} · a step of {formatting.duration(found.step_ns)}, {digits(rate)} {unit}",
        notices=tuple(dict.fromkeys(f"{_name(a)}: {why}" for a in found.alone for why in _whys(a))),
        panels=(Panel("bars", "The mean steady step", bars, unit="ns"),),
        bars=unit,
        good=last.step_ns is not None,
    )


def to_json(found: Answers) -> dict[str, Any]:
    """Return the answers as plain data."""
    return {"format": FORMAT, **data_of(found)}


def _name(answer: Answer) -> str:
    return " and ".join(answer.changes)


def _whys(answer: Answer) -> tuple[str, ...]:
    return (f"not known: {plain(answer.why, 400)}",) if answer.step_ns is None else answer.unknown


def _row(answer: Answer, step_ns: float, rate: float, *, together: bool) -> tuple[Any, ...]:
    name = "all together" if together else plain(_name(answer), 60)
    if answer.step_ns is None:
        return (name, None, None, None)
    factor = step_ns / answer.step_ns if answer.step_ns > 0 else None
    return (name, answer.step_ns, factor, None if factor is None else _rounded(rate * factor))


def _rounded(rate: float) -> float:
    return float(f"{rate:.4g}")


def _headline(answer: Answer, step_ns: float) -> str:
    what = plain(_name(answer), 200)
    if answer.step_ns is None:
        return f"What {what} would give is not known: {plain(answer.why, 300)}"
    then, now = formatting.duration(answer.step_ns), formatting.duration(step_ns)
    if abs(answer.step_ns / step_ns - 1) < 0.005:
        return f"With {what} a step would take as long as now: {now}."
    if answer.step_ns > step_ns:
        return f"With {what} a step would take longer: {then} instead of {now}."
    return (
        f"With {what} a step would take {then} instead of {now}: {formatting.times(step_ns / answer.step_ns)} faster."
    )
