"""Perfetto's own traces (.pftrace, .perfetto-trace), through Perfetto's own tools where the user has them.

The format is protobuf, and its reader is Perfetto's trace processor: a program, which its Python package fetches when
it first runs. dlprof fetches nothing. Where `traceconv` is on the path, it makes JSON of the trace, and that is read as
a Chrome trace of PyTorch's is. Where it is not, the file is left with the command that converts it.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dlprof.errors import DlprofError
from dlprof.read import opening
from dlprof.read.formats import Format, Head, Part
from dlprof.read.sources import Reading

_TOOL = "traceconv"
_SECONDS = 600
_HOW = (
    "put Perfetto's `traceconv` on the path (get.perfetto.dev/traceconv), or convert it yourself:"
    " `traceconv json FILE FILE.json`"
)
_LONGEST_VARINT = 10


def recognise(head: Head) -> Sequence[Part]:
    """Return one part where a file begins with packets of a trace: fields 1 of bytes, each a message."""
    from dlprof.read.kineto.patterns import rank_in

    data, at, packets = head.start, 0, 0
    while packets < _PACKETS and at < len(data):
        if data[at] != _PACKET:
            return ()
        length, begin = _varint(data, at + 1)
        if begin < 0 or not 0 < length < 1 << 28:
            return ()
        if begin + length > len(data):  # as far as it was read
            packets += packets == 0 and not head.is_text and _is_packet(data[begin:], whole=False)
            break
        if not _is_packet(data[begin : begin + length], whole=True):
            return ()
        at, packets = begin + length, packets + 1
    return (Part(rank_in(head.name)),) if packets else ()


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number and where it ends; −1 where it has no end."""
    value = 0
    for place in range(at, min(at + _LONGEST_VARINT, len(data))):
        value |= (data[place] & 0x7F) << (7 * (place - at))
        if data[place] < 0x80:
            return value, place + 1
    return 0, -1


# What a trace begins with, the field of its packets; how many of them are looked at, and the largest field of one.
_PACKET = 0x0A
_PACKETS = 3
_LARGEST_FIELD = 1_000
_FIXED = {1: 8, 5: 4}


def _is_packet(data: bytes, *, whole: bool) -> bool:
    """Return whether bytes are a message whose fields end where it ends; of one that was cut, its first field."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        field, kind = key >> 3, key & 7
        if at < 0 or not 0 < field <= _LARGEST_FIELD:
            return False
        if kind == 0:
            _, at = _varint(data, at)
        elif kind == 2:
            length, at = _varint(data, at)
            at = at + length if at >= 0 else at
        elif kind in _FIXED:
            at += _FIXED[kind]
        else:
            return False
        if at < 0:
            return False
        if not whole:
            return field in _FIRST
    return at == len(data)


# Fields that the first packet of a trace begins with: timestamp, process tree, clock snapshot, sequence and its flags,
# track events and descriptors, interned data, trusted uid, config, system information, marks of the service.
_FIRST = frozenset({2, 3, 6, 8, 10, 11, 12, 13, 33, 35, 36, 41, 42, 43, 44, 45, 50, 58, 59, 60, 79, 87, 89})


def read(path: Path, piece: str = "") -> Reading:  # noqa: ARG001 - one piece is all of it
    """Return the spans of a trace that traceconv turns into JSON; raise DlprofError where it is not there, or fails."""
    from dlprof.read.kineto import torch_trace

    tool = shutil.which(_TOOL)
    if tool is None:
        raise DlprofError(f"{path}: a Perfetto trace: {_HOW}")
    with tempfile.TemporaryDirectory(prefix="dlprof-") as folder:
        made = Path(folder) / "trace.json"
        with opening.open_file(path):
            pass
        try:
            done = subprocess.run(
                [tool, "json", str(path.resolve()), str(made)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as e:
            raise DlprofError(f"{path}: {_TOOL} could not convert it: {e}") from None
        if done.returncode or not made.is_file():
            said = (done.stderr.decode(errors="replace").strip().splitlines() or ["no word of it"])[-1]
            raise DlprofError(f"{path}: {_TOOL} could not convert it: {said[:200]}")
        reading = torch_trace.read(made)
    warnings = (f"{path.name}: read as JSON that {_TOOL} made of it", *reading.warnings)
    return replace(reading, warnings=warnings)


def _with_tool(head: Head) -> Sequence[Part]:
    return recognise(head) if shutil.which(_TOOL) else ()


_TITLE, _RECOGNISED = "Perfetto trace", "protobuf whose first fields are packets of a trace"

FORMAT = (
    Format(
        name="perfetto",
        title=_TITLE,
        recognised=_RECOGNISED,
        recognise=_with_tool,
        read=read,
        tables=("spans", "traced_steps"),
        brings="what the trace holds of PyTorch's events, where `traceconv` is on the path",
        record="Perfetto writes it; `traceconv` is at get.perfetto.dev/traceconv",
        precedence=-1,
        seen=False,
    ),
    Format(
        name="perfetto_unread",
        title=f"{_TITLE}, without Perfetto's `traceconv`",
        recognised=_RECOGNISED,
        recognise=recognise,
        left=_HOW,
        seen=False,
    ),
)
