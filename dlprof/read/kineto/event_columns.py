"""The rows of one torch-profiler trace as plain columns: decoded, numbered, and each event understood.

It needs NumPy and no pandas, so that a trace can be decoded while a process still imports that (ahead.py).
"""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from dataclasses import dataclass
from decimal import Decimal
from itertools import compress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dlprof import schema
from dlprof.errors import DlprofError
from dlprof.read.kineto.collectives import Collectives
from dlprof.read.kineto.events import (
    BEGINS,
    ENDS,
    NO_TIME,
    BlurredTimes,
    Event,
    ExactEvent,
    Scalar,
    args_of,
    decoder,
    exact_nanoseconds,
    integer,
    integers,
    links,
    nanoseconds,
)
from dlprof.read.kineto.json_stream import TraceFile
from dlprof.read.kineto.numbering import Codes, DeviceLanes, Names, Places, Shapes
from dlprof.read.kineto.patterns import NO_ROWS, copy_of
from dlprof.read.opening import most_names, most_rows, too_many

_HALVES = frozenset(BEGINS + ENDS)
_NO_KIND = -1
KIND = {"": _NO_KIND} | {kind: code for code, kind in enumerate(schema.KINDS)}
# A trace of ten years is a broken clock.
_LONGEST_NS = 10 * 366 * 86_400 * 10**9


@dataclass
class Rows:
    """What a trace file holds: a row for all that lasts, in the file's order; what is rare by its row's number.

    Picklable; nothing in it points into what was read.
    """

    keys: dict[str, Any]  # what stands beside the events
    warnings: list[str]
    groups: dict[str, dict[str, Any]]  # those that events name
    names: list[str]  # by the number in `what`
    kinds: list[str]
    directions: list[tuple[str, str]]  # of a copy, and the host's memory
    verbs: list[str]  # of a collective
    lanes: list[tuple[Any, ...]]  # by the number in `lane`: (False, pid, tid) or (True, pid, tid, device, stream)
    what: NDArray[np.int32]
    lane: NDArray[np.int32]
    start: NDArray[np.int64]  # ns
    dur: NDArray[np.int64]
    launch: NDArray[np.int64]
    bytes: dict[int, int]
    copies: dict[int, tuple[str, str]]
    collectives: dict[int, tuple[str, str, str]]  # verb, group, element type
    sequences: dict[int, tuple[int, str]]  # number, communicator ("": not told)
    peers: dict[int, tuple[int, str | None]]  # the rank, and in which group it has that number
    multiplied: dict[int, tuple[str, str]]  # shapes, element type
    sizes: dict[int, int]  # of copies, by launch

    def __len__(self) -> int:
        return len(self.what)


def decode(path: Path) -> Rows:
    """Return the rows of a file; raises DlprofError where it cannot be read or is no trace."""
    was_on = gc.isenabled()
    gc.disable()  # hundreds of thousands of live objects, none in a cycle: collecting costs half of the time
    try:
        return _decoded(path, exact=False)
    except BlurredTimes:
        return _decoded(path, exact=True)
    finally:
        if was_on:
            gc.enable()


def _decoded(path: Path, exact: bool) -> Rows:
    file: TraceFile[Event] = TraceFile(path, decoder(exact))
    if not file.header():
        what = "it is cut off before its first event" if file.cut else "JSON without traceEvents"
        raise DlprofError(f"{path}: not a torch-profiler trace: {what}")
    making = _Making(file.keys)
    most, most_different = most_rows(), most_names()
    for events in file.events():
        making.add(events)
        events.clear()
        if making.seen > most:
            making.warnings.append(too_many(path, "events"))
            break
        if len(making.places) > most_different:
            making.warnings.append(too_many(path, "different names or threads", most_different))
            break
    if file.is_list and not making.seen:
        raise DlprofError(f"{path}: not a torch-profiler trace: a list without events")
    return making.rows(path, file.cut, file.unreadable)


