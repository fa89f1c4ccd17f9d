"""Panels of communication, as data that the page draws."""

from __future__ import annotations

from dlprof.analysis.communication.bandwidth import bandwidth, exchanged, size_class
from dlprof.analysis.communication.collectives import SENT, unmatched
from dlprof.analysis.communication.recorder import rank_places, whole_calls
from dlprof.analysis.engine import Frame, needs
from dlprof.analysis.panel import Picture, table
from dlprof.result import Panel

MOST_ROWS = 40


_COLLECTIVES_COLUMNS = {
    "name": "collective",
    "ranks": "ranks",
    "class_": "size of each",
    "count": "calls a step",
    "bytes": "data a step_bytes",
    "wait_ns": "waiting_ns",
    "transfer_ns": "transfer_ns",
    "algbw": "algorithm bandwidth per second_bytes",
    "busbw": "bus bandwidth per second_bytes",
    "of_peak": "link's peak_share",
    "culprit": "last rank",
    "late": "came last in",
    "matched": "of",
}


def draw_collectives(
    exchanged: Frame = needs(exchanged), unmatched: str = needs(unmatched), bandwidth: Frame = needs(bandwidth)
) -> list[Panel]:
    """List the collectives by kind, ranks and size, the longest first; groups of as many ranks are one row."""
    known = exchanged["culprit"] >= 0
    shown = exchanged.assign(
        name=[_name(*of) for of in zip(exchanged["collective"], exchanged["groups"], strict=True)],
        class_=exchanged["size"].map(size_class),
        ranks=exchanged["ranks"].astype("Int64").where(exchanged["ranks"] > 0),
        **{name: exchanged[name].astype("Int64").where(known) for name in ("culprit", "late", "matched")},
    )
    note = (
        "Per step and rank, hidden time included. Transfer is the least time over the ranks (of what is sent, the"
        " receiver's from when both had come); bytes over it is the algorithm's bandwidth, and the bus bandwidth is"
        " what that asks of each link (nccl-tests' factors)."
    )
    if exchanged["wait_ns"].isna().any():
        note += " Not every rank's trace is here or matches: transfer may include waiting, and takes at most this long."
    if unmatched:
        note += f" Not in it: {unmatched}."
    if exchanged["of_peak"].isna().all() and bandwidth["peak"].isna().all():
        note += " What the link could carry is not known."
    if len(exchanged) > MOST_ROWS:
        note += f" The longest {MOST_ROWS} of {len(exchanged)}."
    return [table("Collectives", shown, _COLLECTIVES_COLUMNS, MOST_ROWS, note)]


def _name(kind: str, groups: int) -> str:
    if kind == SENT:
        return "send and receive" + (f" in {groups} directions" if groups > 1 else "")
    return (kind or "unknown") + (f" in {groups} groups" if groups > 1 else "")


COLLECTIVES_PICTURE = Picture(draw_collectives)


MOST = 64  # ranks that are listed


_PLACES = {"rank": "rank", "doing": "it", "what": "collective", "state": "state", "input": "sizes", "site": "at"}
_PLACES |= {"when": "since, UTC"}
_KINDS = {"named": "group", "op": "collective", "calls": "calls", "ranks": "ranks", "input": "sizes, most often"}


def places_table(rank_places: Frame) -> Panel:
    """List the ranks with what they wait in."""
    return table("Where each rank is, by its flight recorder", rank_places, _PLACES, most=MOST)


def draw_flight_recorder(
    rank_places: Frame = needs(rank_places), whole_calls: Frame = needs(whole_calls)
) -> list[Panel]:
    """List the ranks with what they wait in, and which collectives the recorders hold."""
    kinds = whole_calls.groupby(["named", "op"], sort=False, as_index=False).agg(
        calls=("sequence", "size"), ranks=("rank", "nunique"), input=("input", lambda sizes: sizes.mode().iloc[0])
    )
    kinds = kinds.sort_values("calls", ascending=False, kind="stable")
    return [places_table(rank_places), table("Collectives in the flight recorders", kinds, _KINDS, most=MOST)]


FLIGHT_RECORDER_PICTURE = Picture(draw_flight_recorder)
