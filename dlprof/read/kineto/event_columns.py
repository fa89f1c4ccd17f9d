"""The rows of one torch-profiler trace as plain columns: decoded, numbered, and each event understood.

It needs NumPy and no pandas, so that a trace can be decoded while a process still imports that (ahead.py).
"""

from __future__ import annotations

import gc
import math
import re
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
from dlprof.read.kineto.events import (
    BEGINS,
    ENDS,
    NO_TIME,
    Args,
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
    plain,
    ranks_of,
)
from dlprof.read.kineto.headers import groups_in
from dlprof.read.kineto.json_stream import TraceFile
from dlprof.read.kineto.patterns import MULTIPLIES, NO_ROWS, collective_of, copy_of, element_type, kind_of
from dlprof.read.opening import most_names, most_rows, too_many

# How torch names what NCCL sends from one rank of a group to another: nccl:send 0->1, nccl:recv 1<-0.
_PAIR = re.compile(r"^nccl:(?:send|recv) \d{1,6}(?:->|<-)(\d{1,6})$")
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


class _Names(dict[tuple[str, str], int]):
    """Numbers every (category, name) and decides once for each what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.name: list[str] = []
        self.kind: list[str] = []
        self.device: list[bool] = []
        self.direction: list[tuple[str, str]] = []
        self.collective: list[str] = []
        self.multiplies: list[bool] = []

    def __missing__(self, key: tuple[str, str]) -> int:
        category, name = key
        side, kind = kind_of(category, name) or ("host", "")
        self.name.append(name)
        self.kind.append(kind)
        self.device.append(side == "device")
        self.direction.append(copy_of(name) if kind == "copy" else ("", ""))
        self.collective.append(collective_of(name) if kind == "communication" else "")
        self.multiplies.append(kind == "op" and MULTIPLIES.search(name) is not None)
        self[key] = code = len(self)
        return code


class _Codes(dict[Any, int]):
    """Numbers every distinct key in order of appearance."""

    def __missing__(self, key: Any) -> int:
        self[key] = code = len(self)
        return code


class _Places(dict[tuple[str, str, Scalar, Scalar], int]):
    """Numbers every (category, name, pid, tid): one look-up an event tells what it is and on which thread."""

    def __init__(self, names: _Names, lanes: _Codes) -> None:
        super().__init__()
        self.names = names
        self.lanes = lanes
        self.what: list[int] = []
        self.lane: list[int] = []  # of a host event; a device's depends on its args too

    def __missing__(self, key: tuple[str, str, Scalar, Scalar]) -> int:
        category, name, pid, tid = key
        what = self.names[category, name]
        self.what.append(what)
        self.lane.append(self.lanes[False, pid, tid] if self.names.kind[what] and not self.names.device[what] else -1)
        self[key] = code = len(self)
        return code


class _DeviceLanes(dict[tuple[Scalar, Scalar, Scalar, Scalar], int]):
    """Gives the lane of a (pid, tid, device, stream)."""

    def __init__(self, lanes: _Codes) -> None:
        super().__init__()
        self.lanes = lanes

    def __missing__(self, key: tuple[Scalar, Scalar, Scalar, Scalar]) -> int:
        self[key] = lane = self.lanes[(True, *key)]
        return lane


class _Ranks(dict[bytes, list[int]]):
    """Gives the ranks that a piece of JSON lists; a job has few groups and many collectives."""

    def __missing__(self, key: bytes) -> list[int]:
        self[key] = ranks = ranks_of(plain(key))
        return ranks


class _Shapes(dict[tuple[bytes, bytes], tuple[str, str]]):
    """Gives the shapes of the tensors that pieces of JSON list, as text, and their element type; "" where not said."""

    def __missing__(self, key: tuple[bytes, bytes]) -> tuple[str, str]:
        dims, types = plain(key[0]), plain(key[1])
        shapes, dtype = [], ""
        for shape, text in zip(dims or [], types or [], strict=False):
            name, width = element_type(text) if isinstance(text, str) else ("", 0)
            if width and isinstance(shape, list) and shape and all(isinstance(n, int) for n in shape):
                shapes.append("x".join(map(str, shape)))
                dtype = dtype or name
        self[key] = told = (" ".join(shapes), dtype)
        return told


class _Making:
    """The rows read so far, as columns; what is rare (bytes, groups) as row numbers and values."""

    def __init__(self, keys: dict[str, Any]) -> None:
        self.keys = keys
        self.seen = 0
        self.warnings: list[str] = []
        self.names = _Names()
        self.lanes = _Codes()
        self.places = _Places(self.names, self.lanes)
        self.device_lanes = _DeviceLanes(self.lanes)
        self.groups: dict[str, dict[str, Any]] = {}
        self.ranks_of = _Ranks()
        self.shapes_of = _Shapes()
        # what, lane, start, dur, launch: of each chunk one
        self.columns: list[list[NDArray[Any]]] = [[np.empty(0, dtype)] for dtype in ("i4", "i4", "i8", "i8", "i8")]
        self.count = 0
        self.bytes: dict[int, int] = {}
        self.copies: dict[int, tuple[str, str]] = {}
        self.collectives: dict[int, tuple[str, str, str]] = {}
        self.sequences: dict[int, tuple[int, str]] = {}
        self.peers: dict[int, tuple[int, str | None]] = {}  # the rank, and in which group it has that number
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
            self._collective(first + row, events[row], told, bool(device[row]))
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

    def _collective(self, row: int, e: Event, args: Args, device: bool) -> None:
        collective = collective_of(args.collective) if isinstance(args.collective, str) else ""
        collective = collective or self.names.collective[self.names[e.cat, e.name]]
        group = self._group(args)
        dtype, width = element_type(args.dtype) if isinstance(args.dtype, str) else ("", 0)
        elements = [integer(args.elements_in), integer(args.elements_out)]
        if collective in ("all_gather", "recv"):
            elements.reverse()
        count = next((n for n in elements if n > 0), max(elements))
        size = count * width if width and count >= 0 else -1
        # torch's marks (gloo:all_reduce) carry the tensor they send; the arguments of c10d's calls have no fixed order.
        if size < 0 and not device and not e.name.startswith(("c10d", "_c10d", "record_param_comms")):
            size, dtype = self._input(args, collective, group)
        if 0 <= size < 2**62:
            self.bytes[row] = size
        if collective or group or dtype:
            self.collectives[row] = (collective, group, dtype)
        sequence = integer(args.sequence)
        if sequence >= 0 or args.communicator is not None:
            self.sequences[row] = (sequence, "" if args.communicator is None else str(args.communicator))
        if collective in ("send", "recv"):
            self._peer(row, e, args, collective, group)

    def _peer(self, row: int, e: Event, args: Args, collective: str, group: str) -> None:
        """Note whom an event sends to or receives from, where it tells."""
        peer = integer(args.destination if collective == "send" else args.source)
        if peer >= 0:
            self.peers[row] = (peer, None)
            return
        if e.name in ("c10d::send", "c10d::recv_"):  # tensors, group, rank, tag
            inputs = plain(args.inputs)
            peer = integer(inputs[2]) if isinstance(inputs, list) and len(inputs) > 2 else -1
        elif named := _PAIR.search(e.name):
            peer = int(named[1])
        if peer >= 0:
            self.peers[row] = (peer, group)

    def _group(self, args: Args) -> str:
        """Return a group's name (if it has none, its description or a name made of its ranks) and note what is told."""
        ranks = self.ranks_of[bytes(args.group_ranks)]
        text = "" if args.group_text is None else str(args.group_text)
        name = "" if args.group is None else str(args.group)
        if not name:
            name = text
        if not name and ranks:
            import hashlib  # loads OpenSSL, while another core waits for the first trace

            name = "ranks-" + hashlib.sha1(repr(ranks).encode(), usedforsecurity=False).hexdigest()[:8]
        if name and name not in self.groups:
            size = integer(args.group_size)
            told = {"desc": text, "size": size if size > 0 else len(ranks), "ranks": ranks}
            self.groups[name] = {k: v for k, v in told.items() if v}
        return name

    def _input(self, args: Args, collective: str, group: str) -> tuple[int, str]:
        """Return the bytes and the element type of a collective by its input tensors; -1 where they do not tell."""
        dims, types = plain(args.dims), plain(args.types)
        if not isinstance(dims, list) or not isinstance(types, list):
            return -1, ""
        total, dtype = 0, ""
        for shape, text in zip(dims, types, strict=False):
            name, width = element_type(text) if isinstance(text, str) else ("", 0)
            if width and isinstance(shape, list) and shape and all(isinstance(n, int) for n in shape):
                total, dtype = total + math.prod(shape) * width, dtype or name
        if not dtype:
            return -1, ""
        if collective == "all_gather":  # counted by its output: what every rank of the group gives
            known = {**groups_in(self.keys), **self.groups}
            size = known.get(group, next(iter(known.values())) if len(known) == 1 else {}).get("size", 0)
            return (total * size if size else -1), dtype
        return total, dtype

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
            groups=self.groups,
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
            collectives=self.collectives,
            sequences=self.sequences,
            peers=self.peers,
            multiplied=self.multiplied,
            sizes=self.sizes,
        )
