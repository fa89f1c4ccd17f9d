"""Decodes one large trace in several processes.

`share_out` gives each trace of a run its share of the cores, as if all were read at once. The file is split into spans
at boundaries between events: `}`, a comma, and an object that has a phase. Decoding proves a boundary afterwards: from
the first event on, all bytes before it must be whole events. Each process decodes one span after another. A further
process unpacks a packed file, into shared memory: a buffer for each unpacked span. The rows come back through files in
memory, and are joined in the order of the file.

A span is used if everything before it was decoded up to its first byte, and it ends where it should. It may not: the
file is damaged, something only looked like a boundary, or a process died. From the first such span on, the main process
reads the rest like any other file. It also reads what follows the last span. More events of a damaged file may be read
than by one process: an event that never ends loses only the events up to the next boundary.

`Table` holds what the processes share: the spans to decode, the buffers, and the rows. `write` and `read` pass objects
from one process to another through a file in memory. Arrays are written once and not copied.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import mmap
import multiprocessing
import os
import pickle
import re
import signal
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dlprof.errors import DlprofError
from dlprof.read.kineto import event_columns
from dlprof.read.kineto.event_columns import Processes, Reader, Rows, no_garbage_collection, opened
from dlprof.read.kineto.events import BlurredTimes, Event, decoder
from dlprof.read.kineto.json_stream import BLOCK, NOT_JSON, TraceFile, elements, repaired
from dlprof.read.opening import open_file

# Bytes of JSON. Splitting a smaller trace gains less than 0.1 s.
LEAST_BYTES = 96 << 20
# Memory of a decoding process: the rows of a span and, for a packed file, the span itself.
PROCESS_BYTES = 120 << 20
# A further core is used only if the share has at least this fraction of it.
_ROUNDED_OFF = 0.2

_cores: dict[Path, int] = {}


def share_out(bytes_of: Mapping[Path, int], of_bytes: int, jobs: int | None = None) -> None:
    """Divide the cores, or `jobs` of them, among traces, for this process and those that are forked from it.

    `bytes_of`: their unpacked bytes; `of_bytes`: those of all that is read at once.
    """
    cores = jobs or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    _cores.clear()
    for path, size in bytes_of.items():
        if size >= LEAST_BYTES:
            _cores[path] = math.ceil(cores * size / of_bytes - _ROUNDED_OFF)


def workers_for(path: Path) -> int:
    """Return how many processes may decode a trace; below 2: do not split it."""
    # Forking is safe while this process has no thread of its own; daemons have no children.
    can_fork = threading.active_count() == 1 and hasattr(os, "memfd_create")
    if path not in _cores or not can_fork or multiprocessing.current_process().daemon:
        return 0
    free = free_bytes()
    return _cores[path] if free is None else min(_cores[path], free // 2 // PROCESS_BYTES)


def free_bytes() -> int | None:
    """Return the available memory of this machine in bytes; None: unknown."""
    try:
        with open("/proc/meminfo") as f:  # noqa: PTH123 - a line of the kernel's
            return next(int(line.split()[1]) << 10 for line in f if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None


WINDOW = 256 << 10  # bytes that are searched for a boundary at once
LAST = 2 << 20  # bytes after the last span, which one process decodes while the others are idle
# Objects in lists within args look like events until they are decoded. These limit the candidates that are tried, those
# without an end in the window, and the windows without a boundary, so that damaged files do not cost more.
_TRIED, _ENDLESS, _MISSED = 100, 4, 16

_BOUNDARY = re.compile(rb"\}(\s*,\s*)(?=\{\s*\")")


class _Phase(msgspec.Struct):
    ph: str


_has_phase = msgspec.json.Decoder(_Phase).decode


class Span(NamedTuple):
    """A piece of a trace, in unpacked bytes: whole events from `start` up to `stop`; `after`: where the next begins."""

    start: int
    stop: int
    after: int


def boundary(window: bytes) -> tuple[int, int] | None:
    """Return where an event ends and the next one begins, without proof; None: no boundary in these bytes."""
    endless = 0
    for found in islice(_BOUNDARY.finditer(window), _TRIED):
        _, end = next(elements(window, found.end()), (0, 0))
        endless += not end
        if endless == _ENDLESS:
            break
        try:
            _has_phase(repaired(window[found.end() : end]))
        except NOT_JSON:
            continue
        return found.start(1), found.end()
    return None


def late_boundary(held: bytes | memoryview) -> tuple[int, int] | None:
    """Return a boundary close to the end of these bytes; None if there is none."""
    begin = len(held) - LAST
    found = boundary(bytes(held[begin : begin + WINDOW])) if begin > 0 else None
    return (begin + found[0], begin + found[1]) if found else None


def spans(file: int, first: int, aim: int) -> Iterator[Span]:
    """Split an open file with its first event at `first` into spans of about `aim` bytes.

    What follows the last span is short, unless no boundary is found.
    """
    size = os.fstat(file).st_size

    def last_of(start: int) -> int:
        return size - LAST if start + 2 * LAST < size else size

    start, looked, missed = first, min(first + aim, last_of(first)), 0
    while looked + WINDOW < size and missed < _MISSED:
        found = boundary(os.pread(file, WINDOW, looked))
        if found:
            span = Span(start, looked + found[0], looked + found[1])
            yield span
            start, looked, missed = span.after, min(span.after + aim, last_of(span.after)), 0
        else:
            looked, missed = looked + WINDOW, missed + 1


def fill(memory: memoryview, held: bytes, blocks: Iterator[bytes], aim: int) -> tuple[int, tuple[int, int] | None]:
    """Copy `held` and then blocks into `memory`, until there is a boundary after the first `aim` bytes.

    Return the number of bytes, and the boundary: where an event ends and where the next one begins. It is None if
    the blocks ended before one was found, or if `memory` is full.
    """
    size, looked = len(held), aim
    memory[:size] = held
    while True:
        if size >= looked + WINDOW:
            if found := boundary(bytes(memory[looked:size])):
                return size, (looked + found[0], looked + found[1])
            looked = size - WINDOW // 2  # an event at the seam is whole in what is looked at next
        if size + BLOCK > len(memory) or not (block := next(blocks, b"")):
            return size, None
        memory[size : size + len(block)] = block
        size += len(block)


def decode(path: Path, processes: Processes = None) -> Rows:
    """Return the rows of a file (event_columns.py), decoded by one process for each core of its share."""
    for exact in (False, True):
        begun = begin(path, processes, exact)
        if begun is None:
            break
        with contextlib.suppress(BlurredTimes):
            return begun.rows()
    return event_columns.decode(path, processes)


def begin(path: Path, processes: Processes = None, exact: bool = False) -> Decoding | None:
    """Start to decode a trace in several processes; None if that is useless or impossible, or it is no trace."""
    workers = workers_for(path)
    if workers < 2:
        return None
    try:
        return Decoding(path, workers, processes, exact)
    except (DlprofError, OSError):  # reading the file reports this
        return None


class Decoding:
    """A trace that is being decoded. `rows` may be called in a process that was forked after the start."""

    def __init__(self, path: Path, workers: int, processes: Processes, exact: bool) -> None:
        self._file = opened(path, exact)
        self._first = self._file.position
        self._processes, self._exact = processes, exact
        is_packed = self._file.is_packed
        self._table = Table(workers + is_packed, buffers=workers + 2 if is_packed else 0)
        try:
            if not is_packed:
                self._put_spans()
            for number in range(workers):
                self._fork(self._decode, number)
            if is_packed:
                self._fork(self._unpack, workers)
        except OSError:
            self._table.close()
            raise
        self._table.leave()

    def rows(self) -> Rows:
        """Return the rows of the file; may be called once. Raises BlurredTimes, and DlprofError if it is no trace."""
        try:
            with no_garbage_collection():
                return self._joined()
        finally:
            self.close()

    def close(self) -> None:
        """Drop what was decoded, and have no further span decoded."""
        self._table.close()

    def _joined(self) -> Rows:
        file, reader = self._file, Reader(self._file.keys)
        at: int | None = self._first
        for done in self._table.done():
            if done.span.start != at:
                break
            if done.is_blurred:
                raise BlurredTimes
            if isinstance(done.made, bytes):
                file.go_on(iter((done.made,)), done.stops)
                at = None
            if not isinstance(done.made, Reader) or not reader.fits(done.made):
                break
            reader.join(done.made)
            at = done.span.after
        if at is not None:
            file.go_on(file.unpacked(at))
        reader.take(file, self._processes)
        if self._table.lost:
            reader.rows.warnings.append(
                f"{file.path.name}: a process that decoded a part of it ended early (out of memory?): the rest was "
                "decoded by one process"
            )
        return reader.end(file)

    def _put_spans(self) -> None:
        with open_file(self._file.path) as raw:
            size = os.fstat(raw.fileno()).st_size
            for number, span in enumerate(spans(raw.fileno(), self._first, max(AIM, size // MOST_SPANS))):
                self._table.put(Task(number, IN_FILE, span))

    def _fork(self, work: Callable[[int], None], number: int) -> None:
        multiprocessing.get_context("fork").Process(target=_run, args=(work, number), daemon=True).start()

    # The methods below run in the forked processes.

    def _decode(self, number: int) -> None:
        """Decode one span after the other."""
        self._table.leave(decodes=True)
        decode = decoder(self._exact)
        while task := self._table.take():
            file: TraceFile[Event] = TraceFile(self._file.path, decode)
            file.is_list = True  # a span holds nothing but events
            file.go_on(self._bytes_of(task))
            done = Done(task.number, task.span, None)
            try:
                reader = Reader({})
                reader.take(file, self._processes)
            except BlurredTimes:
                done = done._replace(is_blurred=True)
            else:
                if file.is_through:
                    reader.compact()
                    done = done._replace(made=reader)
            if task.buffer != IN_FILE:
                self._table.free(task.buffer)
            self._table.post(number, done)
        self._table.post(number, None)

    def _bytes_of(self, task: Task) -> Iterator[bytes]:
        """Yield the bytes of a span, then the closing bracket that it lacks."""
        size = task.span.stop - task.span.start
        if task.buffer == IN_FILE:
            with open_file(self._file.path) as raw:
                raw.seek(task.span.start)
                for at in range(0, size, BLOCK):
                    yield raw.read(min(BLOCK, size - at))
        else:
            memory = self._table.buffer(task.buffer)
            for at in range(0, size, BLOCK):
                yield bytes(memory[at : min(at + BLOCK, size)])
        yield b"]"

    def _unpack(self, number: int) -> None:
        """Unpack the file, put its spans into the table, and pass on what follows the last one."""
        self._table.leave(unpacks=True)
        file, start, held = self._file, self._first, self._file.buffered
        for task in itertools.count():
            buffer = self._table.free_buffer()
            if buffer is None:
                return
            memory = self._table.buffer(buffer)
            size, found = fill(memory, held, file.blocks, AIM_PACKED)
            # Without a boundary, the file is at its end, or nothing in it looks like one.
            is_end = not found and next(file.blocks, None) is None
            found = late_boundary(memory[:size]) if is_end else found
            if found:
                span = Span(start, start + found[0], start + found[1])
                self._table.put(Task(task, buffer, span))
                held, start = bytes(memory[found[1] : size]), span.after
            if is_end:
                self._table.post(number, Done(task + bool(found), Span(start, start, start), held, file.stops))
            if is_end or not found:
                break
        self._table.post(number, None)


def _run(work: Callable[[int], None], number: int) -> None:
    """Do a process's work, and report no error: `Table.done` notices what is missing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    gc.disable()
    with contextlib.suppress(Exception):
        work(number)


