"""Reads a torch-profiler (Kineto, Chrome) trace of one rank, from any version and machine, into spans and traced steps.

What differs between the files that people have, and is one thing behind this reader: category names, packed or plain,
time as whole or decimal microseconds, absolute or from a base, streams and threads as numbers or text, steps that
stand twice, and files that were cut off. Times are exact to the nanosecond wherever the file's are.
"""

from __future__ import annotations

import gc
import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from decimal import Decimal
from itertools import compress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import tables
from dlprof.errors import DlprofError
from dlprof.readers import Reading
from dlprof.readers.chunks import TraceFile, open_file
from dlprof.readers.events import (
    BEGINS,
    ENDS,
    NO_ARGS,
    NO_TIME,
    RAW,
    WHOLE,
    Args,
    BlurredTimes,
    Event,
    ExactEvent,
    Scalar,
    decoder,
    exact_nanoseconds,
    integer,
    integers,
    label,
    nanoseconds,
    plain,
    ranks_of,
)
from dlprof.readers.patterns import MULTIPLIES, NO_ROWS, collective_of, copy_of, element_type, kind_of, rank_in

PEEK_BYTES = 256 << 10
_WORK = ("kernel", "communication", "copy", "set")
_STEP = re.compile(r"ProfilerStep#(\d{1,18})")
# How torch names what NCCL sends from one rank of a group to another: nccl:send 0->1, nccl:recv 1<-0.
_PAIR = re.compile(r"^nccl:(?:send|recv) \d{1,6}(?:->|<-)(\d{1,6})$")
_HALVES = frozenset(BEGINS + ENDS)
_NO_KIND = -1
_KIND = {"": _NO_KIND} | {kind: code for code, kind in enumerate(tables.KINDS)}
# A trace of ten years is a broken clock.
_LONGEST_NS = 10 * 366 * 86_400 * 10**9
# Times since 1970 in µs are larger than this (May 2001), times since a start or a base are smaller (31 years).
_UNIX_US = 10**15


def read(path: Path) -> Reading:
    """Give the tables "spans" (in order of start, the longer first) and "traced_steps", and the facts of a trace file.

    Facts: rank, world_size, host, devices [{id, name, memory_bytes, ...}], backend, groups {name: {desc, size,
    ranks}}, base_time_ns, schema. A file cut off anywhere gives what stands before the cut, and a warning. Raises
    DlprofError where the file cannot be read or is no trace.
    """
    was_on = gc.isenabled()
    gc.disable()  # hundreds of thousands of live objects, none in a cycle: collecting costs half of the time
    try:
        return _read(path)
    finally:
        if was_on:
            gc.enable()


def peek(path: Path) -> dict[str, Any]:
    """Tell from the head of a file and its name whether it looks like a trace (`is_trace`), its rank, world_size, host.

    What neither the first 256 KB nor the name tells is absent. Raises DlprofError where the file cannot be opened.
    """
    with open_file(path):
        pass
    file = TraceFile(path, decoder(exact=False), PEEK_BYTES)
    found: dict[str, Any] = {"is_trace": False}
    try:
        begun = file.header()
    except DlprofError:
        return found
    if file.is_list:
        begun = bool(re.match(rb'\s*\{.{0,4000}?"ph"\s*:\s*"\w"', file.buffered, re.DOTALL))
    known = {"schemaVersion", "deviceProperties", "distributedInfo", "traceName"} & file.keys.keys()
    head = re.match(rb'\{[^{}\[\]]*"world_size"[^{}\[\]]*', file.buffered)
    # Where the head ends before the events, as it does in a very large job, the keys must do.
    if not begun and not (known and file.cut):
        return found
    facts = _header_facts(file.keys, path)
    if not begun and head:
        # A very large job's list of process groups is longer than what is looked at; rank and size stand before it.
        for name in ("rank", "world_size"):
            number = re.search(rb'"%s"\s*:\s*(\d+)\s*[,}]' % name.encode(), head[0])
            if number:
                facts[name] = int(number[1])
    return {"is_trace": True, **{k: facts[k] for k in ("rank", "world_size", "host") if k in facts}}


