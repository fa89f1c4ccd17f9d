"""What was tried, as text for a terminal."""

from __future__ import annotations

from dlprof.plain import NBSP, plain
from dlprof.report import formatting
from dlprof.report.terminal import NARROWEST, wrap
from dlprof.report.tried import row, sentence
from dlprof.result.tried import Tried


def render(tried: Tried, width: int = 80) -> str:
    """Return what was tried as lines of at most `width` columns (40 at least)."""
    width = max(width, NARROWEST)
    lines = wrap(sentence(tried), width)
    if tried.best is not None and tried.best.before_ns is not None and tried.best.after_ns is not None:
        step = f"{formatting.duration(tried.best.before_ns)} → {formatting.duration(tried.best.after_ns)} a step"
        lines += wrap(step, width, "  ")
    for title, attempts in (("alone", tried.attempts), ("together", tried.combinations)):
        if attempts:
            lines += ["", f"  {title}" + (", against the best before" if title == "together" else "")]
        for attempt in attempts:
            lines += wrap(row(attempt), width, "    ", "      ")
    notes = (
        [f"{formatting.counted(tried.runs, 'run')} of {formatting.counted(tried.steps, 'step')}"] if tried.runs else []
    )
    notes += [f"{tried.seconds / 60:.1f}{NBSP}min"] if tried.runs else []
    if tried.state != "complete":
        notes.append({"out_of_time": "out of time", "interrupted": "interrupted", "failed": "failed"}[tried.state])
    lines += ["", *wrap(" · ".join(notes), width, "  ")] if notes else []
    for warning in tried.warnings:
        lines += wrap(plain(warning, 300), width, "  ! ", "    ")
    text = "\n".join(line.replace(NBSP, " ").rstrip() for line in lines) + "\n"
    return f"{text}\n{plain(tried.diff, keep=chr(10))}" if tried.diff else text
