"""A ladder of runs in words: what each change gave, from the first run to the last."""

from __future__ import annotations

from typing import Any

from dlprof.analysis.compare.ladder import Ladder, Rung, Step
from dlprof.plain import plain
from dlprof.report import formatting
from dlprof.report.compare.summary import Summary
from dlprof.result import Panel, Result
from dlprof.result.stored import plain as data_of
from dlprof.units import digits

FORMAT = 1

_NOTE = (
    "×: how many times as fast as the run before, ± twice its standard error within the runs, and as the first one; how"
    " much recordings of the same job differ is not part of it."
)


def summary(ladder: Ladder) -> Summary:
    """Return what is said of a ladder; of one with fewer than two runs, why there is none."""
    rungs, unit = ladder.rungs, ladder.unit
    left_out = tuple(f"{plain(name, 80)} is left out: {plain(why, 400)}" for name, why in ladder.left_out)
    notices = (*left_out, *ladder.doubts)
    if len(rungs) < 2:
        return Summary("compare", "Fewer than two of these runs can be compared.", Panel("table", "The runs", ()))
    per_s = f"{unit} a second"
    columns = ("run", f"{unit}/s", "× before", "× first", "step_ns", "memory_bytes", f"J a {unit[:-1]}", "what changed")
    rows = tuple(_row(n, rung, unit) for n, rung in enumerate(rungs, 1))
    return Summary(
        name=formatting.name(rungs[0].result),
        headline=_headline(rungs, per_s),
        second=_largest(rungs),
        lede=f"{formatting.name(rungs[0].result)} · {formatting.devices(rungs[0].result)} · {len(rungs)} runs",
        notices=notices,
        tiles=_tiles(rungs, per_s),
        table=Panel("table", "What each change gave", rows, columns, note=_NOTE),
        panels=(
            Panel(
                "bars",
                f"{per_s.capitalize()}, run by run",
                tuple((_label(n, rung), rate(rung.result, unit)) for n, rung in enumerate(rungs, 1)),
            ),
        ),
        bars=f"{unit}/s",
        good=not notices,
    )


def to_json(ladder: Ladder) -> dict[str, Any]:
    """Return a ladder as plain data."""
    rows = []
    for rung in ladder.rungs:
        w = rung.result.window
        rows.append(
            {
                "name": rung.name,
                "run": data_of(rung.result.run),
                "window": data_of(w) if w else None,
                "changes": list(rung.changes),
                "before": data_of(rung.before) if rung.before else None,
                "first": data_of(rung.first) if rung.first else None,
            }
        )
    left_out = [{"name": name, "why": why} for name, why in ladder.left_out]
    return {"format": FORMAT, "unit": ladder.unit, "runs": rows, "left_out": left_out, "doubts": list(ladder.doubts)}


def rate(result: Result, unit: str) -> float | None:
    """Return how many samples, tokens or steps a second a run trains on."""
    w = result.window
    if w is None:
        return None
    if unit == "steps":
        return 1e9 / w.step_ns if w.step_ns else None
    return getattr(w.throughput, f"{unit}_per_s", None)


def times(step: Step | None) -> str:
    """Write a ratio with its margin: "1.31 × ± 0.02"; "" of None."""
    if step is None:
        return ""
    margin = f" ± {2 * step.noise:.2f}" if step.noise is not None else ""
    return f"{formatting.times(step.ratio)}{margin}{' (noise)' if step.verdict == 'noise' else ''}"


def _row(n: int, rung: Rung, unit: str) -> tuple[Any, ...]:
    w, result = rung.result.window, rung.result
    per_s, power = rate(result, unit), w.throughput.power_w if w and w.throughput else None
    joules = power / per_s if power and per_s else None
    changed = "; ".join(rung.changes) if rung.before else "(the first)"
    return (
        _label(n, rung),
        None if per_s is None else float(f"{per_s:.4g}"),
        times(rung.before),
        formatting.times(rung.first.ratio) if rung.first else "",
        w.step_ns if w else None,
        w.memory_bytes if w else None,
        joules,
        changed or "no setting that dlprof records",
    )


def _label(n: int, rung: Rung) -> str:
    name = plain(rung.name, 40)
    return name if name.startswith(f"{n}-") else f"{n} {name}"


def _headline(rungs: tuple[Rung, ...], per_s: str) -> str:
    first, last = rungs[0], rungs[-1]
    unit = per_s.split()[0]
    a, b = rate(first.result, unit), rate(last.result, unit)
    rates = f": {digits(a)} → {digits(b)} {per_s}" if a and b else ""
    step = last.first
    assert step is not None
    if step.verdict == "noise":
        return f"From the first run to the last nothing changed beyond noise{rates}."
    if step.ratio < 1:
        return f"The last run takes {formatting.times(1 / step.ratio)} as long as the first{rates}."
    return f"The last run is {formatting.times(step.ratio)} as fast as the first{rates}."


def _largest(rungs: tuple[Rung, ...]) -> str:
    """Name the change that gave most, and those that took."""
    steps = [(r.before.ratio, r) for r in rungs if r.before is not None and r.before.verdict != "noise"]
    if not steps:
        return ""
    most, rung = max(steps, key=lambda s: s[0])
    said = []
    if most > 1:
        said.append(f"The largest gain is {formatting.times(most)} by {_named(rung)}.")
    worse = [(ratio, r) for ratio, r in steps if ratio < 1]
    if worse:
        ratio, rung = min(worse, key=lambda s: s[0])
        said.append(f"{_named(rung)} cost {formatting.percent(1 - ratio)}.")
    return " ".join(said)


def _named(rung: Rung) -> str:
    return f"{rung.name} ({rung.changes[0]})" if rung.changes else rung.name


def _tiles(rungs: tuple[Rung, ...], per_s: str) -> tuple[tuple[str, str], ...]:
    unit, found = per_s.split()[0], []
    for rung, which in ((rungs[0], "of the first run"), (rungs[-1], "of the last run")):
        if value := rate(rung.result, unit):
            found.append((digits(value), f"{per_s} {which}"))
    last = rungs[-1].first
    if last is not None:
        found.append((formatting.times(last.ratio), "from the first to the last"))
    return tuple(found)