# Bytes of a span. Each span decodes its names anew, so they are large; spans of a packed file are held in memory.
AIM = 32 << 20

AIM_PACKED = 16 << 20

_BUFFER_BYTES = AIM_PACKED + (8 << 20)

_TASK = struct.Struct("<5q")  # number, buffer, span

_POST = struct.Struct("<3q")  # process, start and length of its message; length 0: the process is done

IN_FILE = -1  # as a task's buffer: the file is not packed

# A pipe holds at least a page. All tasks of an unpacked file are in it before a process takes one.
MOST_SPANS = mmap.PAGESIZE // _TASK.size


class Task(NamedTuple):
    """A span to decode: its number in the file, and the buffer with its bytes."""

    number: int
    buffer: int
    span: Span


class Done(NamedTuple):
    """The result of a span: its rows, or None if it is not whole.

    For what follows the last span of a packed file: the bytes, and why they stop before the file's end.
    """

    number: int
    span: Span
    made: Reader | bytes | None
    stops: str = ""
    is_blurred: bool = False


@dataclass
class _Pipe:
    ends: list[int] = field(default_factory=lambda: list(os.pipe()))

    def read(self, size: int) -> bytes:
        """Return what one `write` wrote, if every write has this size; b"" once all writing ends are closed."""
        return os.read(self.ends[0], size)

    def write(self, data: bytes) -> None:
        os.write(self.ends[1], data)

    def close(self, *, reads: bool = True, writes: bool = True) -> None:
        for end, closes in enumerate((reads, writes)):
            if closes and self.ends[end] >= 0:
                os.close(self.ends[end])
                self.ends[end] = -1


