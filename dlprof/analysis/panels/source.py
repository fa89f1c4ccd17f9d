"""The time by line of the user's files, in each phase of the step."""

from __future__ import annotations

from dlprof.analysis.engine import Frame, needs
from dlprof.analysis.host.stacks import DOING
from dlprof.analysis.panel import Picture, table
from dlprof.analysis.source.line_shares import line_shares, over_ranks
from dlprof.errors import NotMeasured
from dlprof.result import Panel

# Seen less often than this, a line is there by chance, or does not matter.
LEAST_SEEN = 5


LEAST_SHARE = 0.01


MOST_LINES = 12  # of a phase


_COLUMNS = {
    "doing": "while",
    "place": "line",
    "function": "function",
    "library": "in library code",
    "share": "phase_share",
    "of_all": "total_share",
}


def draw(line_shares: Frame = needs(line_shares)) -> list[Panel]:
    """Show in which lines of the user's files the training thread and the loader's workers were seen."""
    lines = over_ranks(line_shares)
    totals = lines.groupby("doing")["of"].first()
    whole = {True: int(totals.get("worker", 0)), False: int(totals.drop("worker", errors="ignore").sum())}
    lines = lines[lines["own"].astype(bool)]
    lines = lines[lines["samples"] >= (LEAST_SHARE * lines["of"]).clip(lower=LEAST_SEEN)]
    if not len(lines):
        raise NotMeasured("no line of the user's was seen often enough")
    # The phase that takes most of the thread comes first, the workers last.
    order = lines["doing"].map(totals).mask(lines["doing"] == "worker", 0)
    lines = lines.assign(order=order).sort_values(["order", "doing", "samples"], ascending=[False, True, False])
    lines = lines[lines.groupby("doing").cumcount() < MOST_LINES]
    lines = lines.assign(
        place=lines["file"].astype(str) + ":" + lines["line"].astype(str),
        of_all=lines["samples"] / (lines["doing"] == "worker").map(whole),
        doing=lines["doing"].map(DOING),
    )
    note = (
        f"{whole[False]:,} stacks of the training thread were seen"
        + (f" and {whole[True]:,} of loader workers" if whole[True] else "")
        + ". Each counts for the innermost line of your files that is in it, with what that line called."
        " The total is that of the training thread's stacks, or of the workers'."
    )
    return [table("Time by line of your files", lines, _COLUMNS, note=note)]


PICTURE = Picture(draw)
