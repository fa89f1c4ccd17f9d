"""Runs the processes of a job together: each as far as it gets, in turn, until all have ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from simulator.hardware import A100, Device, Host, Link
from simulator.loading import Loader, Queue
from simulator.process import Process
from simulator.program import Exchange, Step
from simulator.records import Records, Window
from simulator.streams import UNKNOWN, Meeting, Work

# How much longer a collective takes from time to time: standard deviation of the logarithm.
LINK_JITTER = 0.03
# Ranks notice the end of a collective within so many ns of each other (1 to 7 µs in the DLRM traces of 8 V100).
END_SPREAD = 3_000

_DRAWS = 1_021


@dataclass(frozen=True)
class Setup:
    """A job for the machine. Of what differs between ranks, one entry a rank, or one for all."""

    step: Callable[[int, int], Step]  # what a rank does in a step
    ranks: int = 1
    steps: int = 50
    device: Device = A100
    host: Host = field(default_factory=Host)
    loaders: Sequence[Loader] = ()  # the training loader of each rank
    groups: Mapping[str, tuple[tuple[int, ...], Link]] = field(default_factory=dict)
    speeds: Sequence[tuple[float, float]] = ()  # factors of each rank's host and device times
    seed: int = 0
    window: Window | None = None


@dataclass(frozen=True)
class Simulated:
    """What was simulated of one rank."""

    rank: int
    records: Records
    work: Mapping[int, Sequence[Work]]  # of each stream, in its order
    queue: Queue | None


@dataclass(frozen=True)
class Simulation:
    """A whole job, simulated."""

    ranks: Sequence[Simulated]
    meetings: Sequence[Meeting]


class Deadlock(Exception):  # noqa: N818 - what a job of such a program would do
    """No rank can go on: each waits for another."""


def simulate(setup: Setup) -> Simulation:
    """Run a job; raises Deadlock where its ranks wait for each other forever."""
    meetings = _Meetings(setup)
    processes = [_process(setup, rank, meetings) for rank in range(setup.ranks)]
    running = {p.rank: p.run(setup.steps, setup.step) for p in processes}
    waits: dict[int, Work] = {}
    while running:
        moved = False
        for rank, program in tuple(running.items()):
            if rank in waits and waits[rank].end == UNKNOWN:
                continue
            moved = True
            blocked = next(program, None)
            if blocked is None:
                del running[rank]
            else:
                waits[rank] = blocked
        if not moved:
            raise Deadlock(f"ranks {sorted(running)} wait for each other")
    return Simulation(
        [
            Simulated(p.rank, p.records, {n: s.work for n, s in p.streams.items()}, p.queues[0] if p.queues else None)
            for p in processes
        ],
        meetings.all,
    )


def _process(setup: Setup, rank: int, meetings: _Meetings) -> Process:
    queues: tuple[Queue, ...] = ()
    if setup.loaders:
        loader = setup.loaders[rank % len(setup.loaders)]
        z = np.random.default_rng((setup.seed, rank, 1 << 30)).standard_normal(_DRAWS)
        queues = (Queue(loader, np.exp(loader.jitter * z - loader.jitter**2 / 2).tolist(), 4_000 + 1_000 * rank),)
    speed = setup.speeds[rank % len(setup.speeds)] if setup.speeds else (1.0, 1.0)
    return Process(rank, setup.host, setup.device, meetings.meet, queues, setup.seed, speed, setup.window)


class _Meetings:
    """Brings the ranks' parts of a collective together: the n-th of a group on one rank is the n-th on every other."""

    def __init__(self, setup: Setup) -> None:
        self.all: list[Meeting] = []
        self._groups = setup.groups
        self._open: dict[tuple[str, int], Meeting] = {}
        self._count: dict[tuple[str, int], int] = {}
        rng = np.random.default_rng((setup.seed, 1 << 31))
        self._jitter = np.exp(LINK_JITTER * rng.standard_normal(_DRAWS)).tolist()
        self._late = rng.integers(0, END_SPREAD, (_DRAWS, setup.ranks)).tolist()

    def meet(self, rank: int, exchange: Exchange, work: Work) -> Meeting:
        """Let a rank join its next collective of a group."""
        ranks, link = self._groups[exchange.group]
        number = self._count.get((exchange.group, rank), 0)
        self._count[exchange.group, rank] = number + 1
        meeting = self._open.get((exchange.group, number))
        if meeting is None:
            draw = (number * 7 + len(exchange.group)) % _DRAWS
            late = tuple(self._late[draw][: len(ranks)])
            meeting = Meeting(
                exchange.group, number, exchange.kind, exchange.size, ranks, self._jitter[draw], link, late
            )  # fmt: skip
            self._open[exchange.group, number] = meeting
            self.all.append(meeting)
        meeting.work[rank] = work
        if len(meeting.work) == len(ranks):
            del self._open[exchange.group, number]
        return meeting