class _Making:
    """The rows read so far, as columns; what is rare (bytes, groups) as row numbers and values."""

    def __init__(self, keys: dict[str, Any]) -> None:
        self.keys = keys
        self.seen = 0
        self.warnings: list[str] = []
        self.names = Names()
        self.lanes = Codes()
        self.places = Places(self.names, self.lanes)
        self.device_lanes = DeviceLanes(self.lanes)
        self.shapes_of = Shapes()
        # what, lane, start, dur, launch: of each chunk one
        self.columns: list[list[NDArray[Any]]] = [[np.empty(0, dtype)] for dtype in ("i4", "i4", "i8", "i8", "i8")]
        self.count = 0
        self.bytes: dict[int, int] = {}
        self.copies: dict[int, tuple[str, str]] = {}
        self.exchanges = Collectives(keys, self.bytes)
        self.multiplied: dict[int, tuple[str, str]] = {}
        self.sizes: dict[int, int] = {}
        self.halves: dict[tuple[Scalar, Scalar], list[tuple[int, int, Event]]] = defaultdict(list)
        self.left_out: Counter[str] = Counter()
        self.bad_time = self.bad_duration = 0
        self.working_lanes: set[int] = set()

    def add(self, events: list[Event]) -> None:
        """Take the rows of some events."""
        kinds = set(map(type, events))
        of = ExactEvent if ExactEvent in kinds else Event  # one decoder makes all
        whole = [e for e in events if type(e) is of]
        if not _HALVES.isdisjoint(kinds):
            for e in [e for e in events if type(e) in _HALVES]:
                self._half(e)
        self.seen += len(events)
        if whole:
            self._add(whole)

    def _half(self, e: Event) -> None:
        ns = exact_nanoseconds([e.ts])[0]
        if ns == NO_TIME:
            self.bad_time += 1
            return
        at = Decimal(int(ns)) / 1000
        # Args as they stand in the file would keep a whole chunk alive.
        half = msgspec.structs.replace(e, ts=at, args=e.args.copy())
        mine = self.halves[e.pid, e.tid]
        mine.append((int(ns), len(mine), half))

    def _pairs(self) -> tuple[list[Event], int]:
        """Return the events that begin and end marks make, and the number of marks that found no partner."""
        made: list[Event] = []
        alone = 0
        for marks in self.halves.values():
            opened: list[Event] = []
            for _, _, mark in sorted(marks, key=lambda m: m[:2]):
                if type(mark) in BEGINS:
                    opened.append(mark)
                elif opened:
                    begin = opened.pop()
                    fields = {**msgspec.structs.asdict(begin), "dur": str(mark.ts - begin.ts)}  # type: ignore[operator]
                    made.append(ExactEvent(**fields))
                else:
                    alone += 1
            alone += len(opened)
        return made, alone

    # Comprehensions throughout: a quarter faster than maps over attrgetters.
    def _add(self, events: list[Event]) -> None:
        """Take whole events."""
        names, places = self.names, self.places
        place = np.fromiter([places[e.cat, e.name, e.pid, e.tid] for e in events], np.int32, len(events))
        what = np.array(places.what, dtype=np.int32)[place]
        lane = np.array(places.lane, dtype=np.int32)[place]
        start = exact_nanoseconds([e.ts for e in events])
        dur = nanoseconds([e.dur for e in events])
        kind = np.array([KIND[k] for k in names.kind], dtype=np.int8)[what]
        known = kind != _NO_KIND
        if not known.all():
            for i in np.flatnonzero(~known):
                if not NO_ROWS.fullmatch(events[i].cat):
                    self.left_out[events[i].cat or "none"] += 1
        timed = start != NO_TIME
        lasting = (dur >= 0) & (dur <= _LONGEST_NS)
        self.bad_time += int((known & ~timed).sum())
        self.bad_duration += int((known & timed & ~lasting).sum())
        keep = known & timed & lasting
        if not keep.all():
            events = list(compress(events, keep.tolist()))
            what, lane, start, dur, kind = what[keep], lane[keep], start[keep], dur[keep], kind[keep]
        if not events:
            return

        device = np.array(names.device)[what]
        call = kind == KIND["runtime"]
        launch = np.full(len(events), -1, dtype=np.int64)
        on_device = self.device_lanes
        linked = np.flatnonzero(device | call)
        args = links([e.args for e in compress(events, (device | call).tolist())])
        of_device = compress(args, device[linked].tolist())
        lane[device] = [
            on_device[e.pid, e.tid, a.device, a.stream]
            for e, a in zip(compress(events, device.tolist()), of_device, strict=True)
        ]
        launch[linked] = integers([a.correlation for a in args])
        without = np.flatnonzero(launch[linked] <= 0)
        launch[linked[without]] = np.maximum(integers([args[i].correlation_id for i in without]), 0)
        launch[launch == 0] = -1
        # AMD tells a copy's bytes on the call, not on the copy.
        sizes = [a.size for a in args]
        for n in [] if sizes.count(None) == len(sizes) else [n for n, size in enumerate(sizes) if size is not None]:
            size = integer(args[n].size)
            if call[linked[n]] and launch[linked[n]] > 0 and size >= 0:
                self.sizes[int(launch[linked[n]])] = size

        first = self.count
        self._copies(first, np.flatnonzero((kind == KIND["copy"]) | (kind == KIND["set"])), events, what)
        exchanges = np.flatnonzero(kind == KIND["communication"]).tolist()
        for row, told in zip(exchanges, args_of([events[row].args for row in exchanges]), strict=True):
            self.exchanges.add(first + row, events[row], told, names.collective[what[row]], bool(device[row]))
        products = np.flatnonzero(np.array(names.multiplies)[what]).tolist()
        for row, told in zip(products, args_of([events[row].args for row in products]), strict=True):
            shape = self.shapes_of[bytes(told.dims), bytes(told.types)]
            if shape[0]:
                self.multiplied[first + row] = shape
        working = lane[(kind == KIND["op"]) | call]
        self.working_lanes.update(np.flatnonzero(np.bincount(working)).tolist())

        columns: tuple[NDArray[Any], ...] = (what, lane, start, dur, launch)
        for parts, column in zip(self.columns, columns, strict=True):
            parts.append(column)
        self.count += len(events)

    def _copies(self, first: int, rows: NDArray[np.int64], events: list[Event], what: NDArray[np.int32]) -> None:
        args = args_of([events[i].args for i in rows])
        sizes = integers([a.bytes for a in args])
        for i, size, told in zip(rows.tolist(), sizes.tolist(), args, strict=True):
            if size >= 0:
                self.bytes[first + i] = size
            kind = told.kind
            if isinstance(kind, str) and not self.names.direction[what[i]][0]:
                self.copies[first + i] = copy_of(kind)

    def rows(self, path: Path, cut: str, unreadable: int) -> Rows:
        """Return everything that was read."""
        warnings = self.warnings
        if cut:
            warnings.append(f"{path.name}: {cut}; {self.count:,} spans before that are used")
        if unreadable:
            warnings.append(f"{path.name}: {unreadable:,} events could not be decoded and are left out")
        pairs, alone = self._pairs()
        if pairs:
            self.add(pairs)
        if alone:
            warnings.append(f"{path.name}: {alone:,} begin or end marks have no partner and are left out")
        if self.bad_time:
            warnings.append(f"{path.name}: {self.bad_time:,} events without a usable time are left out")
        if self.bad_duration:
            warnings.append(
                f"{path.name}: {self.bad_duration:,} events with a negative or absurd duration are left out"
            )
        for category, count in self.left_out.most_common(5):
            warnings.append(f"{path.name}: {count:,} events of the unknown category {category!r} are left out")
        processes = {key[1] for key, code in self.lanes.items() if code in self.working_lanes}
        if len(processes) > 1:
            warnings.append(
                f"{path.name}: holds the work of {len(processes)} processes; it is read as one rank: "
                "where ranks were merged into one file, give their own files"
            )
        if not self.count:
            warnings.append(f"{path.name}: the trace holds no spans")

        names = self.names
        what, lane, start, dur, launch = (np.concatenate(parts) for parts in self.columns)
        return Rows(
            keys=self.keys,
            warnings=warnings,
            groups=self.exchanges.groups,
            names=names.name,
            kinds=names.kind,
            directions=names.direction,
            verbs=names.collective,
            lanes=list(self.lanes),
            what=what,
            lane=lane,
            start=start,
            dur=dur,
            launch=launch,
            bytes=self.bytes,
            copies=self.copies,
            collectives=self.exchanges.collectives,
            sequences=self.exchanges.sequences,
            peers=self.exchanges.peers,
            multiplied=self.multiplied,
            sizes=self.sizes,
        )
