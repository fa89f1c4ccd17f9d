"""A scaling study in words: speed-up, efficiency, what grows with the ranks, and what more of them would give."""

from __future__ import annotations

from typing import Any

from dlprof.plain import plain
from dlprof.report import formatting, looks
from dlprof.report.compare.summary import Summary
from dlprof.result import CATEGORIES, Panel
from dlprof.result.scale import TRANSFER, WAITING, Fit, Prediction, Size, Study
from dlprof.units import count, digits, duration

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


def summary(study: Study) -> Summary:
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