class Table:
    """The processes take spans from it and put their results into it. It is made before they are forked.

    `buffers`: how many unpacked spans of a packed file it holds at once.
    """

    def __init__(self, processes: int, buffers: int = 0) -> None:
        self._tasks, self._posts, self._free = _Pipe(), _Pipe(), _Pipe()
        self._stop = mmap.mmap(-1, 1)
        self._buffers = memoryview(mmap.mmap(-1, buffers * _BUFFER_BYTES)) if buffers else memoryview(b"")
        self._outputs = [os.memfd_create("dlprof") for _ in range(processes)]
        self._written = 0  # by this process
        self._free.write(bytes(range(buffers)))
        self.lost = False  # whether a process ended before it had done its work

    def put(self, task: Task) -> None:
        """Add a span to decode."""
        self._tasks.write(_TASK.pack(task.number, task.buffer, *task.span))

    def take(self) -> Task | None:
        """Return the next span to decode; None if there are no more."""
        data = b"" if self._stop[0] else self._tasks.read(_TASK.size)
        if not data:
            return None
        number, buffer, *span = _TASK.unpack(data)
        return Task(number, buffer, Span(*span))

    def buffer(self, number: int) -> memoryview:
        """Return a buffer's memory."""
        return self._buffers[number * _BUFFER_BYTES : (number + 1) * _BUFFER_BYTES]

    def free_buffer(self) -> int | None:
        """Wait for a free buffer and return its number; None if no process is left to free one."""
        data = b"" if self._stop[0] else self._free.read(1)
        return data[0] if data else None

    def free(self, buffer: int) -> None:
        """Mark a buffer as free."""
        self._free.write(bytes((buffer,)))

    def post(self, process: int, done: Done | None) -> None:
        """Add the result of a span; None: this process is done."""
        length = 0
        if done:
            self._written = next_page(self._written)
            length = write(self._outputs[process], self._written, done)
        self._posts.write(_POST.pack(process, self._written, length))
        self._written += length

    def done(self) -> Iterator[Done]:
        """Yield the results of the spans in the file's order, up to the first missing one."""
        waiting: dict[int, Done] = {}
        number, working = 0, len(self._outputs)
        while post := self._posts.read(_POST.size):
            process, at, length = _POST.unpack(post)
            if not length:
                working -= 1
                continue
            one: Done = read(self._outputs[process], at, length)
            waiting[one.number] = one
            while number in waiting:
                yield waiting.pop(number)
                number += 1
        self.lost = working > 0

    def leave(self, *, unpacks: bool = False, decodes: bool = False) -> None:
        """Close the pipe ends that this process does not use, so that readers see when the last writer is gone."""
        works = unpacks or decodes
        self._tasks.close(reads=not decodes, writes=not unpacks)
        # Buffers are also freed after everything is unpacked.
        self._free.close(reads=not works, writes=not decodes)
        self._posts.close(reads=works, writes=not works)

    def close(self) -> None:
        """Drop what was decoded, and have no further span decoded."""
        self._stop[0] = 1
        for pipe in (self._tasks, self._posts, self._free):
            pipe.close()
        while self._outputs:
            os.close(self._outputs.pop())


