"""Writes the folder of a job of many ranks: each host of it a copy of a simulated one, with its own ranks and clock.

What a copy has of its own in its traces are the header, and what collectives, sends and receives say of their ranks.
So a simulated rank's events are written once, with places in them that every copy fills.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from isal import igzip

from benchmarks.thousand.jobs import RANKS_A_HOST, Many
from simulator import folder, kineto, play
from simulator.hardware import DEVICES, MS
from simulator.job import BASE_NS, Clock, Place, Recording, groups, pair
from simulator.kineto import FORMS, Form, metadata
from simulator.machine import Simulated
from simulator.program import Exchange
from simulator.streams import Work

CLOCKS_NS = (-37 * MS, 0, 52 * MS)  # what the hosts' clocks are ahead by, in turn

# A place to be filled: the number of a collective's work, or the ranks between which something is sent.
_PLACE = re.compile(r'"copy": (\d+)|(?<=nccl:)(send|recv) (\d+)(->|<-)(\d+)')
_MARK = "copy"


def write(at: Path, many: Many, recording: Recording) -> None:
    """Simulate a job, and write the whole of it into a folder."""
    simulation = play.record(many.simulated, recording)
    _SIMULATED.update({rank.rank: rank for rank in simulation.ranks})
    # Forked, so that what was simulated need not travel.
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("fork")) as pool:
        for _ in pool.map(partial(_copy, at, many, recording), list(_SIMULATED)):
            pass
    _SIMULATED.clear()
    folder.write_run(at, many.whole, simulation)


_SIMULATED: dict[int, Simulated] = {}  # by rank


def _hosts(many: Many, rank: int) -> list[int]:
    """Return the hosts that are copies of the one with this simulated rank."""
    return [host for host, of in enumerate(many.copied) if of == rank // RANKS_A_HOST]


def _copy(at: Path, many: Many, recording: Recording, number: int) -> None:
    """Write the ranks that are copies of a simulated one."""
    simulated, form = _SIMULATED[number], FORMS[recording.form]
    every = groups(many.whole)
    template: Template | None = None
    for host in _hosts(many, number):
        rank = host * RANKS_A_HOST + number % RANKS_A_HOST
        mine = {name: ranks for name, (ranks, _) in every.items() if name.isdigit() and rank in ranks}
        place = _place(many, host, rank, mine)
        if template is None:
            template = Template(simulated, replace(place, clock=Clock(), base_ns=BASE_NS), form, recording.shapes)
        here = folder.write_logs(at, simulated, many.whole, recording, place)
        text = template.filled(place, rank - number)
        (here / "trace.json.gz").write_bytes(igzip.compress(text.encode(), 1, mtime=0))


def _place(many: Many, host: int, rank: int, mine: Mapping[str, tuple[int, ...]]) -> Place:
    local, ahead = rank % RANKS_A_HOST, CLOCKS_NS[host % len(CLOCKS_NS)]
    return Place(
        rank, many.whole.ranks, f"node-{host + 1}", 4_000 + 1_000 * local, local, RANKS_A_HOST,
        DEVICES[many.whole.device], Clock(ahead), mine, BASE_NS + ahead,
    )  # fmt: skip


class Template(kineto.Trace):
    """The trace of a simulated rank, to be filled with the ranks of a copy."""

    def __init__(self, rank: Simulated, place: Place, form: Form, shapes: bool) -> None:
        super().__init__(rank, place, form, shapes)
        self._exchanged: list[tuple[Exchange, Work]] = []
        # Pieces of text, and between them what a place is about.
        self._pieces = _PLACE.split(self.body())

    def metadata(self, exchange: Exchange, work: Work) -> dict[str, Any]:
        """Leave a place."""
        self._exchanged.append((exchange, work))
        return {_MARK: len(self._exchanged) - 1}

    def filled(self, place: Place, shift: int) -> str:
        """Return the trace of a copy whose ranks are so many further on."""
        self.place = place
        texts = [self._said(exchange, work, place, shift) for exchange, work in self._exchanged]
        out, pieces = [self.head()], self._pieces
        for n in range(0, len(pieces) - 1, 1 + _PLACE.groups):
            before, number, kind, mine, arrow, other = pieces[n : n + 1 + _PLACE.groups]
            out.append(before)
            out.append(texts[int(number)] if number else f"{kind} {int(mine) + shift}{arrow}{int(other) + shift}")
        return "".join((*out, pieces[-1], kineto.TAIL))

    def _said(self, exchange: Exchange, work: Work, place: Place, shift: int) -> str:
        """Return what the trace of a copy says of an exchange."""
        assert work.meeting is not None
        if exchange.peer >= 0:
            first = min(self.rank.rank, exchange.peer) + shift
            exchange = replace(exchange, peer=exchange.peer + shift, group=pair(first))
        name = exchange.within or exchange.group
        said = metadata(self.form, exchange, name, place.groups[name], work.meeting.number)
        return json.dumps(said)[1:-1]
