"""Decodes one torch-profiler trace into plain columns, and classifies each event.

It needs NumPy but no pandas, so that a trace can be decoded while another process still imports pandas (prefetch.py).
`Collectives` collects the collectives: verb, group, bytes, order, and peers. `Numbers` collects the sequence numbers of
autograd, which show the operator that a backward function belongs to. Few measures need them: they are decoded only
once a trace names a module, or an operator with which a script may have printed something.
"""

from __future__ import annotations

import contextlib
import gc
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from dlprof import schema
from dlprof.errors import DlprofError
from dlprof.read import limits
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
    made,
    nanoseconds,
    numbers_in,
    numbers_of,
    shapes_in,
    tensors,
)
from dlprof.read.kineto.format import groups_in
from dlprof.read.kineto.json_stream import TraceFile, plain
from dlprof.read.kineto.patterns import (
    FUNCTION,
    MULTIPLIES,
    NO_ROWS,
    NUMBERS_FOR,
    UNNUMBERED,
    collective_of,
    copy_of,
    element_type,
    kind_of,
)

_HALVES = frozenset(BEGINS + ENDS)
KIND = {kind: code for code, kind in enumerate(schema.KINDS)}
_NO_KIND = -1
Processes = frozenset[Scalar] | None  # the processes to read events of; None: all


class Names(dict[tuple[str, str], int]):
    """Numbers every (category, name), and classifies each once."""

    def __init__(self) -> None:
        super().__init__()
        self.name: list[str] = []
        self.kind: list[int] = []  # in KIND
        self.device: list[bool] = []
        self.direction: list[tuple[str, str]] = []  # of a copy, and the host's memory
        self.collective: list[str] = []
        self.multiplies: list[bool] = []
        self.numbered: list[bool] = []  # autograd may number it
        self.runs: list[bool] = []  # a function of the backward pass
        self.wants_numbers = False  # whether autograd's numbers are needed

    def __missing__(self, key: tuple[str, str]) -> int:
        category, name = key
        side, kind = kind_of(category, name) or ("host", "")
        self.name.append(name)
        self.kind.append(KIND.get(kind, _NO_KIND))
        self.device.append(side == "device")
        self.direction.append(copy_of(name) if kind == "copy" else ("", ""))
        self.collective.append(collective_of(name) if kind == "communication" else "")
        self.multiplies.append(kind == "op" and MULTIPLIES.search(name) is not None)
        self.numbered.append(kind == "op" and UNNUMBERED.search(name) is None)
        self.runs.append(FUNCTION.match(name) is not None)
        self.wants_numbers |= NUMBERS_FOR.search(name) is not None
        self[key] = code = len(self)
        return code


class Lanes(dict[tuple[Any, ...], int]):
    """Numbers every lane, (False, pid, tid) or (True, pid, tid, device, stream), in order of appearance."""

    def __missing__(self, key: tuple[Any, ...]) -> int:
        self[key] = code = len(self)
        return code


class Places(dict[tuple[str, str, Scalar, Scalar], int]):
    """Numbers every (category, name, pid, tid): one look-up for each event gives its class and its thread."""

    def __init__(self, names: Names, lanes: Lanes) -> None:
        super().__init__()
        self.names = names
        self.lanes = lanes
        self.what: list[int] = []
        self.lane: list[int] = []  # of a host event; a device event's lane also depends on its args

    def __missing__(self, key: tuple[str, str, Scalar, Scalar]) -> int:
        category, name, pid, tid = key
        what = self.names[category, name]
        on_host = self.names.kind[what] != _NO_KIND and not self.names.device[what]
        self.what.append(what)
        self.lane.append(self.lanes[False, pid, tid] if on_host else -1)
        self[key] = code = len(self)
        return code