_COUNT = struct.Struct("<q")

_ALIGNED = 64


def write(file: int, at: int, message: Any) -> int:
    """Write a message at the byte `at` of a file, a multiple of the page size; return its length."""
    arrays: list[memoryview] = []
    head = pickle.dumps(message, 5, buffer_callback=lambda array: arrays.append(array.raw()))
    lengths = [len(head), *map(len, arrays)]
    parts: list[bytes | memoryview] = [_COUNT.pack(len(lengths)) + b"".join(map(_COUNT.pack, lengths)), head, *arrays]
    end = at
    for part in parts:
        written = 0
        while written < len(part):
            written += os.pwrite(file, memoryview(part)[written:], end + written)
        end = _after(end + len(part))
    os.ftruncate(file, max(end, os.fstat(file).st_size))
    return end - at


def read(file: int, at: int, length: int) -> Any:
    """Return the message that begins there; its arrays are read-only and keep the file's memory."""
    view = memoryview(mmap.mmap(file, length, offset=at, access=mmap.ACCESS_READ))
    count = _COUNT.unpack_from(view)[0]
    lengths = [_COUNT.unpack_from(view, _COUNT.size * (1 + i))[0] for i in range(count)]
    parts, begin = [], _after(_COUNT.size * (1 + count))
    for size in lengths:
        parts.append(view[begin : begin + size])
        begin = _after(begin + size)
    return pickle.loads(parts[0], buffers=parts[1:])


def next_page(at: int) -> int:
    """Return where the next message may begin."""
    return -(-at // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def _after(at: int) -> int:
    return -(-at // _ALIGNED) * _ALIGNED
