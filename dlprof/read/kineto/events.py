"""Defines the events of a trace as they are in the file, decodes lists of them, and converts their numbers.

Ordinary events are decoded straight into typed structs. Two other cases cost more. Times that float64 would round keep
their digits. Events with fields of unexpected types are decoded field by field.
"""

from __future__ import annotations

import contextlib
import re
from array import array
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any, TypeVar, Union

import msgspec
import numpy as np
from numpy.typing import NDArray

from dlprof.read.kineto.json_stream import NOT_JSON, plain, repaired
from dlprof.read.kineto.patterns import element_type

Ints = NDArray[np.int64]
Scalar = int | float | str | bool | None

NO_TIME = int(np.iinfo(np.int64).min)
# Times stay below 2**62 ns (the year 2116), so that sums of two fit 64 bits.
LATEST_US = 2**62 // 1000
# Below 2**43 µs (101 days) neighbouring float64 are less than a nanosecond apart; Kineto's base lies three months back
# at most.
EXACT_US = 2.0**43


class Link(msgspec.Struct, frozen=True, gc=False):
    """The args that link a call to its device work, and say where the work ran."""

    correlation: Scalar = -1
    correlation_id: Scalar = msgspec.field(name="correlation id", default=-1)
    device: Scalar = None
    stream: Scalar = None
    size: Scalar = None


class Args(msgspec.Struct, frozen=True, gc=False):
    """The args of a copy, a collective or a product."""

    bytes: Scalar = None
    kind: Scalar = None
    collective: Scalar = msgspec.field(name="Collective name", default=None)
    elements_in: Scalar = msgspec.field(name="In msg nelems", default=None)
    elements_out: Scalar = msgspec.field(name="Out msg nelems", default=None)
    group_size: Scalar = msgspec.field(name="Group size", default=None)
    dtype: Scalar = None
    group: Scalar = msgspec.field(name="Process Group Name", default=None)
    group_text: Scalar = msgspec.field(name="Process Group Description", default=None)
    source: Scalar = msgspec.field(name="Src Rank", default=None)
    destination: Scalar = msgspec.field(name="Dst Rank", default=None)
    sequence: Scalar = msgspec.field(name="Seq", default=None)
    communicator: Scalar = msgspec.field(name="Comms Id", default=None)
    split_in: msgspec.Raw = msgspec.field(name="In split size", default=msgspec.Raw(b"null"))
    split_out: msgspec.Raw = msgspec.field(name="Out split size", default=msgspec.Raw(b"null"))
    group_ranks: msgspec.Raw = msgspec.field(name="Process Group Ranks", default=msgspec.Raw(b"null"))
    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw(b"null"))
    types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw(b"null"))
    inputs: msgspec.Raw = msgspec.field(name="Concrete Inputs", default=msgspec.Raw(b"null"))


class Made(msgspec.Struct, frozen=True, gc=False):
    """Autograd's args of an operator or a backward function: its number, and the thread that made it."""

    number: Scalar = msgspec.field(name="Sequence number", default=-1)
    thread: Scalar = msgspec.field(name="Fwd thread id", default=0)


class Event(msgspec.Struct, tag_field="ph", tag="X", gc=False):
    """One event with start and duration, as it is in the file; a time may be a number or a text with a number.

    Its args are decoded where they are wanted (`links`, `args_of`, `made`), and only for what is wanted of them.
    """

    cat: str = ""
    name: str = ""
    pid: Scalar = None
    tid: Scalar = None
    ts: Scalar = None
    dur: Scalar = None
    args: msgspec.Raw = msgspec.Raw(b"{}")


class Begin(Event, tag="B"):
    """The beginning of an event that was written as two marks."""


class End(Event, tag="E"):
    """The end of an event that was written as two marks."""


def _exact_kind(kind: type[Event]) -> type[Event]:
    """Return the same kind of event with its time as the file's own digits."""
    ts = [("ts", Decimal | None, None)]
    tag = kind.__struct_config__.tag
    made: Any = msgspec.defstruct(f"Exact{kind.__name__}", ts, bases=(kind,), tag_field="ph", tag=tag, gc=False)
    return made  # type: ignore[no-any-return]