class Rows:
    """The contents of a trace file: a row for each event with a duration, in order; rare values by row number.

    Picklable. It holds no reference to the bytes that were read.
    """

    what: NDArray[np.int32]  # number in `names`
    lane: NDArray[np.int32]  # number in `lanes`
    start: NDArray[np.int64]  # ns
    dur: NDArray[np.int64]
    launch: NDArray[np.int64]
    made: Made  # autograd's numbers, if they are wanted

    def __init__(self, keys: dict[str, Any]) -> None:
        self.keys = keys  # the keys next to the events
        self.warnings: list[str] = []
        self.names = Names()
        self.lanes = Lanes()
        self.bytes: dict[int, int] = {}
        self.copies: dict[int, tuple[str, str]] = {}  # direction and host memory, if the name has neither
        self.exchanges = Collectives(self.bytes)
        self.multiplied: dict[int, tuple[str, str]] = {}  # shapes, element type
        self.sizes: dict[int, int] = {}  # of copies, by launch

    def __len__(self) -> int:
        return len(self.what)

    def join(self, other: Rows, first: int) -> None:
        """Add the rare values of later rows; row 0 of `other` becomes row `first`."""
        for mine, theirs in zip(self._rare(), other._rare(), strict=True):
            mine.update({first + row: value for row, value in theirs.items()})
        self.sizes.update(other.sizes)
        groups = self.exchanges.groups
        groups |= other.exchanges.groups | groups  # if both have a group, the earlier facts count

    def _rare(self) -> tuple[dict[int, Any], ...]:
        rare = self.exchanges
        by_row = (rare.collectives, rare.sequences, rare.peers, rare.gathered, rare.pieces)
        return (self.bytes, self.copies, self.multiplied, *by_row)


def decode(path: Path, processes: Processes = None) -> Rows:
    """Return the rows of a file, or of some of its processes; raise DlprofError if it is no trace or unreadable."""
    with no_garbage_collection():
        try:
            return _decoded(path, processes, exact=False)
        except BlurredTimes:
            return _decoded(path, processes, exact=True)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect no garbage, which would cost half of the time: there are very many objects, and no cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _decoded(path: Path, processes: Processes, exact: bool) -> Rows:
    file = opened(path, exact)
    reader = Reader(file.keys)
    reader.take(file, processes)
    return reader.end(file)


def opened(path: Path, exact: bool) -> TraceFile[Event]:
    """Return a trace file, read up to its first event; raise DlprofError if it is no trace."""
    file: TraceFile[Event] = TraceFile(path, decoder(exact))
    if not file.header():
        what = "it is cut off before its first event" if file.cut else "JSON without traceEvents"
        raise DlprofError(f"{path}: not a torch-profiler trace: {what}")
    return file


