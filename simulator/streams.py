"""Streams of a device: work in the order in which it was launched, events between streams, and meetings of ranks.

Nothing here waits for a clock. A piece of work has its times as soon as all is known that it depends on: when the host
had launched it, when the work before it in its stream ends, when the event is that its stream waits for, and for a
collective, when the other ranks' streams come to theirs. What a host must wait for may not be known yet; then another
rank goes on (machine.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from simulator.hardware import Link, transfer_ns
from simulator.program import Exchange, Graph, Kernel

UNKNOWN = -1

MARKERS = ("event", "wait")  # kinds of work that take no time


@dataclass(slots=True, eq=False)
class Work:
    """One piece of work in a stream. kind: kernel, copy, set, communication, graph, host_function, event, wait.

    An event and a wait take no time: their `end` is when the stream has come past them.
    """

    kind: str
    name: str
    stream: int
    step: int
    called: int  # ns, when the launching call began
    arrive: int  # when the device knows of it
    dur: int = 0
    correlation: int = 0
    external: int = 0  # the operator that launched it
    size: int = 0
    gap: int = 0  # the stream needs so long until the next
    start: int = UNKNOWN
    end: int = UNKNOWN
    free: int = UNKNOWN  # when the next may begin
    before: Work | None = None
    behind: Work | None = None
    event: Work | None = None  # that a wait waits for
    waiters: list[Work] | None = None
    exchange: Exchange | None = None
    meeting: Meeting | None = None
    graph: Graph | None = None
    parts: tuple[tuple[int, int, Kernel], ...] = ()  # of a graph: begins after the start, ns, what
    held_ns: int = 0  # how long a wait kept its stream from going on
    thread: int = 0  # that launched it
    annotation: int = 0  # the innermost named range around that
    belongs: tuple[str, str] = ("", "")  # the module that it is for, and the part of the step


@dataclass(slots=True, eq=False)
class Meeting:
    """One collective of a process group: the work of each of its ranks, and when it was over."""

    group: str
    number: int  # in its group, from 0
    kind: str
    size: int
    ranks: tuple[int, ...]
    jitter: float
    link: Link
    late_ends: tuple[int, ...] = ()  # ns that each rank notices the end late
    work: dict[int, Work] = field(default_factory=dict)  # of each rank that has come
    end: int = UNKNOWN

    @property
    def last(self) -> int:
        """The rank that came last."""
        return max(self.work, key=lambda rank: self.work[rank].start)

    def wait_ns(self, rank: int) -> int:
        """Return how long a rank waited for the last one."""
        return max(w.start for w in self.work.values()) - self.work[rank].start


class Stream:
    """The work of one stream, first launched first."""

    __slots__ = ("last", "queued", "work")

    def __init__(self) -> None:
        self.work: list[Work] = []
        self.queued: list[Work] = []  # those that take a place in the queue: events and waits do not
        self.last: Work | None = None

    def add(self, work: Work) -> None:
        """Put work at the end, and find its times as far as they can be known."""
        last = self.last
        self.work.append(work)
        if work.kind not in MARKERS:
            self.queued.append(work)
        self.last = work
        if last is not None and last.end == UNKNOWN:
            last.behind = work
            work.before = last
        elif work.meeting is None and work.kind not in MARKERS:
            # The usual case, in as few steps as can be.
            start = work.arrive
            if last is not None and last.free > start:
                start = last.free
            work.start = start
            work.end = end = start + work.dur
            work.free = end + work.gap
            return
        else:
            work.before = last
        if work.event is not None and work.event.end == UNKNOWN:
            if work.event.waiters is None:
                work.event.waiters = []
            work.event.waiters.append(work)
        settle(work)


def settle(first: Work) -> None:
    """Find the times of a piece of work and of all that waited for nothing else."""
    todo = [first]
    while todo:
        work = todo.pop()
        before, event = work.before, work.event
        if work.end != UNKNOWN or (before is not None and before.end == UNKNOWN):
            continue
        if event is not None and event.end == UNKNOWN:
            continue
        ended, free = (before.end, before.free) if before is not None else (0, 0)
        if work.kind in MARKERS:
            begin = max(work.arrive, ended)
            work.start = begin
            if event is not None and event.end > begin:
                work.held_ns = event.end - begin
                begin = event.end + work.gap
            work.end = begin
            work.free = max(begin, free)
        else:
            if work.start == UNKNOWN:
                work.start = max(work.arrive, free)
                if work.meeting is not None:
                    todo += _met(work.meeting)
            if work.meeting is None:
                work.end = work.start + work.dur
                work.free = work.end + work.gap
            elif work.end == UNKNOWN:
                continue
        work.before = None
        todo += _freed(work)


def _met(meeting: Meeting) -> list[Work]:
    """End a collective on all of its ranks if the last has begun; return the work that this sets free."""
    starts = [w.start for w in meeting.work.values()]
    if len(starts) < len(meeting.ranks) or UNKNOWN in starts:
        return []
    took = round(transfer_ns(meeting.kind, meeting.size, len(meeting.ranks), meeting.link) * meeting.jitter)
    meeting.end = max(starts) + took
    freed = []
    for late, (_, work) in zip(meeting.late_ends, sorted(meeting.work.items()), strict=True):
        work.end = meeting.end + late
        work.dur = work.end - work.start
        work.free = work.end + work.gap
        freed += _freed(work)
    return freed


def _freed(work: Work) -> list[Work]:
    """Return what waited for a piece of work whose end is known now."""
    freed = work.waiters or []
    work.waiters = None
    if work.behind is not None:
        freed.append(work.behind)
    work.behind = None
    return freed
