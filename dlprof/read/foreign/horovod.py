"""Horovod's timeline (HOROVOD_TIMELINE): one file for all ranks, written by rank 0, often without its closing bracket.

A tensor is a "process" of the file. Its collective is negotiated first (NEGOTIATE_ALLREDUCE, in which a mark with each
rank's number says when that rank was ready), and then done (ALLREDUCE, with activities like NCCL_ALLREDUCE inside).
So the file tells of every rank when it came to each collective, and who came last. It tells nothing of what the ranks
compute. The format: horovod/common/timeline.cc and docs/timeline.rst of Horovod.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import msgspec

from dlprof import schema
from dlprof.errors import DlprofError
from dlprof.read import limits
from dlprof.read.formats import Format, Head, Part
from dlprof.read.kineto.json_stream import TraceFile, plain
from dlprof.read.kineto.patterns import element_type
from dlprof.read.sources import Reading

if TYPE_CHECKING:
    import pandas as pd

_NEGOTIATE = "NEGOTIATE_"
_READY = re.compile(rb'"ph"\s*:\s*"X"[^{}]{0,40}"name"\s*:\s*"(\d{1,7})"')
_OPERATION = re.compile(rb'"name"\s*:\s*"NEGOTIATE_[A-Z]+"')

# As many occurrences of a tensor make steps.
_LEAST_STEPS = 3

_COLLECTIVES = {
    "ALLREDUCE": "all_reduce",
    "ALLGATHER": "all_gather",
    "BROADCAST": "broadcast",
    "ALLTOALL": "all_to_all",
    "REDUCESCATTER": "reduce_scatter",
    "ADASUM": "all_reduce",
    "BARRIER": "barrier",
}

# In this order at one time.
_BEGINS, _IS_READY, _DONE = range(3)


class _Event(msgspec.Struct, tag_field="ph", tag="X", gc=False):
    name: str = ""
    pid: int | float | str | bool | None = None
    tid: int | float | str | bool | None = None
    ts: Decimal | None = None  # µs; since 1970 with more digits than a float64 has
    dur: int | float | str | bool | None = None
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _Begin(_Event, tag="B"):
    pass


class _End(_Event, tag="E"):
    pass


class _Meta(_Event, tag="M"):
    pass


_OTHERS = tuple(
    msgspec.defstruct(f"Other{ord(phase)}", [], tag_field="ph", tag=phase, gc=False)
    for phase in "sftiICPNODbneSTpFRcVv(),aL"
)
_EVENTS: Any = msgspec.json.Decoder(list[Union[(_Event, _Begin, _End, _Meta, *_OTHERS)]])  # type: ignore[valid-type]
_ELEMENTS = msgspec.json.Decoder(list[msgspec.Raw])


def recognise(head: Head) -> Sequence[Part]:
    """Return a part for each rank that the beginning of a timeline names."""
    if head.opens != "[" or not _OPERATION.search(head.first):
        return ()
    ranks = {int(number) for number in _READY.findall(head.first)}
    return [Part(rank, str(rank)) for rank in sorted(ranks)[: limits.MOST_RANKS_OF_FILE]] or [Part(0, "0")]


def read(path: Path, piece: str = "0") -> Reading:
    """Return one rank's collectives as spans, from when it was ready to when they were done, and the steps.

    A step is from one time that the first tensor is negotiated to the next. Raises DlprofError if it is no timeline.
    """
    import numpy as np
    import pandas as pd

    try:
        stat = path.stat()
    except OSError as e:
        raise DlprofError(f"{path}: cannot be read: {e.strerror}") from None
    timeline = _timeline(path, (stat.st_mtime_ns, stat.st_size))
    base = timeline.base_us
    base_ns = base * 1000 if isinstance(base, int) and 0 < base < 2**52 else 0
    rows = _collectives(timeline, piece)
    if not rows:
        raise DlprofError(f"{path}: no collective of rank {piece} in the timeline")
    frame = pd.DataFrame(rows, columns=["tensor", "name", "collective", "begin", "ready", "end", "bytes", "dtype"])
    frame = frame.sort_values(["begin", "tensor"], kind="stable", ignore_index=True)
    known = {
        # Tensors are exchanged in parallel: each has its own lane. No lane is the training thread.
        "lane": "host:horovod " + frame["tensor"].astype(str),
        "kind": "communication",
        "name": frame["name"],
        "start_ns": frame["ready"] + base_ns,
        "dur_ns": frame["end"] - frame["ready"],
        "bytes": frame["bytes"],
        "collective": frame["collective"],
        "group": "0",
        "sequence": frame.groupby("tensor").cumcount(),
        "communicator": frame["tensor"].astype(str),
        "dtype": frame["dtype"],
    }
    unknown = {name: "" if dtype == schema.CATEGORY else -1 for name, dtype in schema.SPANS.items()}
    spans = pd.DataFrame(unknown | known)
    order = np.lexsort((-spans["dur_ns"], spans["start_ns"]))
    spans = spans.iloc[order].reset_index(drop=True).astype(dict(schema.SPANS))
    warnings = [*timeline.warnings]
    if not base_ns:
        warnings.append(f"{path.name}: its times have no base: they count from an unknown zero, not from 1970")
    world_size = max((int(rank) + 1 for rank in timeline.ready if len(rank) < 8), default=1)
    return Reading(
        {
            "spans": schema.check("spans", spans),
            "traced_steps": schema.check("traced_steps", _steps(frame, base_ns)),
        },
        {"rank": int(piece), "world_size": world_size, "backend": "horovod"},
        tuple(warnings),
    )


@dataclass
class _Timeline:
    """What a file holds, times in ns from its own zero."""

    # rank, as it is written → tensor → when it was ready
    ready: dict[str, dict[int, list[int]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    # tensor → the start of a negotiation or an operation, which of both, its end, name, and args as JSON
    marks: dict[int, list[tuple[int, int, int, str, bytes]]] = field(default_factory=lambda: defaultdict(list))
    tensors: dict[Any, str] = field(default_factory=dict)  # their names
    base_us: Any = None  # its zero since 1970, where it says so
    warnings: list[str] = field(default_factory=list)


@lru_cache(maxsize=1)  # the ranks of one file are read one after the other
def _timeline(path: Path, _stamp: tuple[int, int]) -> _Timeline:
    """Return the contents of a file. Marks of begin and end become one event."""
    from dlprof.read.kineto.events import NO_TIME, ns_of

    file: TraceFile[Any] = TraceFile(path, _decoded)
    if not file.header():
        raise DlprofError(f"{path}: JSON without events")
    timeline = _Timeline()
    opened: dict[tuple[Any, Any], list[tuple[str, Any, int, bytes]]] = defaultdict(list)
    count = 0
    for events in file.events():
        count += len(events)
        for e in events:
            kind = type(e)
            if kind is _Event:
                _add(timeline, e.name, e.pid, ns_of(e.ts), ns_of(e.dur), bytes(e.args))
            elif kind is _Begin:
                opened[e.pid, e.tid].append((e.name, e.pid, ns_of(e.ts), bytes(e.args)))
            elif kind is _End and (stack := opened[e.pid, e.tid]):
                name, pid, start, args = stack.pop()
                end = ns_of(e.ts)
                dur = end - start if end != NO_TIME else NO_TIME
                _add(timeline, name, pid, start, dur, args if len(args) > 2 else bytes(e.args))
            elif kind is _Meta and isinstance(args := plain(e.args), dict):
                tensor = args.get("name")
                if e.name == "process_name" and isinstance(tensor, str):
                    if len(timeline.tensors) <= limits.limit(limits.MOST_NAMES):
                        timeline.tensors[e.pid] = tensor
                elif timeline.base_us is None:
                    timeline.base_us = args.get("start_time_since_epoch_in_micros")
        if count > limits.limit(limits.MOST_ROWS):
            timeline.warnings.append(limits.too_many(path, "events", limits.MOST_ROWS))
            break
    if file.cut.startswith("the gzip"):
        timeline.warnings.append(f"{path.name}: {file.cut}; what stands before that is used")
    return timeline


def _add(timeline: _Timeline, name: str, pid: Any, start: int, dur: int, args: bytes) -> None:
    """Add an event, if it is one of those that tell of collectives and has a usable time."""
    if not (abs(start) < 2**62 and 0 <= dur <= limits.LONGEST_NS):
        return
    tensor = pid if type(pid) is int and 0 <= pid < 2**62 else -1
    if name.isdecimal():
        timeline.ready[name][tensor].append(start)
    elif name.startswith(_NEGOTIATE):
        timeline.marks[tensor].append((start, _BEGINS, start + dur, name, b""))
    elif name in _COLLECTIVES:
        timeline.marks[tensor].append((start, _DONE, start + dur, name, args))


def _decoded(array: bytes | memoryview) -> list[Any]:
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


def _collectives(timeline: _Timeline, rank: str) -> list[tuple[Any, ...]]:
    """Return tensor, name, collective, begin of its negotiation, when the rank was ready, end, bytes, element type."""
    found: list[tuple[Any, ...]] = []
    for tensor, times in (timeline.ready.get(rank) or {}).items():
        label = timeline.tensors.get(tensor) or f"tensor {tensor}"
        ticks = [(at, _IS_READY, at, "", b"") for at in times]
        begin = ready = None
        for start, kind, end, name, args in sorted([*timeline.marks.get(tensor, ()), *ticks], key=lambda m: m[:2]):
            if kind == _BEGINS:
                begin, ready = start, None
            elif kind == _IS_READY and begin is not None:
                ready = start
            elif kind == _DONE and begin is not None and ready is not None:
                size, dtype = _size(args)
                found.append((tensor, label, _COLLECTIVES[name], begin, min(ready, end), end, size, dtype))
                begin = ready = None
    return found


def _size(raw: bytes) -> tuple[int, str]:
    """Return the bytes and the element type in the end mark of an operation; −1 and "": unknown."""
    args = plain(raw)
    args = args if isinstance(args, dict) else {}
    dtype, width = element_type(str(args.get("dtype", "")))
    shape = re.findall(r"\d{1,18}", str(args.get("shape", "")))[:16]
    if not width or "shape" not in args:
        return -1, dtype if width else ""
    size = width * math.prod(map(int, shape))
    return (size if size < 2**62 else -1), dtype


def _steps(frame: pd.DataFrame, base_ns: int) -> pd.DataFrame:
    """Return the steps: from each time that the tensor which comes first in a step is negotiated to the next."""
    import numpy as np
    import pandas as pd

    begins = np.empty(0, dtype=np.int64)
    reduced = frame[frame["collective"] == "all_reduce"]
    if len(reduced):
        each = reduced.groupby("tensor")["begin"].agg(["size", "min"])
        usual = each[each["size"] == int(each["size"].median())]
        if len(usual) and int(usual["size"].iloc[0]) > _LEAST_STEPS:
            begins = np.sort(reduced.loc[reduced["tensor"] == usual["min"].idxmin(), "begin"].to_numpy())
    steps = {"step": np.arange(len(begins[1:])), "start_ns": begins[:-1] + base_ns, "dur_ns": np.diff(begins)}
    return pd.DataFrame(steps).astype("int64")


FORMAT = Format(
    name="horovod",
    title="Horovod timeline",
    recognised="a list of events with `NEGOTIATE_…`, with or without its closing bracket",
    recognise=recognise,
    read=read,
    tables=("spans", "traced_steps"),
    brings="every collective of every rank, from when the rank was ready: who comes last, and who waits; steps by the"
    " tensor that is exchanged first",
    record="HOROVOD_TIMELINE=timeline.json horovodrun -np 4 python train.py",
    seen=False,
    lacks={"stacks": "Horovod's timeline holds no stacks: py-spy records them beside it (`py-spy record -f raw`)"},
)
