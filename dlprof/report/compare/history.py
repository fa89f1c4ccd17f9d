"""The history of a script in words: its throughput run by run, and the moments at which it changed."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from dlprof.analysis.compare.history import WORTH, History, Moment
from dlprof.analysis.compare.ladder import Rung
from dlprof.plain import plain
from dlprof.report import formatting
from dlprof.report.compare.ladder import rate, times
from dlprof.report.compare.ladder import to_json as of_ladder
from dlprof.report.compare.summary import Summary
from dlprof.result import Panel
from dlprof.units import count, digits

FORMAT = 1


def summary(found: History) -> Summary:
    """Return what is said of a history."""
    rungs, unit = found.ladder.rungs, found.ladder.unit
    per_s = f"{unit} a second"
    left_out = tuple(f"{plain(n, 80)} is left out: {plain(w, 400)}" for n, w in found.ladder.left_out)
    script = plain(found.script or "these runs", 80)
    if not rungs:
        return Summary("history", "None of these runs has steps.", Panel("table", "The runs", ()), notices=left_out)
    rows = tuple(_row(at, rung, unit) for at, rung in zip(found.starts_ns, rungs, strict=True))
    columns = ("started", "run", f"{unit}/s", "× before", "step_ns", "memory_bytes", "largest finding", "what changed")
    line = tuple((n, rate(rung.result, unit)) for n, rung in enumerate(rungs, 1))
    marks = tuple((float(rungs.index(m.rung) + 1), _mark(m), "change") for m in found.moments)
    return Summary(
        name=script,
        headline=_headline(found, unit, per_s),
        second=" ".join(_said(m) for m in found.moments[-3:]),
        lede=f"{script} · {count(len(rungs), 'run')} · {_when(found.starts_ns[0])} to {_when(found.starts_ns[-1])}",
        notices=(*left_out, *found.ladder.doubts),
        table=Panel(
            "table",
            "All runs",
            rows,
            columns,
            note=f"A change of less than {formatting.percent(WORTH)} is not called one.",
        ),
        panels=(Panel("lines", f"{per_s.capitalize()} by run", line, ("run", per_s), marks=marks),),
        bars=f"{unit}/s",
        good=not any(m.rung.before and m.rung.before.ratio < 1 for m in found.moments),
    )


def to_json(found: History) -> dict[str, Any]:
    """Return a history as plain data."""
    moments = [{"run": m.rung.name, "came": list(m.came), "went": list(m.went)} for m in found.moments]
    data = {**of_ladder(found.ladder), "format": FORMAT, "script": found.script, "starts_ns": list(found.starts_ns)}
    return data | {"moments": moments}


def _when(at: int | None) -> str:
    if at is None:
        return "an unknown time"
    return datetime.fromtimestamp(at / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M")


def _row(at: int | None, rung: Rung, unit: str) -> tuple[Any, ...]:
    per_s, w = rate(rung.result, unit), rung.result.window
    found = rung.result.found[0] if rung.result.found else None
    finding = f"{found.id} {formatting.speedup(found)}" if found else "none"
    return (
        _when(at),
        plain(rung.name, 40),
        None if per_s is None else float(f"{per_s:.4g}"),
        times(rung.before),
        w.step_ns if w else None,
        w.memory_bytes if w else None,
        finding,
        "; ".join(rung.changes) if rung.before else "(the first)",
    )


def _headline(found: History, unit: str, per_s: str) -> str:
    rungs = found.ladder.rungs
    last = rungs[-1]
    now = rate(last.result, unit)
    rates = f" at {digits(now)} {per_s}" if now else ""
    if len(rungs) < 2:
        return f"One run only{rates}: there is nothing to compare it with."
    if not found.moments:
        return f"No change over {count(len(rungs), 'run')}{rates}."
    newest = found.moments[-1]
    assert newest.rung.before is not None
    ratio = newest.rung.before.ratio
    how = f"{formatting.times(ratio)} faster" if ratio > 1 else f"{formatting.times(1 / ratio)} slower"
    since = "the last run is" if newest.rung is last else f"since {plain(newest.rung.name, 40)} the job is"
    return f"{since[0].upper()}{since[1:]} {how} than the run before{rates and f', {rates.strip()}'}."


def _said(m: Moment) -> str:
    """Say what changed at a moment: "b (num workers 0 → 4): 1.41 ×; gone: input_wait."."""
    assert m.rung.before is not None
    what = f" ({'; '.join(m.rung.changes)})" if m.rung.changes else " (no setting that dlprof records)"
    parts = [f"{plain(m.rung.name, 40)}{plain(what, 300)}: {formatting.times(m.rung.before.ratio)} as fast"]
    parts += [f"new: {', '.join(m.came)}"] if m.came else []
    parts += [f"gone: {', '.join(m.went)}"] if m.went else []
    return "; ".join(parts) + "."


def _mark(m: Moment) -> str:
    return m.rung.changes[0] if m.rung.changes else "changed"
