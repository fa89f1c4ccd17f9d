"""Reads austin's binary files (MOJO, `austin -b`), by the description of the format in austin's manual and source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from dlprof.errors import DlprofError
from dlprof.read.formats import Format, Head, Part
from dlprof.read.kineto.patterns import rank_in
from dlprof.read.opening import read_unpacked
from dlprof.read.profiles.frames import Frame, Stacks
from dlprof.read.sources import Reading

_MAGIC = b"MOJ"
_NEWEST = 4  # version that is read; later ones have events of unknown length

# What an event's first byte says that it is.
_METADATA, _STACK, _FRAME, _INVALID, _FRAME_REF, _KERNEL, _GC, _IDLE, _TIME, _MEMORY, _STRING, _STRING_REF = range(
    1, 13
)
_REPEAT, _TASK, _WAITER = 13, 14, 15  # since version 4


def begins(head: bytes) -> bool:
    """Return whether a file begins with MOJO's three letters and a version."""
    return head.startswith(_MAGIC) and len(head) > 3 and 1 <= head[3] <= 0x3F


class _CutError(Exception):
    """The file ends within an event."""


class _Bytes:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, len(_MAGIC)

    def byte(self) -> int:
        """Return the next byte; raise _CutError at the end."""
        if self.at >= len(self.data):
            raise _CutError
        self.at += 1
        return self.data[self.at - 1]

    def integer(self) -> int:
        """Return a number of six bits and a sign, then of seven bits a byte as long as the highest bit is set."""
        first = self.byte()
        value, shift, more = first & 0x3F, 6, first & 0x80
        while more:
            if shift > 70:
                raise _CutError
            more = self.byte()
            value |= (more & 0x7F) << shift
            shift += 7
            more &= 0x80
        return -value if first & 0x40 else value

    def text(self) -> str:
        """Return a text that ends with a zero byte."""
        end = self.data.find(b"\0", self.at)
        if end < 0:
            raise _CutError
        text = self.data[self.at : end].decode(errors="replace")
        self.at = end + 1
        return text


class _Samples:
    """What was read so far: names and frames by process, and the stack that is not ended yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.modes: dict[str, str] = {}
        self.stacks: Stacks | None = None
        self.texts: dict[tuple[int, int], str] = {}
        self.known: dict[tuple[int, int], Frame] = {}
        self.thread, self.pid = "", 0
        self.frames: list[Frame] = []
        self.last: dict[tuple[int, str], list[Frame]] = {}  # of each thread the frames of its last stack
        self.waiting = False  # what comes is of a task that is suspended, which nobody runs
        self.time = self.memory = 0
        self.idle = False

    def end(self) -> None:
        """Take the stack that was read."""
        if self.stacks is None:
            unit = "bytes" if self.modes.get("mode") == "memory" else "ns"
            self.stacks = Stacks(self.path, "austin", unit)
        weight = self.memory if self.stacks.unit == "bytes" else self.time * 1000
        if not (self.idle and self.modes.get("mode") == "full"):
            self.stacks.add(self.thread, self.frames, weight)
        self.last[self.pid, self.thread] = self.frames
        self.frames, self.time, self.memory, self.idle, self.waiting = [], 0, 0, False, False

    def frame(self, key: int, file: int, name: int, line: int) -> None:
        """Note a frame under its number."""
        texts = self.texts
        known = texts.get((self.pid, name), "<unknown>"), texts.get((self.pid, file), ""), max(line, 0)
        self.known[self.pid, key] = known


def recognise(head: Head) -> Sequence[Part]:
    """Return one part where a file begins as such a profile does, of the rank that its name tells."""
    return (Part(rank_in(head.name)),) if begins(head.first) else ()


def read(path: Path, piece: str = "") -> Reading:  # noqa: ARG001 - one piece is all of it
    """Return the table "stacks"; a cut end loses its stack alone.

    Raises DlprofError where the file cannot be read, has a later version or holds no stack.
    """
    data = read_unpacked(path)
    if not begins(data[:8]):
        raise DlprofError(f"{path}: no MOJO file of austin")
    stream, samples = _Bytes(data), _Samples(path)
    odd = ""
    try:
        version = stream.integer()
        if version > _NEWEST:
            raise DlprofError(
                f"{path}: MOJO version {version}; versions to {_NEWEST} are read (`mojo2austin` of austin-python"
                " makes text of it)"
            )
        take = _takers(stream, samples, version)
        while stream.at < len(data):
            event = stream.byte()
            if event not in take:
                odd = f"{path.name}: byte {event} at {stream.at - 1:,} begins no known event: what comes before is used"
                break
            take[event]()
    except _CutError:
        odd = f"{path.name}: cut off: what comes before is used"
    samples.end()
    if samples.stacks is None:
        raise DlprofError(f"{path}: no stacks in it")
    reading = samples.stacks.reading()
    return Reading(reading.tables, reading.facts, (*reading.warnings, *((odd,) if odd else ())))


def _takers(stream: _Bytes, samples: _Samples, version: int) -> dict[int, Callable[[], None]]:
    """Return what reads each event."""

    def metadata() -> None:
        key = stream.text()
        samples.modes[key] = stream.text()

    def stack() -> None:
        samples.end()
        samples.pid = stream.integer()
        interpreter = stream.integer() if version >= 3 else 0
        thread = stream.text()
        # On Linux the main thread has its process's number, which stands there in hexadecimal.
        samples.thread = "MainThread" if thread == f"{samples.pid:x}" else f"{interpreter}:{thread}"

    def frame() -> None:
        key, file, name, line = (stream.integer() for _ in range(4))
        for _ in range(3 if version >= 2 else 0):  # the end of the line, and columns
            stream.integer()
        samples.frame(key, file, name, line)

    def reference() -> None:
        key = stream.integer()
        if not samples.waiting:
            samples.frames.append(samples.known.get((samples.pid, key), ("<unknown>", "", 0)))

    def repeat() -> None:
        samples.frames.extend(samples.last.get((samples.pid, samples.thread), ()))

    def task() -> None:
        samples.waiting = True
        stream.integer()
        stream.integer()

    def waiter() -> None:
        stream.integer()
        stream.integer()

    def kernel() -> None:
        samples.frames.append((stream.text(), "<kernel>", 0))

    def time() -> None:
        took = stream.integer()
        if not samples.waiting:
            samples.time = took

    def memory() -> None:
        samples.memory = stream.integer()

    def text() -> None:
        key = stream.integer()
        samples.texts[samples.pid, key] = stream.text()

    def idle() -> None:
        samples.idle = True

    def nothing() -> None:
        return

    def number() -> None:
        stream.integer()

    return {
        _METADATA: metadata,
        _STACK: stack,
        _FRAME: frame,
        _INVALID: nothing,
        _FRAME_REF: reference,
        _KERNEL: kernel,
        _GC: nothing,
        _IDLE: idle,
        _TIME: time,
        _MEMORY: memory,
        _STRING: text,
        _STRING_REF: number,
        _REPEAT: repeat,
        _TASK: task,
        _WAITER: waiter,
    }


FORMAT = Format(
    name="mojo",
    title="binary stacks of austin",
    recognised="begins with MOJ and a version",
    recognise=recognise,
    read=read,
    tables=("stacks",),
    brings="a flame graph and the hottest functions",
    record="austin -b -o stacks.mojo python train.py",
)