ExactEvent, ExactBegin, ExactEnd = map(_exact_kind, (Event, Begin, End))
BEGINS, ENDS = (Begin, ExactBegin), (End, ExactEnd)

# All other events make no row: arrows (a third of a trace's events), thread names, counters, instants. Their fields are
# not decoded, which saves a fifth of the decoding time.
_NO_ROW = tuple(
    msgspec.defstruct(f"Phase{ord(phase)}", [], tag_field="ph", tag=phase, gc=False)
    for phase in "sftMiICPNODbneSTpFRcVv(),aL"
)


class BlurredTimes(Exception):  # noqa: N818 - not an error: the file is read again
    """Times were too large to be exact as float64: the file must be read with `exact`."""


def decoder(exact: bool) -> Callable[[bytes | memoryview], list[Event]]:
    """Return a function that decodes an array of events; an exact one keeps the digits of every time, and is slower."""
    phases = (ExactEvent, ExactBegin, ExactEnd) if exact else (Event, Begin, End)
    decode_all: Any = msgspec.json.Decoder(list[Union[(*phases, *_NO_ROW)]]).decode  # type: ignore[valid-type]

    def decode(array: bytes | memoryview) -> list[Event]:
        try:
            return decode_all(array)  # type: ignore[no-any-return]
        except msgspec.ValidationError:
            return _lenient(array)

    return decode


_elements = msgspec.json.Decoder(list[msgspec.Raw])
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_number = msgspec.json.Decoder(Decimal)
_TRUTHS = {b"true": b"1", b"false": b"0"}  # as arrays of numbers take them, where all other events are as expected
_EXACT = {b'"X"': ExactEvent, b'"B"': ExactBegin, b'"E"': ExactEnd}


def _lenient(array: bytes | memoryview) -> list[Event]:
    """Decode events with fields of unexpected types: use the valid fields, leave out what is no event."""
    events: list[Event] = []
    for element in _elements.decode(array):
        try:
            raw = _fields.decode(element)
        except msgspec.ValidationError:
            continue
        kind = _EXACT.get(bytes(raw.get("ph", b"")))
        if kind is None:
            continue
        taken: dict[str, Any] = {"args": raw["args"]} if "args" in raw else {}
        with contextlib.suppress(msgspec.ValidationError, KeyError):
            taken["ts"] = _number.decode(_TRUTHS.get(bytes(raw["ts"]), raw["ts"]))
        for name in {"cat", "name", "pid", "tid", "dur"} & raw.keys():
            scalar = msgspec.json.decode(raw[name])
            if name in ("cat", "name"):
                taken[name] = "" if scalar is None else str(scalar)
            elif isinstance(scalar, (int, float, str)):
                taken[name] = scalar
        events.append(kind(**taken))
    return events


D = TypeVar("D", Link, Args, Made)


def _args_decoder(kind: type[D]) -> Callable[[Sequence[msgspec.Raw]], list[D]]:
    """Return a function that decodes the args of some events."""
    decode = msgspec.json.Decoder(list[kind]).decode  # type: ignore[valid-type]

    def decoded(args: Sequence[msgspec.Raw]) -> list[D]:
        try:
            return decode(b"[" + b",".join(args) + b"]")
        except NOT_JSON:
            return [_lenient_args(one, kind) for one in args]

    return decoded


def _lenient_args(value: msgspec.Raw, kind: type[D]) -> D:
    """Decode the valid args of one event."""
    args = plain(repaired(bytes(value)))
    taken: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind) if isinstance(args, dict) else ():
        held = args.get(field.encode_name)
        if field.type is msgspec.Raw and held is not None:
            taken[field.name] = msgspec.Raw(msgspec.json.encode(held))
        elif isinstance(held, (int, float, str)):
            taken[field.name] = held
    return kind(**taken)


links = _args_decoder(Link)  # of calls and of a device's work
args_of = _args_decoder(Args)  # of copies, collectives and products
made = _args_decoder(Made)  # of operators: autograd's


