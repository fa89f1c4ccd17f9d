"""A scaling study and a sweep in words.

Of a study speed-up, efficiency, what grows with the ranks, and what more of them would give; of a sweep the curve, its
knee, and the predicted curve beside the measured one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dlprof.plain import plain
from dlprof.report import formatting, looks
from dlprof.report.summary import Summary
from dlprof.result import CATEGORIES, Panel
from dlprof.result.scale import TRANSFER, WAITING, Fit, Prediction, Size, Study
from dlprof.result.sweep import NEAR, Point, Sweep
from dlprof.units import count, digits, duration, few, often

# A part that grows by less than this share of a step is not named.
NOTABLE = 0.01

# How good predictions are was measured up to so many times the ranks of the largest measured size.
FAR = 8

# The parts of a step, in the order in which they are drawn.
_ORDER = (*CATEGORIES[:2], WAITING, *CATEGORIES[2:])

_MODES = {
    "weak": "weak scaling: the batch grows with the ranks",
    "strong": "strong scaling: all ranks share one batch",
    "mixed": "the batch grows neither with the ranks nor stays as it is",
    "": "",
}


def of_study(study: Study) -> Summary:
    """Return the summary of a study."""
    unit = "samples" if all(s.samples for s in study.sizes) else "steps"
    sizes = study.sizes
    left_out = tuple(f"{plain(name, 80)} is left out: {plain(why, 400)}" for name, why in study.left_out)
    notices = (*left_out, *study.doubts, *([f"Nothing is predicted: {study.why}."] if study.why else []))
    mode = _MODES[study.mode]
    return Summary(
        name="scale",
        headline=_headline(study, unit),
        second=" ".join(filter(None, (_grows(study), _predicted(study)))),
        lede=" · ".join(filter(None, (plain(study.name, 80), _ranks(sizes), mode))),
        notices=notices,
        tiles=_tiles(study, unit),
        table=_table(study, unit),
        panels=_panels(study, unit),
        bars=f"{unit}/s",
        good=not left_out and not study.why,
    )


def _ranks(sizes: tuple[Size, ...]) -> str:
    runs = sum(len(s.runs) for s in sizes)
    numbers = ", ".join(str(s.ranks) for s in sizes)
    return f"on {numbers} {'rank' if numbers == '1' else 'ranks'}, {count(runs, 'run')}"


def _rate(size: Size, unit: str) -> float:
    return size.work_per_s if unit == "samples" else 1e9 / size.step_ns


def _headline(study: Study, unit: str) -> str:
    first, last = study.sizes[0], study.sizes[-1]
    if last is first:
        return f"{count(first.ranks, 'rank')}: {digits(_rate(first, unit))} {unit} a second. One size is no scaling."
    of = "samples a second" if unit == "samples" else "work a second, if each rank's step stays the same work,"
    return (
        f"{last.ranks} ranks do {formatting.times(last.speedup)} the {of} of {first.ranks}:"
        f" an efficiency of {_efficiency(last)}."
    )


def _efficiency(s: Size) -> str:
    margin = "" if s.efficiency_noise is None else f" ± {formatting.percent(2 * s.efficiency_noise)}"
    return f"{formatting.percent(s.efficiency)}{margin}"


def growth(study: Study) -> dict[str, float]:
    """Return by how much each part takes longer for the same work at the largest size than at the smallest, ns a step.

    The steps of a strong study are brought to the work of the largest size's.
    """
    first, last = study.sizes[0], study.sizes[-1]
    work = 1.0
    if first.samples and last.samples:
        work = (last.samples / last.ranks) / (first.samples / first.ranks)
    return {c: last.parts.get(c, 0.0) - work * first.parts.get(c, 0.0) for c in {*first.parts, *last.parts}}


def _grows(study: Study) -> str:
    if len(study.sizes) < 2:
        return ""
    last = study.sizes[-1]
    more = sorted(((ns, c) for c, ns in growth(study).items() if ns >= NOTABLE * last.step_ns), reverse=True)
    if not more:
        return "No part of the step grows by 1 % of it."
    named = [
        f"{'transfers between ranks' if c == TRANSFER else looks.look(c).name.lower()} by {duration(ns)}"
        f" ({formatting.percent(ns / last.step_ns)} of a step)"
        for ns, c in more[:3]
    ]
    return f"What grows: {', '.join(named)}."


def first_prediction(study: Study) -> Prediction | None:
    """Return the prediction that the summary names: for the most ranks, up to FAR × those that were measured."""
    near = [p for p in study.predictions if p.ranks <= FAR * study.sizes[-1].ranks]
    return near[-1] if near else None


def _predicted(study: Study) -> str:
    p = first_prediction(study)
    if p is None:
        return ""
    return f"On {p.ranks:,} ranks {formatting.percent(p.efficiency)} is predicted ({_interval(p)})."


def _interval(p: Prediction) -> str:
    return f"{formatting.percent(p.efficiency_low)} to {formatting.percent(p.efficiency_high)}"


def _tiles(study: Study, unit: str) -> tuple[tuple[str, str], ...]:
    last = study.sizes[-1]
    tiles = [
        (digits(_rate(last, unit)), f"{unit} a second on {last.ranks}"),
        (formatting.percent(last.efficiency), "efficiency"),
    ]
    if p := first_prediction(study):
        tiles.append((formatting.percent(p.efficiency), f"predicted on {p.ranks:,}"))
    if study.check is not None:
        tiles.append((_off(study.check, last), f"off, {last.ranks} from the smaller sizes"))
    return tuple(tiles)


def _off(check: Prediction, measured: Size) -> str:
    return f"{100 * (check.step_ns / measured.step_ns - 1):+.1f} %"


def _table(study: Study, unit: str) -> Panel:
    rows = []
    for s in study.sizes:
        named = f"{s.ranks} on {s.hosts} hosts" if s.hosts > 1 else str(s.ranks)
        step = s.step_ns, "" if s.noise_ns is None else formatting.percent(2 * s.noise_ns / s.step_ns)
        rows.append(
            (
                named, float(f"{_rate(s, unit):.4g}"), s.speedup, _efficiency(s), *step,
                None if s.mfu is None else formatting.percent(s.mfu),
                None if s.joules is None else float(f"{s.joules:.3g}"),
            )
        )  # fmt: skip
    note = (
        "±: twice the standard error, with what runs of one size differ by. Efficiency: work a second and rank, over"
        f" that of {count(study.sizes[0].ranks, 'rank')}."
    )
    if study.check is not None:
        last = study.sizes[-1]
        note += (
            f" Predicted from the smaller sizes, the step on {last.ranks} ranks is off by {_off(study.check, last)}."
        )
    columns = ("ranks", f"{unit}/s", "speed-up_times", "efficiency", "step_ns", "±", "MFU", "J a sample")
    return Panel("table", "The measured sizes", tuple(rows), columns, note=note)


def _row(p: Prediction) -> tuple[Any, ...]:
    share = formatting.percent(p.efficiency)
    return (f"{p.ranks:,}", p.step_ns, p.low_ns, p.high_ns, share, _interval(p), p.transfer_ns, p.wait_ns)


def _panels(study: Study, unit: str) -> tuple[Panel, ...]:
    found = [_throughput(study, unit), _efficiencies(study), _stack(study)]
    if study.predictions:
        rows = tuple(_row(p) for p in study.predictions)
        columns = ("ranks", "step_ns", "95 % from_ns", "to_ns", "efficiency", "95 %", "transfer_ns", "waiting_ns")
        found.append(Panel("table", "Predicted for more ranks", rows, columns, note=_PREDICTED))
    if study.fits:
        fits = tuple(_fit(f) for f in study.fits)
        named = ("collective", "on", "start_ns", "each hop_ns", "hops", "bus, a second_bytes", "off by")
        found.append(Panel("table", "What a collective takes, fitted to all sizes", fits, named, note=_FITTED))
    return tuple(p for p in found if p is not None)


_PREDICTED = (
    "From the largest size: collectives of groups that grow as fitted, the latest of more ranks, and all else as it is."
    " Transfer and waiting are what a step shows of them."
)
_FITTED = (
    "start + hops × each hop + bytes on the bus ÷ bandwidth; hops of n ranks: n − 1 in a ring, log2 n in a tree,"
    " whichever fits better."
)


def _fit(f: Fit) -> tuple[Any, ...]:
    band = 1e9 / f.ns_per_byte if f.ns_per_byte else None
    on = "several hosts" if f.several_hosts else "one host"
    return (f.collective, on, f.start_ns, f.hop_ns if f.hops else None, f.hops, band, formatting.percent(f.off))


def _throughput(study: Study, unit: str) -> Panel | None:
    """Return the curve that papers show: measured, predicted, and ideal, without any loss."""
    first = study.sizes[0]
    if unit != "samples":
        return None
    each = _rate(first, unit) / first.ranks
    rows: list[tuple[Any, ...]] = [(str(s.ranks), _rate(s, unit), None, each * s.ranks) for s in study.sizes]
    last = study.sizes[-1]
    rows[-1] = (*rows[-1][:2], _rate(last, unit) if study.predictions else None, rows[-1][3])
    # Of thousands of ranks the others would be a flat line.
    near = [p for p in study.predictions if p.ranks <= FAR * last.ranks]
    rows += [(str(p.ranks), None, p.samples_per_s, each * p.ranks) for p in near]
    return Panel("lines", "Samples a second by ranks", tuple(rows), ("ranks", "measured", "predicted", "ideal"))


def _efficiencies(study: Study) -> Panel:
    rows: list[tuple[Any, ...]] = [(str(s.ranks), 100 * s.efficiency, None, None, None) for s in study.sizes]
    last = study.sizes[-1]
    if study.predictions:
        at = 100 * last.efficiency
        rows[-1] = (str(last.ranks), at, at, at, at)
    rows += [
        (str(p.ranks), None, 100 * p.efficiency, 100 * p.efficiency_low, 100 * p.efficiency_high)
        for p in study.predictions
    ]
    columns = ("ranks", "measured", "predicted", "95 % from", "95 % to")
    return Panel("lines", "Efficiency by ranks", tuple(rows), columns, unit="%")


def _stack(study: Study) -> Panel | None:
    """Return what a rank's time goes to by size: for each sample, or for each step where samples are not known."""
    by_sample = all(s.samples for s in study.sizes)
    work = {s.ranks: (s.samples or 0.0) / s.ranks if by_sample else 1.0 for s in study.sizes}
    named = [c for c in _ORDER if any(s.parts.get(c, 0.0) >= 0.002 * s.step_ns for s in study.sizes)]
    if not named or len(study.sizes) < 2:
        return None
    rows = tuple((str(s.ranks), *(s.parts.get(c, 0.0) / work[s.ranks] for c in named)) for s in study.sizes)
    of = "sample" if by_sample else "step"
    return Panel("areas", f"A rank's time for each {of}, by ranks", rows, ("ranks", *named), unit="ns")


_STATES = {
    "complete": "",
    "out_of_time": "the time was up before all points had their readings",
    "interrupted": "it was interrupted before all points had their readings",
}


def of_sweep(sweep: Sweep) -> Summary:
    """Return the of_sweep of a sweep, complete or not."""
    samples = sweep.by_samples
    unit = "samples" if samples else "steps"
    per_s = f"{unit} a second"
    measured = sweep.measured
    names = tuple(a.name for a in sweep.axes)
    predicted = any(p.predicted_ns for p in sweep.points)
    of_predicted = ("predicted_ns", "off") if predicted else ()
    columns = (*names, f"{unit}/s", "±", "step_ns", *of_predicted, "")
    rows = tuple(_point_row(p, names, samples, predicted) for p in sweep.points)
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
        table=Panel("table", "All points", rows, columns, note=_SWEEP_NOTE),
        panels=panels,
        bars=f"{unit}/s",
        good=not notices,
    )


_SWEEP_NOTE = (
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


def _point_row(p: Point, names: Sequence[str], samples: bool, predicted: bool) -> tuple[Any, ...]:
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