class Reader:
    """Makes rows from events. `lost`: reason → number of events without a row. Picklable, as rows are."""

    def __init__(self, keys: dict[str, Any]) -> None:
        self.rows = Rows(keys)
        self.places = Places(self.rows.names, self.rows.lanes)
        self.seen = self.count = self.unreadable = 0
        # what, lane, start, dur, launch: one part for each chunk
        kinds = ("i4", "i4", "i8", "i8", "i8")
        self.columns: list[list[NDArray[Any]]] = [[np.empty(0, dtype)] for dtype in kinds]
        self.numbers = Numbers()
        self.halves: dict[tuple[Scalar, Scalar], list[tuple[int, int, Event]]] = defaultdict(list)
        self.lost: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()  # categories

    def take(self, file: TraceFile[Event], processes: Processes = None) -> None:
        """Read the remaining events of a file, or those of some processes, up to the limits."""
        most = limits.limit(limits.MOST_ROWS)
        for events in file.events():
            mine = events if processes is None else [e for e in events if getattr(e, "pid", None) in processes]
            over = self.seen + len(mine) > most
            self.add(mine[: most - self.seen] if over else mine)
            events.clear()
            if over:
                self.rows.warnings.append(limits.too_many(file.path, "events", limits.MOST_ROWS))
            if len(self.places) > limits.limit(limits.MOST_NAMES):
                what = "different names or threads"
                self.rows.warnings.append(limits.too_many(file.path, what, limits.MOST_NAMES))
            if self.rows.warnings:
                break
        self.unreadable += file.unreadable

    def fits(self, other: Reader) -> bool:
        """Return whether the limits also allow the events of another reader."""
        names = len(self.places) + len(other.places)
        return self.seen + other.seen <= limits.limit(limits.MOST_ROWS) and names <= limits.limit(limits.MOST_NAMES)

    def join(self, other: Reader) -> None:
        """Add the rows of a reader of later events. Its columns are not copied before `end`."""
        for place in other.places:
            self.places[place]  # numbers it
        rows, theirs, first = self.rows, other.rows, self.count
        what = np.array([rows.names[key] for key in theirs.names], dtype=np.int32)
        lane = np.array([rows.lanes[key] for key in theirs.lanes], dtype=np.int32)
        whats, lanes, *others = other.columns
        columns = ([what[part] for part in whats], [lane[part] for part in lanes], *others)
        for parts, more in zip(self.columns, columns, strict=True):
            parts += more
        rows.join(theirs, first)
        self.numbers.join(other.numbers, first)
        for thread, marks in other.halves.items():
            before = len(self.halves[thread])
            self.halves[thread] += [(ns, before + number, half) for ns, number, half in marks]
        self.lost.update(other.lost)
        self.unknown.update(other.unknown)
        self.seen += other.seen
        self.count += other.count
        self.unreadable += other.unreadable

    def compact(self) -> None:
        """Make one array of each column's parts."""
        self.columns = [[np.concatenate(parts)] for parts in self.columns]

    def add(self, events: list[Event]) -> None:
        """Add the rows of some events."""
        kinds = set(map(type, events))
        of = ExactEvent if ExactEvent in kinds else Event  # one decoder makes all
        if not _HALVES.isdisjoint(kinds):
            for e in [e for e in events if type(e) in _HALVES]:
                self._half(e)
        self.seen += len(events)
        if whole := [e for e in events if type(e) is of]:
            self._add(whole)

    def _half(self, e: Event) -> None:
        ns = int(exact_nanoseconds([e.ts])[0])
        if ns == NO_TIME:
            self.lost["events without a usable time"] += 1
            return
        # Raw args would keep a whole chunk of the file alive.
        half = msgspec.structs.replace(e, ts=Decimal(ns) / 1000, args=e.args.copy())
        marks = self.halves[e.pid, e.tid]
        marks.append((ns, len(marks), half))

    def _pairs(self) -> list[Event]:
        """Return events made from pairs of begin and end marks."""
        made: list[Event] = []
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
                    self.lost["begin or end marks without a partner"] += 1
            self.lost["begin or end marks without a partner"] += len(opened)
        return made

    # Comprehensions throughout: a quarter faster than maps over attrgetters.
    def _add(self, events: list[Event]) -> None:
        """Add events that have a start and a duration."""
        rows, names, places = self.rows, self.rows.names, self.places
        place = np.fromiter([places[e.cat, e.name, e.pid, e.tid] for e in events], np.int32, len(events))
        what = np.array(places.what, dtype=np.int32)[place]
        lane = np.array(places.lane, dtype=np.int32)[place]
        start = exact_nanoseconds([e.ts for e in events])
        dur = nanoseconds([e.dur for e in events])
        kind = np.array(names.kind, dtype=np.int8)[what]
        known, timed, lasting = kind != _NO_KIND, start != NO_TIME, (dur >= 0) & (dur <= limits.LONGEST_NS)
        for i in np.flatnonzero(~known).tolist():
            if not NO_ROWS.fullmatch(events[i].cat):
                self.unknown[events[i].cat or "none"] += 1
        self.lost["events without a usable time"] += int((known & ~timed).sum())
        self.lost["events with a negative or absurd duration"] += int((known & timed & ~lasting).sum())
        keep = known & timed & lasting
        if not keep.all():
            events = list(compress(events, keep.tolist()))
            what, lane, start, dur, kind = what[keep], lane[keep], start[keep], dur[keep], kind[keep]
        if not events:
            return

        device, call = np.array(names.device)[what], kind == KIND["runtime"]
        launch = np.full(len(events), -1, dtype=np.int64)
        linked = np.flatnonzero(device | call)
        args = links([e.args for e in compress(events, (device | call).tolist())])
        of_device = compress(args, device[linked].tolist())
        lane[device] = [
            rows.lanes[True, e.pid, e.tid, a.device, a.stream]
            for e, a in zip(compress(events, device.tolist()), of_device, strict=True)
        ]
        launch[linked] = integers([a.correlation for a in args])
        without = np.flatnonzero(launch[linked] <= 0)
        launch[linked[without]] = np.maximum(integers([args[i].correlation_id for i in without]), 0)
        launch[launch == 0] = -1
        # AMD writes a copy's bytes on the call, not on the copy.
        for row, size in [(row, a.size) for row, a in zip(linked.tolist(), args, strict=True) if a.size is not None]:
            if call[row] and launch[row] > 0 and integer(size) >= 0:
                rows.sizes[int(launch[row])] = integer(size)

        def chosen(mask: NDArray[np.bool_]) -> zip[tuple[int, Any]]:
            at = np.flatnonzero(mask).tolist()
            return zip(at, args_of([events[i].args for i in at]), strict=True)

        first = self.count
        for i, values in chosen((kind == KIND["copy"]) | (kind == KIND["set"])):
            if (size := integer(values.bytes)) >= 0:
                rows.bytes[first + i] = size
            if isinstance(values.kind, str) and not names.direction[what[i]][0]:
                rows.copies[first + i] = copy_of(values.kind)
        for i, values in chosen(kind == KIND["communication"]):
            rows.exchanges.add(first + i, events[i], values, names.collective[what[i]], bool(device[i]))
        for i, values in chosen(np.array(names.multiplies)[what]):
            shape = shapes_in(bytes(values.dims), bytes(values.types))
            if shape[0]:
                rows.multiplied[first + i] = shape
        numbered = np.flatnonzero(np.array(names.numbered)[what])
        runs = np.array(names.runs)[what[numbered]]
        self.numbers.add(first + numbered, runs, [events[i].args for i in numbered.tolist()], names.wants_numbers)
        columns: tuple[NDArray[Any], ...] = (what, lane, start, dur, launch)
        for parts, column in zip(self.columns, columns, strict=True):
            parts.append(column)
        self.count += len(events)

    def end(self, file: TraceFile[Event]) -> Rows:
        """Return all rows that were read; raise DlprofError if the file is no trace."""
        if file.is_list and not self.seen:
            raise DlprofError(f"{file.path}: not a torch-profiler trace: a list without events")
        rows = self.rows
        warnings = [f"{file.cut}; {self.count:,} spans before that are used"] if file.cut else []
        self.add(self._pairs())
        rows.exchanges.settle(rows.keys)
        self.lost["events that could not be decoded"] += self.unreadable
        warnings += [f"{count:,} {what} are left out" for what, count in self.lost.items() if count]
        for category, count in self.unknown.most_common(5):
            warnings.append(f"{count:,} events of the unknown category {category!r} are left out")
        rows.what, rows.lane, rows.start, rows.dur, rows.launch = map(np.concatenate, self.columns)
        rows.made = self.numbers.end(rows.names.wants_numbers)
        kind = np.array(rows.names.kind, dtype=np.int8)[rows.what]
        working = np.bincount(rows.lane[(kind == KIND["op"]) | (kind == KIND["runtime"])], minlength=len(rows.lanes))
        processes = {key[1] for key, code in rows.lanes.items() if working[code]}
        if len(processes) > 1:
            warnings.append(
                f"holds the work of {len(processes)} processes; it is read as one rank: "
                "where ranks were merged into one file, give their own files"
            )
        if not self.count:
            warnings.append("the trace holds no spans")
        rows.warnings += [f"{file.path.name}: {warning}" for warning in warnings]
        return rows


