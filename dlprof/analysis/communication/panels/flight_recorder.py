"""Where each rank is, by the dumps of PyTorch's flight recorder."""

from __future__ import annotations

from dlprof.analysis.communication.recorder import rank_places, whole_calls
from dlprof.analysis.engine import Frame, needs
from dlprof.analysis.panel import Picture, table
from dlprof.result import Panel

MOST = 64  # ranks that are listed

_COLUMNS = {"rank": "rank", "doing": "it", "what": "collective", "state": "state", "input": "sizes", "site": "at"}
_COLUMNS |= {"when": "since, UTC"}
_KINDS = {"named": "group", "op": "collective", "calls": "calls", "ranks": "ranks", "input": "sizes, most often"}


def draw(rank_places: Frame = needs(rank_places), whole_calls: Frame = needs(whole_calls)) -> list[Panel]:
    """List the ranks with what they wait in, and which collectives the recorders hold."""
    where = table("Where each rank is, by its flight recorder", rank_places, _COLUMNS, most=MOST)
    kinds = whole_calls.groupby(["named", "op"], sort=False, as_index=False).agg(
        calls=("sequence", "size"), ranks=("rank", "nunique"), input=("input", lambda sizes: sizes.mode().iloc[0])
    )
    kinds = kinds.sort_values("calls", ascending=False, kind="stable")
    return [where, table("Collectives in the flight recorders", kinds, _KINDS, most=MOST)]


PICTURE = Picture(draw)
