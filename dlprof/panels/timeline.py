"""One traced step, a lane a thread or stream."""

from __future__ import annotations

from dlprof.engine import Measured
from dlprof.errors import NotMeasured
from dlprof.measures.excerpt import excerpt
from dlprof.overview import MOST_RANKS, Picture
from dlprof.result import Panel


def draw(run: Measured) -> list[Panel]:
    """Draw what ran in one traced step of the first ranks."""
    frame = run.frame(excerpt)
    if not len(frame):
        raise NotMeasured("nothing ran in the traced step")
    shown = sorted(frame["rank"].unique())[:MOST_RANKS]
    frame = frame[frame["rank"].isin(shown)]
    begins = frame.groupby("rank")["begin_ns"].first()
    # One clock where the ranks' steps begin within a step of each other; else each rank from its own beginning.
    together = begins.max() - begins.min() <= (frame["start_ns"] - frame["begin_ns"]).max()
    zero = frame["rank"].map(begins) if not together else begins.min()
    frame = frame.assign(at=frame["start_ns"] - zero)
    rows = tuple(
        (f"rank {r} · {lane}", int(at), int(dur), str(name), str(category))
        for r, lane, at, dur, name, category in zip(
            frame["rank"], frame["lane"], frame["at"], frame["dur_ns"], frame["name"], frame["category"], strict=True
        )
    )
    step = int(frame["step"].iloc[0])
    more = len(run.ranks) - len(shown)
    note = f"The first {len(shown)} of {len(run.ranks)} ranks." if more > 0 else ""
    if not together:
        note += " Each rank from its own beginning: their clocks differ."
    return [Panel("timeline", f"One traced step (step {step})", rows, unit="ns", note=note.strip())]


PICTURE = Picture((excerpt,), draw)