# How torch names what NCCL sends from one rank of a group to another: nccl:send 0->1, nccl:recv 1<-0.
_PAIR = re.compile(r"^nccl:(?:send|recv) \d{1,6}(?:->|<-)(\d{1,6})$")

# No rank sends so many rows, nor elements.
_MOST_ROWS = 1 << 48


class Collectives:
    """The collectives of a trace by the numbers of their rows, and the groups that they name.

    `bytes_of`: bytes by row, to which those of the collectives are added.
    """

    def __init__(self, bytes_of: dict[int, int]) -> None:
        self._bytes = bytes_of
        self.groups: dict[str, dict[str, Any]] = {}
        self.collectives: dict[int, tuple[str, str, str]] = {}  # verb, group, element type
        self.sequences: dict[int, tuple[int, str]] = {}  # number, communicator ("": unknown)
        self.peers: dict[int, tuple[int, str | None]] = {}  # the rank, and in which group it has that number
        self.pieces: dict[int, str] = {}  # of all-to-alls: what goes to each rank and comes from each, see schema.SPANS
        self.gathered: dict[
            int, tuple[int, str]
        ] = {}  # of all_gathers counted by their input: its bytes, and the group

    def add(self, row: int, e: Event, args: Args, verb: str, device: bool) -> None:
        """Add a collective on a device or its host. `verb`: as its name gives it."""
        collective = (collective_of(args.collective) if isinstance(args.collective, str) else "") or verb
        group = self._group(args)
        dtype, width = element_type(args.dtype) if isinstance(args.dtype, str) else ("", 0)
        elements = [integer(args.elements_in), integer(args.elements_out)]
        if collective in ("all_gather", "recv"):
            elements.reverse()
        count = next((n for n in elements if n > 0), max(elements))
        size = count * width if width and count >= 0 else -1
        # torch's marks (gloo:all_reduce) carry the tensor they send; the arguments of c10d's calls have no fixed order.
        if size < 0 and not device and not e.name.startswith(("c10d", "_c10d", "record_param_comms")):
            size, dtype = _input(args)
            if collective == "all_gather" and size >= 0:  # counted by its output: what every rank of the group gives
                self.gathered[row] = (size, group)
                size = -1
        if 0 <= size < 2**62:
            self._bytes[row] = size
        if collective or group or dtype:
            self.collectives[row] = (collective, group, dtype)
        sequence = integer(args.sequence)
        if sequence >= 0 or args.communicator is not None:
            self.sequences[row] = (sequence, "" if args.communicator is None else str(args.communicator))
        if collective in ("send", "recv"):
            self._peer(row, e, args, collective, group)
        elif collective == "all_to_all" and (pieces := _pieces(e, args)):
            self.pieces[row] = pieces

    def _peer(self, row: int, e: Event, args: Args, collective: str, group: str) -> None:
        """Note the peer of a send or receive, if it is known."""
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
        """Return a group's name, else its description or a name made from its ranks; note its facts."""
        ranks = numbers_in(bytes(args.group_ranks))
        text = "" if args.group_text is None else str(args.group_text)
        name = ("" if args.group is None else str(args.group)) or text
        if not name and ranks:
            import hashlib  # loads OpenSSL, while another core waits for the first trace

            name = "ranks-" + hashlib.sha1(repr(ranks).encode(), usedforsecurity=False).hexdigest()[:8]
        if name and name not in self.groups:
            size = integer(args.group_size)
            about = {"desc": text, "size": size if size > 0 else len(ranks), "ranks": ranks}
            self.groups[name] = {k: v for k, v in about.items() if v}
        return name

    def settle(self, keys: Mapping[str, Any]) -> None:
        """Compute bytes that need the size of a group. `keys`: the trace's keys next to the events."""
        known = {**groups_in(keys), **self.groups}
        only = next(iter(known.values())) if len(known) == 1 else {}
        for row, (size, group) in self.gathered.items():
            ranks = known.get(group, only).get("size", 0)
            if ranks and size * ranks < 2**62:
                self._bytes[row] = size * ranks


