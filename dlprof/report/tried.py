"""What was tried, in words: a sentence for every report, a line an attempt, a panel for the page."""

from __future__ import annotations

from dlprof.plain import NBSP, plain
from dlprof.report import formatting
from dlprof.result import Panel
from dlprof.result.tried import Attempt, Gain, Tried

_VERDICTS = {
    "gain": "faster",
    "no_gain": "no gain",
    "slower": "slower",
    "unclear": "not clear",
    "not_counted": "not counted",
    "not_tried": "not tried",
}


def sentence(tried: Tried) -> str:
    """Say what the trial found: "Tried: loader.num_workers=4: 1.41 × measured (1.38 to 1.44), 1.44 × predicted."."""
    best = tried.best
    if best is not None and best.measured is not None:
        predicted = f", {formatting.times(best.predicted)} predicted" if best.predicted else ""
        changes = "".join(f"; {text}" for text in (changes_numbers(best), losses(best)) if text)
        gain = measured(best.measured, f" measured{of_start(best)}")
        return f"Tried: {plain(best.words, 200)}: {gain}{predicted}{changes}."
    if tried.state == "failed":
        return f"Tried, but the job did not run again: {plain(tried.why, 300)}."
    ran = [a for a in tried.attempts if a.measured is not None]
    if not ran:
        return (
            "Tried: nothing, as no change could be set from outside." if tried.state == "complete" else _unknown(tried)
        )
    if tried.unclear or tried.state != "complete":
        return _unknown(tried)
    return f"Tried: nothing to gain from {formatting.counted(len(ran), 'change')}: none made the job 2{NBSP}% faster."


_LOSSES = {
    "": "",
    "equal": "its losses are the same, bit for bit",
    "within": "its losses differ no more than by chance",
    "differ": "its losses differ more than by chance",
}


def losses(attempt: Attempt) -> str:
    """Say whether the losses are as without a change; "" where they were not compared."""
    return _LOSSES[attempt.losses]


def changes_numbers(attempt: Attempt) -> str:
    """Say that a change has the job compute other numbers; "" where it does not."""
    return "the job then computes other numbers" if attempt.numerics else ""


def _unknown(tried: Tried) -> str:
    """Say that nothing was found to be faster, why the trial ended early, and which changes it could not judge."""
    ended = {"interrupted": "; the trial was interrupted", "out_of_time": "; the trial ran out of time"}
    left = [a.words for a in tried.attempts if a.verdict in ("unclear", "not_tried") and not a.numerics]
    what = f"; not clear or not tried: {plain(', '.join(left), 300)}" if left else ""
    return f"Tried: nothing was found to be faster{ended.get(tried.state, '')}{what}."


def of_start(attempt: Attempt) -> str:
    """Say that a gain is that of the start alone; "" where it is not."""
    return " of the start" if attempt.of == "start" else ""


def measured(gain: Gain, what: str = "") -> str:
    """Write a gain with its interval: "1.41 × measured (1.38 to 1.44)"."""
    return f"{_ratio(gain.ratio)}{NBSP}×{what} ({_interval(gain) or 'once'})"


def _interval(gain: Gain) -> str:
    return "" if gain.low is None or gain.high is None else f"{_ratio(gain.low)} to {_ratio(gain.high)}"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value < 100 else "over 100"


def row(attempt: Attempt) -> str:
    """Say what one attempt found."""
    parts = [_VERDICTS[attempt.verdict]]
    if attempt.measured is not None:
        parts.append(measured(attempt.measured, of_start(attempt)))
    if attempt.predicted is not None:
        parts.append(f"{formatting.times(attempt.predicted)} predicted")
    if attempt.epochs is not None:
        parts.append(f"{measured(attempt.epochs)} over whole epochs")
    if attempt.verdict != "not_tried":
        parts += [text for text in (changes_numbers(attempt), losses(attempt)) if text]
    parts += [plain(attempt.why, 300)] if attempt.why else []
    return f"{plain(attempt.words, 200)}: {', '.join(parts)}"


def panel(tried: Tried) -> Panel:
    """Return what was tried as a table."""
    rows = []
    for attempt in (*tried.attempts, *tried.combinations):
        gain = attempt.measured
        rows.append(
            (
                attempt.words,
                _VERDICTS[attempt.verdict],
                None if gain is None else gain.ratio,
                "" if gain is None else _interval(gain),
                attempt.predicted,
                attempt.before_ns,
                attempt.after_ns,
                "; ".join(
                    filter(None, (attempt.why or changes_numbers(attempt), of_start(attempt).strip(), losses(attempt)))
                ),
            )
        )
    columns = ("change", "answer", "measured_times", "95 % interval", "predicted_times", "before_ns", "after_ns", "why")
    steps = formatting.counted(tried.steps, "steady step")
    note = f"{formatting.counted(tried.runs, 'run')} of {steps} each, with and without the changes in turn."
    return Panel("table", "What was tried", tuple(rows), columns, note=note if tried.runs else "")
