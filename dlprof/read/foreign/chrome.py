"""Chrome traces that are not PyTorch's: all events as columns, with the names of processes.

In these, the name of its process, not a category, tells what an event is. Marks of begin and end become one
event.

Makes the table "spans" of columns that name only what a format knows; all else is unknown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Union

import msgspec
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.errors import DlprofError
from dlprof.read import limits
from dlprof.read.kineto.events import NO_TIME, Scalar, nanoseconds
from dlprof.read.kineto.json_stream import NOT_JSON, TraceFile, plain

_LONGEST_NS = 10 * 366 * 86_400 * 10**9


class _Event(msgspec.Struct, tag_field="ph", tag="X", gc=False):
    name: str = ""
    pid: Scalar = None
    tid: Scalar = None
    # As text, decimal microseconds since 1970 keep their digits.
    ts: msgspec.Raw = msgspec.Raw(b"null")
    dur: Scalar = None
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _Begin(_Event, tag="B"):
    pass


class _End(_Event, tag="E"):
    pass


class _Meta(msgspec.Struct, tag_field="ph", tag="M", gc=False):
    name: str = ""
    pid: Scalar = None
    tid: Scalar = None
    args: msgspec.Raw = msgspec.Raw(b"{}")


_OTHERS = tuple(
    msgspec.defstruct(f"Other{ord(phase)}", [], tag_field="ph", tag=phase, gc=False)
    for phase in "sftiICPNODbneSTpFRcVv(),aL"
)
_EVENTS: Any = msgspec.json.Decoder(list[Union[(_Event, _Begin, _End, _Meta, *_OTHERS)]])  # type: ignore[valid-type]
_ELEMENTS = msgspec.json.Decoder(list[msgspec.Raw])


class Place(NamedTuple):
    """What an event is named and its process, as in the file."""

    name: str
    pid: Scalar


@dataclass
class ChromeTrace:
    """The events of a file in its order; `place` numbers `places`.

    `processes`: names by pid. `meta`: the other arguments of metadata, by name.
    `args`: row → args as bytes of JSON, for the events that want them.
    """

    places: list[Place] = field(default_factory=list)
    place: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    start: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    dur: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    args: dict[int, bytes] = field(default_factory=dict)
    processes: dict[Scalar, str] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def decode(array: bytes | memoryview) -> list[Any]:
    """Decode an array of events; leave out those with fields of unexpected types."""
    try:
        return _EVENTS.decode(array)  # type: ignore[no-any-return]
    except msgspec.ValidationError:
        found: list[Any] = []
        for element in _ELEMENTS.decode(array):
            try:
                found += _EVENTS.decode(b"[" + bytes(element) + b"]")
            except msgspec.ValidationError:  # noqa: PERF203 - a malformed event costs only itself
                continue
        return found


def read(path: Path, wants: Callable[[str], bool]) -> ChromeTrace:
    """Return the events of a file, with args for names that `wants` accepts; raise DlprofError if it is none.

    The ranks of one file that are read one after the other share what was decoded.
    """
    try:
        stat = path.stat()
    except OSError as e:
        raise DlprofError(f"{path}: cannot be read: {e.strerror}") from None
    return _read(path, (stat.st_mtime_ns, stat.st_size), wants)


@lru_cache(maxsize=1)
def _read(path: Path, _stamp: tuple[int, int], wants: Callable[[str], bool]) -> ChromeTrace:
    file: TraceFile[Any] = TraceFile(path, decode)
    if not file.header():
        raise DlprofError(f"{path}: JSON without events")
    trace = ChromeTrace()
    reader = _Reader(trace, wants)
    for events in file.events():
        reader.add(events)
        if reader.count > limits.limit(limits.MOST_ROWS) or len(trace.places) > limits.limit(limits.MOST_NAMES):
            trace.warnings.append(limits.too_many(path, "events", limits.MOST_ROWS))
            break
    reader.end()
    if file.cut and file.cut.startswith("the gzip"):
        trace.warnings.append(f"{path.name}: {file.cut}; what stands before that is used")
    return trace


class _Reader:
    def __init__(self, trace: ChromeTrace, wants: Callable[[str], bool]) -> None:
        self.trace, self._wants = trace, wants
        self.count = 0
        self._number: dict[Place, int] = {}
        self._columns: list[list[NDArray[Any]]] = [[], [], []]
        self._open: dict[tuple[Scalar, Scalar], list[tuple[Any, int]]] = defaultdict(list)

    def add(self, events: list[Any]) -> None:
        """Take the rows of some events."""
        whole: list[tuple[Any, int | None, bytes]] = []  # event, duration in ns, args of its end
        for e in events:
            kind = type(e)
            if kind is _Event:
                whole.append((e, None, b""))
            elif kind is _Begin:
                ns = int(nanoseconds([_digits(e.ts)])[0])
                mark = msgspec.structs.replace(e, ts=msgspec.Raw(bytes(e.ts)), args=msgspec.Raw(bytes(e.args)))
                self._open[e.pid, e.tid].append((mark, ns))
            elif kind is _End:
                stack = self._open[e.pid, e.tid]
                if stack:
                    begin, ns = stack.pop()
                    end = int(nanoseconds([_digits(e.ts)])[0])
                    whole.append((begin, end - ns if NO_TIME not in (ns, end) else -1, bytes(e.args)))
            elif kind is _Meta:
                self._meta(e)
        if whole:
            self._rows(whole)

    def _rows(self, whole: list[tuple[Any, int | None, bytes]]) -> None:
        start = nanoseconds([_digits(e.ts) for e, *_ in whole])
        given = nanoseconds([e.dur if ns is None else 0 for e, ns, *_ in whole])
        dur = np.array([-2 if ns is None else ns for _, ns, *_ in whole], dtype=np.int64)
        dur = np.where(dur == -2, given, dur)
        numbers = []
        for e, *_ in whole:
            place = Place(e.name, e.pid)
            number = self._number.get(place)
            if number is None:
                number = self._number[place] = len(self.trace.places)
                self.trace.places.append(place)
            numbers.append(number)
        keep = (start != NO_TIME) & (dur >= 0) & (dur <= _LONGEST_NS)
        number_of = np.array(numbers, dtype=np.int32)
        kept = np.flatnonzero(keep).tolist()
        for row, i in enumerate(kept, self.count):
            e, _, ended = whole[i]
            if self._wants(e.name):
                args = bytes(e.args)
                self.trace.args[row] = args if len(args) > 2 else ended
        made: tuple[NDArray[Any], ...] = (number_of, start, dur)
        for column, values in zip(self._columns, made, strict=True):
            column.append(values[keep])
        self.count += len(kept)

    def _meta(self, e: _Meta) -> None:
        args = plain(e.args)
        if not isinstance(args, dict) or len(self.trace.processes) > limits.limit(limits.MOST_NAMES):
            return
        name = args.get("name")
        if e.name == "process_name" and isinstance(name, str):
            self.trace.processes[e.pid] = name
        elif len(self.trace.meta) < limits.limit(1_000):
            self.trace.meta.update({key: value for key, value in args.items() if key not in self.trace.meta})

    def end(self) -> None:
        """Join what was read."""
        dtypes = (np.int32, np.int64, np.int64)
        joined = [np.concatenate(c) if c else np.empty(0, d) for c, d in zip(self._columns, dtypes, strict=True)]
        self.trace.place, self.trace.start, self.trace.dur = joined


def _digits(raw: msgspec.Raw) -> Any:
    """Return a time as a number where float64 keeps its digits, else as text that does."""
    text = bytes(raw).strip(b'"')
    if b"." not in text:
        try:
            return int(text)
        except ValueError:
            return text.decode(errors="replace")
    return text.decode(errors="replace")


def fields(raw: bytes) -> dict[str, Any]:
    """Return the arguments of an event; empty if they are no object."""
    try:
        args = msgspec.json.decode(raw) if raw else {}
    except NOT_JSON:
        return {}
    return args if isinstance(args, dict) else {}


_UNKNOWN: Mapping[str, Any] = {"category": "", "int64": -1}


def spans_of(columns: Mapping[str, Sequence[Any] | np.ndarray[Any, Any]]) -> pd.DataFrame:
    """Return the table, in order of start, the longer first, of at least lane, kind, name, start_ns and dur_ns."""
    count = len(columns["start_ns"])
    start = np.asarray(columns["start_ns"], dtype=np.int64)
    order = np.lexsort((-np.asarray(columns["dur_ns"], dtype=np.int64), start))
    made: dict[str, Any] = {}
    for name, dtype in schema.SPANS.items():
        values = columns.get(name)
        if dtype == schema.CATEGORY:
            texts = [""] * count if values is None else [str(value) for value in values]
            made[name] = pd.Series(pd.Categorical([texts[i] for i in order.tolist()]))
        else:
            given = np.full(count, _UNKNOWN[dtype]) if values is None else np.asarray(values, dtype=np.int64)
            made[name] = pd.Series(given[order])
    return schema.check("spans", pd.DataFrame(made))