def _pieces(e: Event, args: Args) -> str:
    """Return what an all-to-all gives each rank and takes from each: "3,5>4,1" in rows, "640>400" in elements of all.

    "": not known. torch's profiler abridges lists of more than 30 ranks, which are then known in all alone.
    """
    give, take = numbers_in(bytes(args.split_in)), numbers_in(bytes(args.split_out))
    if not give and e.name == "c10d::alltoall_base_":  # output, input, group, what is taken, what is given, ...
        inputs = plain(args.inputs)
        if isinstance(inputs, list) and len(inputs) > 4:
            take, give = numbers_of(inputs[3]), numbers_of(inputs[4])
    if not give or len(give) != len(take):
        give, take = [integer(args.elements_in)], [integer(args.elements_out)]
    if not all(0 <= n < _MOST_ROWS for n in (*give, *take)):
        return ""
    return f"{','.join(map(str, give))}>{','.join(map(str, take))}"


def _input(args: Args) -> tuple[int, str]:
    """Return the bytes and the element type of a collective by its input tensors; -1 where they are unknown."""
    inputs = tensors(bytes(args.dims), bytes(args.types))
    if not inputs:
        return -1, ""
    return sum(math.prod(shape) * width for shape, _, width in inputs), inputs[0][1]


# Separates the args of two events; no JSON contains it.
_APART = b"\0"

