"""A comparison of two runs as text for a terminal: faster or slower, as predicted or not, and by what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dlprof.analysis.compare.comparison import (
    Comparison,
    Difference,
    FindingChange,
    Prediction,
    Setting,
    Verdict,
    WorkDifference,
)
from dlprof.plain import NBSP, plain
from dlprof.report import formatting, looks
from dlprof.report.terminal import NARROWEST, columns, legend, painter, stripe, wrap
from dlprof.result import Result, TimePart
from dlprof.units import MINUS, UNKNOWN, digits

MOST_REACHED = 3.0  # of a predicted gain; of a gain of next to nothing any other is a large multiple
MOST_ROWS = 6  # of operators, kernels, collectives and settings; the page has them all

# What became of a finding, in the order in which a reader asks.
STATES = {
    "gone": "gone",
    "new": "new",
    "more": "costs more",
    "less": "costs less",
    "same": "still there",
    "unknown": "not known",
}
CAME_TRUE = {
    "better": "better than predicted",
    "as_predicted": "as predicted, within noise",
    "partly": "less than predicted",
    "missed": "no gain",
    "unknown": "what of it they gained is not known, as the code changed too",
}


def render(c: Comparison, width: int = 80, colour: bool = False) -> str:
    """Return the comparison as lines of at most `width` columns (40 at least), in 256 colours on request."""
    width = max(width, NARROWEST)
    paint = painter(colour)
    lines = []
    for letter, result in (("A", c.a), ("B", c.b)):
        lines += wrap(f"{letter}  {which(result)}", width, "", "   ")
    first, second = headline(c)
    lines += ["", *(paint(line, "1") for line in wrap(first, width, "  "))]
    lines += wrap(second, width, "  ") if second else []
    for warning in (*c.doubts, *(f"not compared: {why}" for why in c.not_compared)):
        lines += [paint(line, "33") for line in wrap(warning, width, "  ! ", "    ")]
    if c.time:
        lines += ["", *_bars(c, width, colour), ""]
        lines += _table([(looks.look(d.name).name, d) for d in notable(c.time)], width)
        quiet = [looks.look(d.name).name.lower() for d in c.time if d not in notable(c.time)]
        lines += wrap(f"no difference, or within noise: {', '.join(quiet)}", width, "  ", "    ") if quiet else []
    spread = {d.name: d for d in c.quantiles}
    if "50 %" in spread and "95 %" in spread:
        median, high = (f"{_cell(d.a_ns)} → {_cell(d.b_ns)}" for d in (spread["50 %"], spread["95 %"]))
        lines += wrap(f"single steps: median {median}, 95th percentile {high}", width, "  ", "    ")
    if c.findings:
        lines += ["", *_findings(c.findings, width)]
    work = (("ranges", c.ranges), ("operators", c.operators), ("kernels", c.kernels), ("collectives", c.exchanges))
    for what, rows in work:
        chosen = changed(rows)[:MOST_ROWS]
        if chosen:
            differences = [(w, d) for w in chosen for d in (w.time, w.wait) if d is not None and d.verdict != "noise"]
            names = [d.name for _, d in differences]
            names = formatting.kernels(names) if what == "kernels" else names
            lines += ["", f"  {what} that changed most, a step"]
            lines += _table(
                [(plain(n, 80) + times_called(w), d) for n, (w, d) in zip(names, differences, strict=True)], width
            )
    if c.settings:
        lines += ["", "  settings that differ"]
        for s in c.settings[:MOST_ROWS]:
            lines += wrap(setting(s), width, "    ", "      ")
        left = len(c.settings) - MOST_ROWS
        lines += [f"    … and {left} more"] if left > 0 else []
    return "\n".join(line.replace(NBSP, " ").rstrip() for line in lines) + "\n"


def which(result: Result) -> str:
    """Name a run with its devices and steps."""
    path, name = plain(result.run.path, 60), formatting.name(result)
    return " · ".join((path, *(() if name == path else (name,)), formatting.devices(result), formatting.steps(result)))


def headline(c: Comparison) -> tuple[str, str]:
    """Return the verdict as one sentence, and one on the prediction; "" where there was none."""
    whole = ""
    if c.whole is not None and c.whole.a_ns and c.whole.b_ns and verdict_of(c) in ("faster", "slower"):
        a, b = (formatting.duration(ns) for ns in (c.whole.a_ns, c.whole.b_ns))
        ratio = c.whole.a_ns / c.whole.b_ns
        factor = f"{formatting.times(ratio)} faster" if ratio >= 1 else f"{formatting.times(1 / ratio)} as long"
        whole = f" {c.whole.name[0].upper()}{c.whole.name[1:]}: {factor} ({b} instead of {a})."
    return _verdict(c) + whole, came_true(c.prediction, c.step) if c.prediction and c.step else ""


def verdict_of(c: Comparison) -> Verdict:
    """Return whether B is faster or slower: by samples a second where steps do different work, else by the step."""
    if c.other_work:
        return c.rates.verdict if c.rates else "unknown"
    return c.step.verdict if c.step else "unknown"


def _verdict(c: Comparison) -> str:
    d = c.step
    if d is None or d.a_ns is None or d.b_ns is None:
        return "The steps of these runs cannot be compared."
    a, b = formatting.duration(d.a_ns), formatting.duration(d.b_ns)
    if c.other_work:
        return _of_other_work(c, a, b)
    if d.verdict == "noise":
        return f"No difference beyond noise: a step takes {a} in A and {b} in B."
    if d.verdict == "unknown":
        return f"A step takes {a} in A and {b} in B; how much of that is noise is not known."
    factor = formatting.times(d.a_ns / d.b_ns if d.verdict == "faster" else d.b_ns / d.a_ns)
    if d.verdict == "faster":
        return f"B is {factor} faster: a step takes {b} instead of {a}."
    return f"B takes {factor} as long: a step takes {b} instead of {a}."


def _of_other_work(c: Comparison, a: str, b: str) -> str:
    """Return the verdict on runs whose steps (which take a and b) do different work: by samples a second."""
    r = c.rates
    if r is None:
        return f"A step takes {a} in A and {b} in B, but they do different work: {c.other_work[0]}."
    rank = " and rank" if r.of == "rank" else ""
    per_s = [f"{digits(n)} {r.unit} a second{rank}" for n in (r.a_per_s, r.b_per_s)]
    steps = f"a step takes {a} in A and {b} in B, of {digits(r.a_per_step)} and {digits(r.b_per_step)} {r.unit}"
    if r.verdict == "noise":
        return f"No difference beyond noise: {per_s[0]} in A and {digits(r.b_per_s)} in B ({steps})."
    if r.verdict == "unknown":
        return f"A trains on {per_s[0]}, B on {digits(r.b_per_s)}; how much of that is noise is not known ({steps})."
    if r.verdict == "faster":
        return f"B is {formatting.times(r.ratio)} faster: {per_s[1]} instead of {digits(r.a_per_s)} ({steps})."
    return f"B takes {formatting.times(1 / r.ratio)} as long: {per_s[1]} instead of {digits(r.a_per_s)} ({steps})."


def came_true(prediction: Prediction, step: Difference) -> str:
    """Say what was predicted and measured: "Predicted 215 ms, measured 244 ms: ..."."""
    least, most = formatting.duration(prediction.least_ns), formatting.duration(prediction.most_ns)
    predicted = least if least == most else f"{least} to {most}"
    why = f" for {', '.join(prediction.changed)}" if prediction.changed else ""
    measured = f"{formatting.duration(prediction.measured_ns)}{margin(step)}"
    share = f", {formatting.percent(prediction.reached or 0.0)} of the gain" if came_near(prediction) else ""
    slower = prediction.verdict == "missed" and step.verdict == "slower"
    how = f"{'slower instead' if slower else CAME_TRUE[prediction.verdict]}{share} (predicted by {prediction.basis})"
    return f"Predicted {predicted}{why}, measured {measured}: {how}."


def came_near(prediction: Prediction) -> bool:
    """Return whether the share of the predicted gain that was measured is worth a number; −1250 % is not."""
    return prediction.reached is not None and 0 < prediction.reached <= MOST_REACHED and prediction.verdict != "missed"


def margin(d: Difference) -> str:
    """Write twice the standard error of a difference as " ± 1.2 ms"; "" where it is not known."""
    return f" ±{NBSP}{formatting.duration(2 * d.noise_ns)}" if d.noise_ns else ""


def change(d: Difference) -> str:
    """Write a difference as "−64.8 ms ± 0.5 ms", with a note where it is within noise."""
    if d.ns is None:
        return UNKNOWN
    if abs(d.ns) < d.least_ns or not d.ns:
        return "within noise"
    said = {"noise": ", within noise", "unknown": ", noise not known"}.get(d.verdict, "")
    return f"{MINUS if d.ns < 0 else '+'}{formatting.duration(abs(d.ns))}{margin(d)}{said}"


def notable(time: Iterable[Difference]) -> list[Difference]:
    """Return the parts of the step that differ by at least `least_ns`, the largest difference first."""
    return sorted((d for d in time if d.ns and abs(d.ns) >= d.least_ns), key=lambda d: -abs(d.ns or 0.0))


def changed(rows: Iterable[WorkDifference]) -> list[WorkDifference]:
    """Return the rows that differ beyond noise in time or waiting, in their order."""
    return [w for w in rows if w.time.verdict != "noise" or (w.wait is not None and w.wait.verdict != "noise")]


def times_called(w: WorkDifference) -> str:
    """Write how often something is called a step, " 12 → 14 ×", where that differs; "" elsewhere."""
    a, b = (UNKNOWN if n is None else digits(n) for n in (w.a_calls, w.b_calls))
    return "" if a == b else f" ({a} → {b} ×)"


def setting(s: Setting) -> str:
    """Write a setting that differs: "Loader · num workers: 0 → 6"."""
    a, b = (plain(value, 60) or "none" for value in (s.a, s.b))
    return f"{plain(s.section, 40)} · {plain(s.name, 60)}: {a} → {b}"


def mean_parts(result: Result) -> dict[str, TimePart]:
    """Return the parts of the mean step as the mean over the ranks: category → part."""
    n = len({p.rank for p in result.time})
    sums: dict[str, float] = {}
    for p in result.time:
        sums[p.category] = sums.get(p.category, 0.0) + p.ns / n
    total = sum(sums.values()) or 1.0
    return {c: TimePart(-1, c, ns, ns / total) for c, ns in sums.items()}


def _bars(c: Comparison, width: int, colour: bool) -> list[str]:
    """Return both mean steps as bars on one scale, and their legend."""
    parts = {letter: mean_parts(result) for letter, result in (("A", c.a), ("B", c.b))}
    totals = {letter: sum(p.ns for p in of.values()) for letter, of in parts.items()}
    most, longest = max(totals.values()), min(60, width - 16)
    lines = []
    for letter, of in parts.items():
        length = round(longest * totals[letter] / most) if most > 0 else 0
        lines.append(f"  {letter}  {stripe(of, length, colour)} {formatting.duration(totals[letter])}")
    return [*lines, *legend((category for of in parts.values() for category in of), width, colour)]


def _table(rows: Sequence[tuple[str, Difference]], width: int) -> list[str]:
    """Return name, A, B and the difference of each row, in columns where they fit."""
    cells = [(n, _cell(d.a_ns), _cell(d.b_ns), change(d)) for n, d in rows]
    if not cells:
        return []
    longest, a, b, diff = (max(map(columns, column)) for column in zip(*cells, strict=True))
    free = width - a - b - diff - 11
    if free < 12:
        written = (f"{name}: {of_a} → {of_b}, {differs}" for name, of_a, of_b, differs in cells)
        return [line for text in written for line in wrap(text, width, "    ", "      ")]
    column = min(free, longest)
    return [f"    {_fitted(name, column)}  {of_a:>{a}} → {of_b:>{b}}  {differs}" for name, of_a, of_b, differs in cells]


def _fitted(text: str, width: int) -> str:
    cut = text if columns(text) <= width else text[: max(width - 1, 1)] + "…"
    return cut + " " * (width - columns(cut))


def _cell(ns: float | None) -> str:
    return UNKNOWN if ns is None else formatting.duration(ns)


def _findings(findings: Iterable[FindingChange], width: int) -> list[str]:
    lines = []
    for f in findings:
        figures = " → ".join(formatting.duration(ns) if ns is not None else "none" for ns in (f.a_ns, f.b_ns))
        why = f" ({plain(f.why, 120)})" if f.state == "unknown" else ""
        lines += wrap(f"{STATES[f.state]:<11} {plain(f.id, 30)}  {figures}{why}", width, "  ", "              ")
    return lines
