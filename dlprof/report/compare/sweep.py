"""A sweep in words: the curve, its knee, and the predicted curve beside the measured one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dlprof.plain import plain
from dlprof.report import formatting
from dlprof.report.compare.summary import Summary
from dlprof.result import Panel
from dlprof.result.sweep import NEAR, Point, Sweep
from dlprof.units import count, digits, few, often

_STATES = {
    "complete": "",
    "out_of_time": "the time was up before all points had their readings",
    "interrupted": "it was interrupted before all points had their readings",
}


def summary(sweep: Sweep) -> Summary:
    """Return the summary of a sweep, complete or not."""
    samples = sweep.by_samples
    unit = "samples" if samples else "steps"
    per_s = f"{unit} a second"
    measured = sweep.measured
    names = tuple(a.name for a in sweep.axes)
    predicted = any(p.predicted_ns for p in sweep.points)
    of_predicted = ("predicted_ns", "off") if predicted else ()
    columns = (*names, f"{unit}/s", "±", "step_ns", *of_predicted, "")
    rows = tuple(_row(p, names, samples, predicted) for p in sweep.points)
    lost = tuple(f"{_named(p)} is left out: {plain(p.why, 300)}" for p in sweep.points if p.why)
    state = _STATES[sweep.state]
    notices = (*([f"Not complete: {state}. Started again with the same folder, it goes on."] if state else []), *lost)
    if not samples and len(measured) > 1 and any("." not in a.name for a in sweep.axes):
        notices = (*notices, "How many samples a step has is not known: points with other work a step do not compare.")
    headline, second = _verdict(sweep, samples, per_s)
    panels = _curve(sweep, samples, per_s)
    return Summary(
        name="sweep",
        headline=headline,
        second=second,
        lede=f"{_command(sweep.command)} · {', '.join(names)} · {count(len(sweep.points), 'point')},"
        f" each measured {_rounds(sweep)} over {count(sweep.steps, 'step')}",
        notices=(*notices, *sweep.warnings),
        table=Panel("table", "All points", rows, columns, note=_NOTE),
        panels=panels,
        bars=f"{unit}/s",
        good=not notices,
    )


_NOTE = (
    "±: how far single runs of a point are apart (their standard deviation), where it was run more than once; off: the"
    " predicted step against the measured one."
)


def _rounds(sweep: Sweep) -> str:
    """Write how often points were measured: those near the best may have more readings than the others."""
    most = max((len(p.readings) for p in sweep.points), default=0)
    return often(sweep.rounds) if most <= sweep.rounds else f"{sweep.rounds} to {most} times"


def _command(words: Sequence[str]) -> str:
    """Write a command without the Python that runs it."""
    first = words[0].rpartition("/")[2] if words else ""
    return plain(" ".join(words[1:] if first.startswith("python") else words), 200)


def knee(sweep: Sweep) -> Point | None:
    """Return the first point of one axis that comes within NEAR of the best; None of several axes, or no readings."""
    samples, best = sweep.by_samples, sweep.best
    if len(sweep.axes) != 1 or best is None:
        return None
    return next(p for p in sweep.measured if (p.rate(samples) or 0.0) >= (1 - NEAR) * (best.rate(samples) or 0.0))


def _verdict(sweep: Sweep, samples: bool, per_s: str) -> tuple[str, str]:
    best = sweep.best
    if best is None:
        return "No point was measured.", ""
    worst = min(sweep.measured, key=lambda p: p.rate(samples) or 0.0)
    high, low = (p.rate(samples) or 0.0 for p in (best, worst))
    if high <= low * (1 + NEAR):
        return f"Nothing to gain: all points are within {formatting.percent(NEAR)} of {digits(high)} {per_s}.", ""
    gain, rivals, turn = sweep.gain(best, worst), sweep.rivals, knee(sweep)
    if worst in rivals:
        apart, runs = (formatting.percent(x) for x in (high / low - 1, max(p.spread or 0.0 for p in sweep.measured)))
        return f"Undecided: the points are {apart} apart, and the runs of one point scatter by {runs}.", _MORE
    between = "" if gain.low is None or gain.high is None else f" ({gain.low:.2f} to {gain.high:.2f})"
    times = f"{formatting.times(high / low)}{between} those of {_named(worst)}"
    first = f"{_named(best)} is the best: {digits(high)} {per_s}, {times}."
    if rivals:
        return first, f"Not told apart from it: {few([_named(p) for p in rivals], 4)}. {_MORE}"
    if gain.low is None:
        return first, "Each point was measured once: how much runs differ is not known."
    if turn is None or turn is best:
        return first, ""
    near = digits(turn.rate(samples) or 0.0)
    return first, f"The knee is {_named(turn)}, with {near} {per_s}: no later value gives 2 % more."


_MORE = "More --steps or --rounds would tell."


def _named(point: Point) -> str:
    return ", ".join(f"{plain(n, 40)}={plain(v, 40)}" for n, v in point.values.items())


def _row(p: Point, names: Sequence[str], samples: bool, predicted: bool) -> tuple[Any, ...]:
    values = tuple(plain(p.values.get(n, ""), 40) for n in names)
    rate, step = p.rate(samples), p.step_ns
    spread = "" if p.spread is None else formatting.percent(p.spread)
    figures: tuple[Any, ...] = (None if rate is None else float(f"{rate:.4g}"), spread, step)
    if predicted:
        off = formatting.percent(p.predicted_ns / step - 1) if p.predicted_ns and step else ""
        figures = (*figures, p.predicted_ns, off)
    return (*values, *figures, plain(p.why, 120))


def _curve(sweep: Sweep, samples: bool, per_s: str) -> tuple[Panel, ...]:
    """Return the picture: lines over one axis; over two, a line for each value of the second; else bars."""
    measured = sweep.measured
    if not measured:
        return ()
    if len(sweep.axes) == 1:
        name = sweep.axes[0].name
        with_predicted = any(p.predicted_ns for p in measured)
        rows = []
        for p in measured:
            then = _predicted_rate(p, samples) if with_predicted else None
            rows.append((p.values[name], p.rate(samples), *((then,) if with_predicted else ())))
        columns = (name, "measured", *(("predicted",) if with_predicted else ()))
        return (Panel("lines", f"{per_s.capitalize()} by {name}", tuple(rows), columns),)
    if len(sweep.axes) == 2:
        one, other = sweep.axes
        rates = {(p.values[one.name], p.values[other.name]): p.rate(samples) for p in measured}
        rows = [(v, *(rates.get((v, w)) for w in other.values)) for v in one.values]
        columns = (one.name, *(f"{other.name}={w}" for w in other.values))
        title = f"{per_s.capitalize()} by {one.name}"
        return (Panel("lines", title, tuple(rows), columns),)
    bars = tuple((_named(p), p.rate(samples)) for p in measured)
    return (Panel("bars", per_s.capitalize(), bars),)


def _predicted_rate(p: Point, samples: bool) -> float | None:
    if not p.predicted_ns:
        return None
    of = [r.samples or 0.0 for r in p.readings] if samples else [1.0]
    return 1e9 * (sum(of) / len(of)) / p.predicted_ns
