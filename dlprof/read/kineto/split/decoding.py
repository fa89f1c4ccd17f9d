"""Decodes one large trace in several processes.

The file is split at boundaries between events (boundaries.py). Each process takes one span after the other and decodes
it as if it stood alone; a packed file is unpacked by a further process, into memory that all share. The rows come back
through files in memory and are joined in the file's order.

A span counts if everything before it was decoded up to its first byte, and it ends where it should. From the first one
on that does not (the file is damaged there, something only looked like a boundary, or a process died), this process
reads the rest as it reads any file. So it does with what follows the last span. Of a damaged file it may read more
events than one process would: an event that never ends takes no others with it beyond the next boundary.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from dlprof.errors import DlprofError
from dlprof.read.kineto import event_columns
from dlprof.read.kineto.event_columns import Processes, Reader, Rows, opened
from dlprof.read.kineto.events import BlurredTimes, Event, decoder
from dlprof.read.kineto.json_stream import BLOCK, TraceFile
from dlprof.read.kineto.split import table
from dlprof.read.kineto.split.boundaries import Span, fill, late_boundary, spans
from dlprof.read.kineto.split.shares import workers_for
from dlprof.read.kineto.split.table import IN_FILE, MOST_SPANS, Done, Table, Task
from dlprof.read.opening import open_file


def decode(path: Path, processes: Processes = None) -> Rows:
    """Return the rows of a file, see event_columns.py, decoded by as many processes as it has cores (shares.py)."""
    for exact in (False, True):
        begun = begin(path, processes, exact)
        if begun is None:
            break
        with contextlib.suppress(BlurredTimes):
            return begun.rows()
    return event_columns.decode(path, processes)


def begin(path: Path, processes: Processes = None, exact: bool = False) -> Decoding | None:
    """Start to decode a trace in several processes; None where it is not worth it, not possible, or no trace."""
    workers = workers_for(path)
    if workers < 2:
        return None
    try:
        return Decoding(path, workers, processes, exact)
    except (DlprofError, OSError):  # whoever reads the file says so
        return None


class Decoding:
    """A trace that is being decoded. `rows` may be called in a process forked from the one that began it."""

    def __init__(self, path: Path, workers: int, processes: Processes, exact: bool) -> None:
        self._file = opened(path, exact)
        self._first = self._file.position
        self._processes, self._exact = processes, exact
        is_packed = self._file.is_packed
        self._table = Table(workers + is_packed, rooms=workers + 2 if is_packed else 0)
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
        """Return the rows of the file, once; raise DlprofError where it is no trace, and BlurredTimes."""
        was_on = gc.isenabled()
        gc.disable()
        try:
            return self._joined()
        finally:
            self.close()
            if was_on:
                gc.enable()

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
            for number, span in enumerate(spans(raw.fileno(), self._first, max(table.AIM, size // MOST_SPANS))):
                self._table.put(Task(number, IN_FILE, span))

    def _fork(self, work: Callable[[int], None], number: int) -> None:
        multiprocessing.get_context("fork").Process(target=_run, args=(work, number), daemon=True).start()

    # What follows runs in the processes that are forked.

    def _decode(self, number: int) -> None:
        """Decode one span after the other."""
        self._table.leave(decodes=True)
        decode = decoder(self._exact)
        while task := self._table.take():
            file: TraceFile[Event] = TraceFile(self._file.path, decode)
            file.is_list = True  # of a span nothing but events is expected
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
            if task.room != IN_FILE:
                self._table.free(task.room)
            self._table.lay_down(number, done)
        self._table.lay_down(number, None)

    def _bytes_of(self, task: Task) -> Iterator[bytes]:
        """Return the bytes of a span, and of the end of an array, which it has not."""
        size = task.span.stop - task.span.start
        if task.room == IN_FILE:
            with open_file(self._file.path) as raw:
                raw.seek(task.span.start)
                for at in range(0, size, BLOCK):
                    yield raw.read(min(BLOCK, size - at))
        else:
            room = self._table.room(task.room)
            for at in range(0, size, BLOCK):
                yield bytes(room[at : min(at + BLOCK, size)])
        yield b"]"

    def _unpack(self, number: int) -> None:
        """Unpack the file, put its spans, and lay down what follows the last one."""
        self._table.leave(unpacks=True)
        file, start, held = self._file, self._first, self._file.buffered
        for task in itertools.count():
            place = self._table.free_room()
            if place is None:
                return
            room = self._table.room(place)
            size, found = fill(room, held, file.blocks, table.AIM_PACKED)
            # Without a boundary, the file is at its end, or nothing is to be seen that looks like one.
            is_end = not found and next(file.blocks, None) is None
            found = late_boundary(room[:size]) if is_end else found
            if found:
                span = Span(start, start + found[0], start + found[1])
                self._table.put(Task(task, place, span))
                held, start = bytes(room[found[1] : size]), span.after
            if is_end:
                self._table.lay_down(number, Done(task + bool(found), Span(start, start, start), held, file.stops))
            if is_end or not found:
                break
        self._table.lay_down(number, None)


def _run(work: Callable[[int], None], number: int) -> None:
    """Do a process's work, silently whatever happens: what is not done is missed by whoever reads the rows."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is answered by the process that began this one
    gc.disable()
    with contextlib.suppress(Exception):
        work(number)