# Args with a number have this key. Operators of an optimizer often lack it, so whole groups of 64 are skipped.
_NUMBER, _GROUP = b'"Sequence number"', 64


class Made(NamedTuple):
    """Autograd's numbers of the rows that have any."""

    row: NDArray[np.int64]
    number: NDArray[np.int64]  # autograd's; −1: none
    maker: NDArray[np.int32]  # thread that made a backward function; 0: none


class _Text(NamedTuple):
    row: NDArray[np.int64]
    runs: NDArray[np.bool_]
    args: bytes


class Numbers:
    """Collects autograd's numbers from the args of operators. Picklable."""

    def __init__(self) -> None:
        self._known: list[Made] = []
        self._texts: list[_Text] = []

    def add(self, row: NDArray[np.int64], runs: NDArray[np.bool_], args: Sequence[msgspec.Raw], wanted: bool) -> None:
        """Add the args of some rows. `runs`: which rows are backward functions. `wanted`: decode them now."""
        groups = [_APART.join(args[at : at + _GROUP]) for at in range(0, len(args), _GROUP)]
        numbered = [_NUMBER in group for group in groups]
        if not any(numbered):
            return
        mine = np.repeat(numbered, _GROUP)[: len(row)]
        row, runs = row[mine], runs[mine]
        if wanted:
            self._known.append(_decoded_numbers(row, runs, list(compress(args, mine.tolist()))))
        else:
            self._texts.append(_Text(row, runs, _APART.join(compress(groups, numbered))))

    def join(self, other: Numbers, first: int) -> None:
        """Add the numbers of later rows; row 0 of `other` becomes row `first`."""
        self._known += [one._replace(row=one.row + first) for one in other._known]
        self._texts += [one._replace(row=one.row + first) for one in other._texts]

    def end(self, wanted: bool) -> Made:
        """Return the numbers; texts are decoded only if `wanted`."""
        for row, runs, text in self._texts if wanted else ():
            args = [msgspec.Raw(one) for one in text.split(_APART)]
            if len(args) == len(row):  # else they were no JSON
                self._known.append(_decoded_numbers(row, runs, args))
        self._texts.clear()
        none = Made(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int32))
        parts: Any = zip(none, *self._known, strict=True)
        return Made(*map(np.concatenate, parts))


def _decoded_numbers(row: NDArray[np.int64], runs: NDArray[np.bool_], args: Sequence[msgspec.Raw]) -> Made:
    numbers = made(args)
    number, maker = integers([one.number for one in numbers]), np.zeros(len(row), dtype=np.int32)
    threads = integers([one.thread for one in compress(numbers, runs.tolist())])
    maker[runs] = np.where(threads < 2**31, np.maximum(threads, 0), 0)
    known = (number >= 0) | (maker > 0)
    return Made(row[known], number[known], maker[known])
