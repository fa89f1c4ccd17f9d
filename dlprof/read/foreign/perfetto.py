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
    """Return one part where a file begins with packets of a trace: fields 1 of bytes, with known fields inside."""
    from dlprof.read.kineto.patterns import rank_in

    packet, rest = _packet(head.start)
    if packet is None or not _is_packet(packet):
        return ()
    more, _ = _packet(rest)
    return (Part(rank_in(head.name)),) if more is None or _is_packet(more) else ()


def _packet(data: bytes) -> tuple[bytes | None, bytes]:
    """Return the first field 1 of bytes, as far as it is there, and what follows it; None where there is none."""
    if data[:1] != b"\x0a":
        return None, b""
    length, at = _varint(data, 1)
    if at < 0 or not 0 < length < 1 << 28:
        return None, b""
    return data[at : at + length], data[at + length :]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number and where it ends; −1 where it has no end."""
    value = 0
    for shift in range(_LONGEST_VARINT):
        if at + shift >= len(data):
            return 0, -1
        byte = data[at + shift]
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, at + shift + 1
    return 0, -1


# Fields of TracePacket that may come first in one: timestamp, clock, sequence and its flags, trusted uid and pid, clock
# snapshot, config, defaults, descriptors of processes, threads and tracks, track events, and others that stand alone.
_FIRST = frozenset({1, 2, 3, 6, 8, 10, 11, 12, 13, 33, 35, 36, 41, 42, 43, 44, 52, 58, 59, 60, 79, 87, 89})


def _is_packet(packet: bytes) -> bool:
    key, at = _varint(packet, 0)
    return at > 0 and key >> 3 in _FIRST and key & 7 in (0, 1, 2, 5)


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
