"""One traced step, a lane a thread or stream, and the slowest one beside it."""

from __future__ import annotations

import pandas as pd

from dlprof.engine import Measured
from dlprof.errors import NotMeasured
from dlprof.measures.excerpt import excerpt
from dlprof.overview import MOST_RANKS, Picture
from dlprof.result import Panel

_TITLES = {"middle": "One traced step (step {})", "slowest": "The slowest traced step (step {})"}


def draw(run: Measured) -> list[Panel]:
    """Draw what ran in one traced step of a few ranks, and in the slowest one."""
    frame = run.frame(excerpt)
    if not len(frame):
        raise NotMeasured("nothing ran in the traced step")
    return [_panel(mine, title) for shown, title in _TITLES.items() if len(mine := _same_step(frame, shown))]


def _same_step(frame: pd.DataFrame, shown: str) -> pd.DataFrame:
    """Give the rows of one step: ranks may differ in which was slowest, most of them say."""
    mine = frame[frame["shown"] == shown]
    if shown == "slowest" and len(mine):
        votes = mine.groupby("step")["rank"].nunique()
        mine = mine[mine["step"] == int(str(votes.idxmax()))]
    return mine


def _panel(frame: pd.DataFrame, title: str) -> Panel:
    shown, note = _few(frame)
    frame = frame[frame["rank"].isin(shown)]
    begins = frame.groupby("rank")["begin_ns"].first()
    # One clock where the ranks' steps begin within a step of each other; else each rank from its own beginning.
    together = begins.max() - begins.min() <= (frame["start_ns"] - frame["begin_ns"]).max()
    zero = frame["rank"].map(begins) if not together else begins.min()
    frame = frame.assign(at=frame["start_ns"] - zero)
    rows = tuple(
        (f"rank {r} · {lane}", int(at), int(dur), str(name), str(category))
        for r, lane, at, dur, name, category in zip(
            *(frame[c] for c in ("rank", "lane", "at", "dur_ns", "name", "category")), strict=True
        )
    )
    if not together:
        note += " Each rank from its own beginning: their clocks differ."
    return Panel("timeline", title.format(int(frame["step"].iloc[0])), rows, unit="ns", note=note.strip())


def _few(frame: pd.DataFrame) -> tuple[list[int], str]:
    """Choose as many ranks as can be drawn: the first, and those that communicate least, for others wait for them."""
    ranks = sorted(int(r) for r in frame["rank"].unique())
    if len(ranks) <= MOST_RANKS:
        return ranks, ""
    communicates = frame["dur_ns"].where(frame["category"] == "communication", 0).groupby(frame["rank"]).sum()
    late = [int(str(r)) for r in communicates.sort_values(kind="stable").index[: MOST_RANKS // 2]]
    first = [r for r in ranks if r not in late][: MOST_RANKS - len(late)]
    return sorted({*first, *late}), (
        f"{MOST_RANKS} of {len(ranks)} ranks: the first, and those that communicate least, for which others wait."
    )


PICTURE = Picture((excerpt,), draw)
