"""What was tried, as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from dlprof.plain import NBSP, plain
from dlprof.report import formatting
from dlprof.report.terminal import NARROWEST, wrap
from dlprof.report.tried import losses, measured, row, sentence
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


def kept(tried: Tried, words: Sequence[str], lines: Sequence[str], width: int = 80) -> list[str]:
    """Say what of a trial to keep: what the patch changes, and what to do besides, in lines of at most `width`."""
    best = tried.best
    if best is None or best.measured is None:
        unclear = ", ".join(plain(a.words, 100) for a in tried.unclear)
        nothing = "Nothing to keep: no change was found to make the job faster."
        yet = (
            f"Nothing to keep yet: {unclear} may make the job faster. More --minutes, or a quieter machine, will tell."
        )
        return [] if tried.state == "failed" else wrap(yet if unclear else nothing, width)
    said = losses(best) or "its losses were not compared"
    made = ["", *wrap(f"Keep {plain(best.words, 300)}: {measured(best.measured)}; {said}.", width)]
    made += wrap(f"The patch changes {', '.join(map(plain, lines))}.", width) if lines else []
    made += [line for one in words for line in wrap(f"By hand: {plain(one, 400)}", width, "", "  ")]
    return [line.replace(NBSP, " ") for line in made]
