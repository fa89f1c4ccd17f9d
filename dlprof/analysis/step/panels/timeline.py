"""One traced step, a lane a thread or stream, and the slowest one; arrows show which rank waits for which."""

from __future__ import annotations

import pandas as pd

from dlprof.analysis.communication.matching import bare_waits
from dlprof.analysis.engine import Frame, Maybe, maybe, needs
from dlprof.analysis.panel import MOST_RANKS, Picture, rows
from dlprof.analysis.step.step_timeline import excerpt
from dlprof.errors import NotMeasured
from dlprof.result import Panel
from dlprof.units import count, duration

# A step so much longer than the middle one is drawn, too.
SLOW = 1.1

# Waiting that is drawn within communication, and that arrows lead to: from these shares of the step on, the longest.
LEAST_WAIT, LEAST_ARROW = 0.005, 0.02
MOST_WAITS, MOST_ARROWS = 200, 16

Arrow = tuple[float, str, str, str]

_TITLES = {"middle": "One traced step (step {})", "slowest": "The slowest traced step (step {})"}


def draw(excerpt: Frame = needs(excerpt), bare_waits: Maybe[Frame] = maybe(bare_waits)) -> list[Panel]:
    """Draw what ran in one traced step of a few ranks, and in the slowest one."""
    if not len(excerpt):
        raise NotMeasured("nothing ran in the traced step")
    panels = []
    for shown, title in _TITLES.items():
        mine = _same_step(excerpt, shown)
        if len(mine):
            few, of = mine["rank"].nunique(), excerpt["rank"].nunique()
            note = (
                f"The slowest of {count(few, 'rank')} of {of}; the other ranks had another slowest step."
                if few < of
                else ""
            )
            panels.append(_panel(bare_waits.or_none(), mine, title, note))
    return panels


def _same_step(frame: pd.DataFrame, shown: str) -> pd.DataFrame:
    """Return the rows of one step: of the slowest the one that most ranks have; none where it is like the others."""
    mine = frame[frame["shown"] == shown]
    if shown == "slowest" and len(mine):
        mine = mine[mine["step"] == mine.groupby("step")["rank"].nunique().idxmax()]
        middle = frame[frame["shown"] == "middle"].groupby("rank")["step_ns"].first()
        if not (mine["step_ns"] >= SLOW * mine["rank"].map(middle)).any():
            return mine.iloc[:0]
    return mine


def _panel(bare_waits: pd.DataFrame | None, frame: pd.DataFrame, title: str, note: str) -> Panel:
    shown, left = _few(frame)
    frame = frame[frame["rank"].isin(shown)]
    waits, ahead = _waits(bare_waits, frame)
    early = frame["rank"].map(ahead).fillna(0).astype("int64")
    frame = frame.assign(begin_ns=frame["begin_ns"] - early, start_ns=frame["start_ns"] - early)
    begins = frame.groupby("rank")["begin_ns"].first()
    # One clock where the ranks' steps begin within a step of each other; else each rank from its own beginning.
    together = begins.max() - begins.min() <= (frame["start_ns"] - frame["begin_ns"]).max()
    zero = begins.min() if together else frame["rank"].map(begins)
    frame = frame.assign(at=frame["start_ns"] - zero, lane=_lanes(frame))
    drawn = pd.concat([frame, _waiting(frame, waits)])[["lane", "at", "dur_ns", "name", "category"]]
    arrows = _arrows(frame, waits, int(begins.min())) if together else ()
    notes = [note, left]
    if not together:
        notes.append("Each rank from its own beginning: their clocks differ.")
    elif arrows:
        notes.append("Arrows lead from the rank that came last to a collective to those that had waited for it.")
    named = title.format(int(frame["step"].iloc[0]))
    return Panel("timeline", named, rows(drawn), unit="ns", note=" ".join(filter(None, notes)), arrows=arrows)


def _lanes(frame: pd.DataFrame) -> pd.Series[str]:
    return "rank " + frame["rank"].astype("str") + " · " + frame["lane"]


def _waits(bare_waits: pd.DataFrame | None, frame: pd.DataFrame) -> tuple[pd.DataFrame, dict[int, int]]:
    """Return whom the ranks waited for in the step, on clocks brought together, and what each clock is ahead by, ns.

    Columns: rank, by, begin_ns, end_ns, waited_ns (of it with no computation); the longest of those that can be seen.
    Nothing where it is not known.
    """
    columns = ["rank", "by", "begin_ns", "end_ns", "waited_ns"]
    if bare_waits is None:
        return pd.DataFrame(columns=columns, dtype="int64"), {}
    pairs = bare_waits[bare_waits["step"] == frame["step"].iloc[0]]
    pairs = pairs.assign(begin_ns=pairs["start_ns"] - pairs["offset_ns"])
    pairs = pairs.assign(end_ns=pairs["begin_ns"] + pairs["wait_ns"])
    shown = pairs["rank"].isin(frame["rank"].unique()) & (pairs["wait_ns"] >= LEAST_WAIT * frame["step_ns"].max())
    longest = pairs.loc[shown & (pairs["rank"] != pairs["by"]), columns].nlargest(MOST_WAITS, "waited_ns")
    return longest, dict(zip(pairs["rank"].tolist(), pairs["offset_ns"].tolist(), strict=True))


def _waiting(frame: pd.DataFrame, waits: pd.DataFrame) -> pd.DataFrame:
    """Return the waiting within the communication that is drawn, to be drawn upon it."""
    exchanges = frame.loc[frame["category"] == "communication", ["rank", "lane", "at", "start_ns", "dur_ns"]]
    both = exchanges.merge(waits, on="rank")
    early = (both["begin_ns"] - both["start_ns"]).clip(lower=0)
    dur = (both["end_ns"] - both["start_ns"]).clip(upper=both["dur_ns"]) - early
    names = "waits for rank " + both["by"].astype("str")
    both = both.assign(at=both["at"] + early, dur_ns=dur, name=names, category="waiting")
    found: pd.DataFrame = both[dur >= LEAST_WAIT * frame["step_ns"].max()]
    return found


def _arrows(frame: pd.DataFrame, waits: pd.DataFrame, zero: int) -> tuple[Arrow, ...]:
    """Point from whom a rank waited for to it, where and when the waiting ended."""
    lanes = _communicating(frame)
    long = waits["by"].isin([*lanes]) & (waits["waited_ns"] >= LEAST_ARROW * frame["step_ns"].max())
    found = waits[long].head(MOST_ARROWS).sort_values("end_ns", kind="stable")
    return tuple(
        (int(end) - zero, lanes[by], lanes[rank], f"rank {rank} had waited {duration(waited)} for rank {by}")
        for rank, by, _, end, waited in found.itertuples(index=False)
    )


def _communicating(frame: pd.DataFrame) -> dict[int, str]:
    """Return the lane of each rank in which it communicates most; its first one, where it does not."""
    exchanging = frame["dur_ns"].where(frame["category"].isin(("communication", "pipeline_bubble")), 0)
    most = exchanging.groupby([frame["rank"], frame["lane"]], sort=False).sum().groupby(level=0).idxmax()
    return dict(most.tolist())


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


PICTURE = Picture(draw)