def label(value: Scalar) -> str:
    """Return the number in what may be 7, 7.0, "7" or "stream 7", else the text."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    text = str(value)
    found = re.fullmatch(r"\s*(?:stream|thread|device|gpu)?\s*(-?\d+)\s*", text, re.I)
    return str(int(found[1])) if found else text


def nanoseconds(values: list[Any]) -> Ints:
    """Return microseconds as nanoseconds, as exact as the values are; NO_TIME for what is no time."""
    with contextlib.suppress(TypeError, OverflowError):
        us = np.frombuffer(array("d", values))  # faster than np.array, which checks each value's type
        if (np.abs(us) < EXACT_US).all():  # False for NaN
            whole = np.floor(us)
            ns: Ints = whole.astype(np.int64) * 1000 + np.rint((us - whole) * 1000).astype(np.int64)
            return ns
    given = np.array(values)
    if given.dtype.kind == "i":
        usable = (given > -LATEST_US) & (given < LATEST_US)
        return np.where(usable, np.where(usable, given, 0) * 1000, NO_TIME)
    return np.array([ns_of(v) for v in values], dtype=np.int64)


def exact_nanoseconds(values: list[Any]) -> Ints:
    """Return the same; raise BlurredTimes if a value lost digits as a float64."""
    ns = nanoseconds(values)
    large = (ns >= EXACT_US * 1000) | ((ns <= -EXACT_US * 1000) & (ns != NO_TIME))
    if large.any() and any(type(values[i]) is float for i in np.flatnonzero(large)):
        raise BlurredTimes
    return ns


def ns_of(value: Any) -> int:
    """Return microseconds, as a number or a text with one, as nanoseconds; NO_TIME for what is no time."""
    try:
        # A bool is 0 or 1, as in arrays of numbers: the result must not depend on its neighbours.
        us = value if isinstance(value, Decimal) else Decimal(int(value) if isinstance(value, bool) else str(value))
        return int((us * 1000).to_integral_value()) if abs(us) < LATEST_US else NO_TIME
    except (InvalidOperation, ValueError):
        return NO_TIME


def integers(values: list[Any]) -> Ints:
    """Return integers that may be written as text; -1 for anything else."""
    given = np.array(values)
    return given if given.dtype == np.int64 else np.array([integer(v) for v in values], dtype=np.int64)


def integer(value: Any) -> int:
    """Return an integer that may be written as text; -1 if it is no integer, negative or too large."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return -1
    return number if 0 <= number < 2**63 else -1


def numbers_of(value: Any) -> list[int]:
    """Return a list of whole numbers, or of its text; an abridged one ("[0, 1, ..., 7]") gives none."""
    if isinstance(value, str):
        value = plain(value)
    return [int(n) for n in value] if isinstance(value, list) and all(isinstance(n, int) for n in value) else []


@lru_cache(1 << 12)
def numbers_in(raw: bytes) -> list[int]:
    """Return the numbers that a piece of JSON lists: a job has few groups of ranks, and many collectives."""
    return numbers_of(plain(raw))


def tensors(dims: bytes, types: bytes) -> list[tuple[list[int], str, int]]:
    """Return shape, element type and bytes per element of each tensor that two pieces of JSON list."""
    shapes, names = plain(dims), plain(types)
    found = []
    for shape, text in zip(shapes, names, strict=False) if isinstance(shapes, list) and isinstance(names, list) else ():
        name, width = element_type(text) if isinstance(text, str) else ("", 0)
        if width and isinstance(shape, list) and shape and all(isinstance(n, int) for n in shape):
            found.append((shape, name, width))
    return found


@lru_cache(1 << 14)
def shapes_in(dims: bytes, types: bytes) -> tuple[str, str]:
    """Return the shapes of tensors as text ("64x128 128x256") and the first one's element type, "" where unknown."""
    found = tensors(dims, types)
    return " ".join("x".join(map(str, shape)) for shape, _, _ in found), found[0][1] if found else ""