def _read(path: Path) -> Reading:
    try:
        return _decoded(path, exact=False)
    except BlurredTimes:
        return _decoded(path, exact=True)


def _decoded(path: Path, exact: bool) -> Reading:
    file: TraceFile[Event] = TraceFile(path, decoder(exact))
    if not file.header():
        what = "it is cut off before its first event" if file.cut else "JSON without traceEvents"
        raise DlprofError(f"{path}: not a torch-profiler trace: {what}")
    rows = _Rows(file.keys)
    for events in file.events():
        rows.add(events)
        events.clear()
    if file.is_list and not rows.seen:
        raise DlprofError(f"{path}: not a torch-profiler trace: a list without events")
    return rows.reading(path, file.cut, file.unreadable)


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


class _Rows:
    """The rows read so far, as columns; what is rare (bytes, groups) as row numbers and values."""

    def __init__(self, keys: Mapping[str, Any]) -> None:
        self.keys = keys
        self.seen = 0
        self.names = _Names()
        self.lanes = _Codes()
        self.places = _Places(self.names, self.lanes)
        self.device_lanes = _DeviceLanes(self.lanes)
        self.groups: dict[str, dict[str, Any]] = {}
        self.ranks_of = _Ranks()
        self.shapes_of = _Shapes()
        self.columns: dict[str, list[NDArray[Any]]] = defaultdict(list)
        self.count = 0
        self.bytes: dict[int, int] = {}
        self.copies: dict[int, tuple[str, str]] = {}
        self.collectives: dict[int, tuple[str, str, str]] = {}
        self.peers: dict[int, tuple[int, str | None]] = {}  # the rank, and in which group it has that number
        self.multiplied: dict[int, tuple[str, str]] = {}
        self.sizes: dict[int, int] = {}
        self.halves: dict[tuple[Scalar, Scalar], list[tuple[int, int, Event]]] = defaultdict(list)
        self.left_out: Counter[str] = Counter()
        self.bad_time = self.bad_duration = 0
        self.working_lanes: set[int] = set()

    def add(self, events: list[Event]) -> None:
        """Take the rows of some events."""
        whole = [e for e in events if type(e) in WHOLE]
        if len(whole) < len(events) and not _HALVES.isdisjoint(map(type, events)):
            for e in [e for e in events if type(e) in _HALVES]:
                self._half(e)
        self.seen += len(events)
        if whole:
            self._add(whole)

    def _half(self, e: Event) -> None:
        # The arrays that decoding left as they stand would keep a whole chunk alive.
        args = e.args
        if args is not NO_ARGS:
            args = msgspec.structs.replace(args, **{name: getattr(args, name).copy() for name in RAW})
        ns = exact_nanoseconds([e.ts])[0]
        if ns == NO_TIME:
            self.bad_time += 1
            return
        at = Decimal(int(ns)) / 1000
        half = msgspec.structs.replace(e, ts=at, args=args)
        mine = self.halves[e.pid, e.tid]
        mine.append((int(ns), len(mine), half))

    def _pairs(self) -> tuple[list[Event], int]:
        """Give the events that begin and end marks make, and the number of marks that found no partner."""
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
        kind = np.array([_KIND[k] for k in names.kind], dtype=np.int8)[what]
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
        call = kind == _KIND["runtime"]
        launch = np.full(len(events), -1, dtype=np.int64)
        on_device = self.device_lanes
        lane[device] = [
            on_device[e.pid, e.tid, e.args.device, e.args.stream] for e in compress(events, device.tolist())
        ]
        linked = np.flatnonzero(device | call)
        args = [e.args for e in compress(events, (device | call).tolist())]
        launch[linked] = integers([a.correlation for a in args])
        without = np.flatnonzero(launch[linked] <= 0)
        launch[linked[without]] = np.maximum(integers([args[i].correlation_id for i in without]), 0)
        launch[launch == 0] = -1
        # AMD tells a copy's bytes on the call, not on the copy.
        sizes = [a.size for a in args]
        for n in [] if sizes.count(None) == len(sizes) else [n for n, size in enumerate(sizes) if size is not None]:
            row, size = int(linked[n]), integer(args[n].size)
            if call[row] and launch[row] > 0 and size >= 0:
                self.sizes[int(launch[row])] = size

        first = self.count
        self._copies(first, np.flatnonzero((kind == _KIND["copy"]) | (kind == _KIND["set"])), events, what)
        for i in np.flatnonzero(kind == _KIND["communication"]):
            self._collective(first + int(i), events[i], bool(device[i]))
        for i in np.flatnonzero(np.array(names.multiplies)[what]):
            told = events[i].args
            shape = self.shapes_of[bytes(told.dims), bytes(told.types)]
            if shape[0]:
                self.multiplied[first + int(i)] = shape
        working = lane[(kind == _KIND["op"]) | call]
        self.working_lanes.update(np.flatnonzero(np.bincount(working)).tolist())

        for name, column in (("what", what), ("lane", lane), ("start", start), ("dur", dur), ("launch", launch)):
            self.columns[name].append(column)
        self.count += len(events)

    def _copies(self, first: int, rows: NDArray[np.int64], events: list[Event], what: NDArray[np.int32]) -> None:
        sizes = integers([events[i].args.bytes for i in rows])
        for i, size in zip(rows.tolist(), sizes.tolist(), strict=True):
            if size >= 0:
                self.bytes[first + i] = size
            kind = events[i].args.kind
            if isinstance(kind, str) and not self.names.direction[what[i]][0]:
                self.copies[first + i] = copy_of(kind)

    def _collective(self, row: int, e: Event, device: bool) -> None:
        args = e.args
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
        if collective in ("send", "recv"):
            self._peer(row, e, collective, group)

    def _peer(self, row: int, e: Event, collective: str, group: str) -> None:
        """Note whom an event sends to or receives from, where it tells."""
        peer = integer(e.args.destination if collective == "send" else e.args.source)
        if peer >= 0:
            self.peers[row] = (peer, None)
            return
        if e.name in ("c10d::send", "c10d::recv_"):  # tensors, group, rank, tag
            inputs = plain(e.args.inputs)
            peer = integer(inputs[2]) if isinstance(inputs, list) and len(inputs) > 2 else -1
        elif named := _PAIR.search(e.name):
            peer = int(named[1])
        if peer >= 0:
            self.peers[row] = (peer, group)

    def _group(self, args: Args) -> str:
        """Give a group's name (if it has none, its description or a name made of its ranks) and note what is told."""
        ranks = self.ranks_of[bytes(args.group_ranks)]
        text = "" if args.group_text is None else str(args.group_text)
        name = "" if args.group is None else str(args.group)
        if not name:
            name = text
        if not name and ranks:
            name = "ranks-" + hashlib.sha1(repr(ranks).encode(), usedforsecurity=False).hexdigest()[:8]
        if name and name not in self.groups:
            size = integer(args.group_size)
            told = {"desc": text, "size": size if size > 0 else len(ranks), "ranks": ranks}
            self.groups[name] = {k: v for k, v in told.items() if v}
        return name

    def _input(self, args: Args, collective: str, group: str) -> tuple[int, str]:
        """Give the bytes and the element type of a collective by its input tensors; -1 where they do not tell."""
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
            known = {**_groups(self.keys), **self.groups}
            size = known.get(group, next(iter(known.values())) if len(known) == 1 else {}).get("size", 0)
            return (total * size if size else -1), dtype
        return total, dtype

    def reading(self, path: Path, cut: str, unreadable: int) -> Reading:
        """Give everything as tables, facts and warnings."""
        warnings = []
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

        facts = _header_facts(self.keys, path)
        groups = {**self.groups, **_groups(self.keys)}
        if groups:
            facts["groups"] = groups
        spans = self._spans(groups)
        if self.count:
            base = facts.get("base_time_ns", 0)
            unix = int(spans["start_ns"].iloc[self.count // 2]) >= _UNIX_US * 1000
            if base and unix:
                warnings.append(f"{path.name}: its times are absolute already; baseTimeNanoseconds is not added")
            elif base:
                spans["start_ns"] += base
            elif not unix:
                warnings.append(f"{path.name}: its times have no base: they count from an unknown zero, not from 1970")
        return Reading(
            {"spans": tables.check("spans", spans), "traced_steps": tables.check("traced_steps", _steps(spans))},
            facts,
            tuple(warnings),
        )

    def _peers(self, groups: Mapping[str, Mapping[str, Any]]) -> NDArray[np.int64]:
        """Give each row's peer as a rank of the job; −1 where only its number in an unknown group is told."""
        found = np.full(self.count, -1, dtype=np.int64)
        for row, (peer, group) in self.peers.items():
            if group is not None:
                told = groups.get(group) or (next(iter(groups.values())) if len(groups) == 1 and not group else {})
                ranks = told.get("ranks") or []
                peer = ranks[peer] if peer < len(ranks) else -1
            found[row] = peer
        return found

    def _spans(self, groups: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
        if not self.count:
            return tables.empty("spans")
        what, lane, start, dur, launch = (
            np.concatenate(self.columns.pop(name)) for name in ("what", "lane", "start", "dur", "launch")
        )
        names = self.names
        size = np.full(self.count, -1, dtype=np.int64)
        size[list(self.bytes)] = list(self.bytes.values())
        kinds = np.array(names.kind)
        if self.sizes:
            for i in np.flatnonzero(np.isin(kinds, ("copy", "set"))[what] & (size < 0)):
                size[i] = self.sizes.get(int(launch[i]), -1)

        def sparse(code_of_name: Iterable[str], rows: Mapping[int, str]) -> Any:
            categories = _Codes({"": 0})
            codes = np.array([categories[text] for text in code_of_name], dtype=np.int32)[what]
            codes[list(rows)] = [categories[text] for text in rows.values()]
            return _categorical(codes, categories)

        none = [""] * len(names.name)
        categories = {
            "lane": _coded(self._lane_names(lane, np.isin(kinds, _WORK)[what]), lane),
            "kind": _categorical(np.array([_KIND[k] for k in names.kind])[what], tables.KINDS),
            "name": _coded(names.name, what),
            "copy": sparse([c[0] for c in names.direction], {i: c[0] for i, c in self.copies.items()}),
            "memory": sparse([c[1] for c in names.direction], {i: c[1] for i, c in self.copies.items()}),
            "collective": sparse(names.collective, {i: c[0] for i, c in self.collectives.items()}),
            "group": sparse(none, {i: c[1] for i, c in self.collectives.items()}),
            "dtype": sparse(
                none,
                {i: c[2] for i, c in self.collectives.items()} | {i: m[1] for i, m in self.multiplied.items()},
            ),
            "shape": sparse(none, {i: m[0] for i, m in self.multiplied.items()}),
        }
        order = _in_time(start, dur)
        columns: dict[str, Any] = {name: column[order] for name, column in categories.items()}
        columns |= {"start_ns": start[order], "dur_ns": dur[order], "launch": launch[order], "bytes": size[order]}
        columns["peer"] = self._peers(groups)[order]
        return pd.DataFrame({name: columns[name] for name in tables.SPANS}, copy=False)

    def _lane_names(self, lane: NDArray[np.int32], works: NDArray[np.bool_]) -> list[str]:
        """Name every lane; the device without a number is the one with most work."""
        rows = np.bincount(lane, minlength=len(self.lanes))
        work = np.bincount(lane[works], minlength=len(self.lanes))
        places: list[tuple[str, str] | None] = []
        weight: Counter[str] = Counter()
        for code, key in enumerate(self.lanes):
            if not key[0]:
                places.append(None)
                continue
            _, pid, tid, device, stream = key
            place = (label(pid if device is None else device), label(tid if stream is None else stream))
            places.append(place)
            weight[place[0]] += int(work[code]) * 2**32 + int(rows[code])
        main = min(weight, key=lambda d: (-weight[d], len(d), d), default="")
        return [
            f"host:{label(key[2])}" if place is None else f"device{'' if place[0] == main else place[0]}:{place[1]}"
            for key, place in zip(self.lanes, places, strict=True)
        ]


def _categorical(codes: NDArray[Any], categories: Iterable[str]) -> Any:
    return pd.Categorical.from_codes(codes, categories=pd.Index(list(categories)))


def _coded(names: list[str], codes: NDArray[np.int32]) -> Any:
    """Give a categorical of codes whose names may repeat; only names that rows bear become categories, in order."""
    used = np.flatnonzero(np.bincount(codes, minlength=len(names)))
    order = sorted({names[i] for i in used})
    place = {name: i for i, name in enumerate(order)}
    mapped = np.zeros(len(names), dtype=np.int32)
    mapped[used] = [place[names[i]] for i in used]
    return _categorical(mapped[codes], order)


def _in_time(start: NDArray[np.int64], dur: NDArray[np.int64]) -> NDArray[np.int64]:
    """Give the order by start, the longer first where two start together.

    A trace is a few long runs that are in order already, which a stable sort by one key merges fast.
    """
    order = np.argsort(start, kind="stable")
    same = np.diff(start[order]) == 0
    tied = np.flatnonzero(np.concatenate((same, [False])) | np.concatenate(([False], same)))
    order[tied] = order[tied][np.lexsort((-dur[order[tied]], start[order[tied]]))]
    return order


def _steps(spans: pd.DataFrame) -> pd.DataFrame:
    """Give the steps that the host marks, each number once: the longest of its marks."""
    marks = [_STEP.fullmatch(str(n)) for n in spans["name"].cat.categories]
    if not any(marks):
        return tables.empty("traced_steps")
    number = np.array([int(m[1]) if m else -1 for m in marks], dtype=np.int64)
    # By the categories' codes: looking for a name in every row, as text, takes longer than all that follows.
    codes = spans["name"].cat.codes.to_numpy()
    rows = np.flatnonzero((number >= 0)[codes])
    kind, lane = spans["kind"].array[rows], spans["lane"].array[rows]
    rows = rows[[k == "annotation" and str(of).startswith("host:") for k, of in zip(kind, lane, strict=True)]]
    step, start, dur = number[codes[rows]], spans["start_ns"].to_numpy()[rows], spans["dur_ns"].to_numpy()[rows]
    longest = np.lexsort((start, -dur, step))
    first = longest[np.diff(step[longest], prepend=-1) != 0]
    first = first[np.lexsort((step[first], start[first]))]
    return pd.DataFrame({"step": step[first], "start_ns": start[first], "dur_ns": dur[first]})


def _header_facts(keys: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Give what the keys beside the events say; the rank from the file's name where they say none."""
    facts: dict[str, Any] = {}
    distributed = keys.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    for name in ("rank", "world_size"):
        if (number := integer(distributed.get(name))) >= 0:
            facts[name] = number
    if "rank" not in facts and (rank := rank_in(path.name)) is not None:
        facts["rank"] = rank
    texts = {"host": keys.get("host_name") or keys.get("hostname"), "backend": distributed.get("backend")}
    facts |= {name: text for name, text in texts.items() if isinstance(text, str) and text}
    devices = keys.get("deviceProperties")
    if isinstance(devices, list):  # an empty one says that the process saw no device
        facts["devices"] = [_device(d) for d in devices if isinstance(d, dict)]
    if groups := _groups(keys):
        facts["groups"] = groups
    if (base := integer(keys.get("baseTimeNanoseconds"))) > 0 and base < 2**62:
        facts["base_time_ns"] = base
    if "schemaVersion" in keys:
        facts["schema"] = keys["schemaVersion"]
    return facts


def _device(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Give a device's id, name, memory_bytes, and what else the file says of it under the file's own names."""
    renamed = {"totalGlobalMem": "memory_bytes"}
    return {renamed.get(k, k): v for k, v in properties.items()}


def _groups(keys: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    distributed = keys.get("distributedInfo")
    listed = distributed.get("pg_config") if isinstance(distributed, dict) else None
    groups = {}
    for group in listed if isinstance(listed, list) else []:
        if isinstance(group, dict) and group.get("pg_name") is not None:
            ranks = ranks_of(group.get("ranks"))
            size = integer(group.get("pg_size"))
            told = {"desc": group.get("pg_desc"), "size": size if size > 0 else len(ranks), "ranks": ranks}
            groups[str(group["pg_name"])] = {k: v for k, v in told.items() if v}
    return groups
