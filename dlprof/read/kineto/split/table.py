"""What processes that decode one trace together share: the spans to be decoded, the memory of packed ones, the rows."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from dlprof.read.kineto.event_columns import Reader
from dlprof.read.kineto.split import messages
from dlprof.read.kineto.split.boundaries import Span

# Bytes of a span, each of which costs understanding its names anew; those of a packed file are held in memory.
AIM = 32 << 20
AIM_PACKED = 16 << 20
_ROOM = AIM_PACKED + (8 << 20)

_TASK = struct.Struct("<5q")  # number, room, and the span
_POST = struct.Struct("<3q")  # process, and where its message begins and how long it is; 0: it has done its work
IN_FILE = -1  # in place of a room

# A pipe holds a page at least, and all tasks of a file that is not packed are in it before a process takes one.
MOST_SPANS = mmap.PAGESIZE // _TASK.size


class Task(NamedTuple):
    """A span to be decoded, the n-th of the file, and where its bytes are."""

    number: int
    room: int
    span: Span


class Done(NamedTuple):
    """What became of a span: its rows; None where it is not whole.

    For what follows the last span of a packed file: these bytes, and why they stop short of the file's end.
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
        """Return what one `write` wrote, if all write so many bytes; nothing once every process closed its writing."""
        return os.read(self.ends[0], size)

    def write(self, data: bytes) -> None:
        os.write(self.ends[1], data)

    def close(self, *, reads: bool = True, writes: bool = True) -> None:
        for end, closes in enumerate((reads, writes)):
            if closes and self.ends[end] >= 0:
                os.close(self.ends[end])
                self.ends[end] = -1


class Table:
    """The processes take spans from it and lay down what became of them. Made before they are forked.

    `rooms`: how many spans of a packed file it holds at once.
    """

    def __init__(self, processes: int, rooms: int = 0) -> None:
        self._tasks, self._posts, self._free = _Pipe(), _Pipe(), _Pipe()
        self._stop = mmap.mmap(-1, 1)
        self._rooms = memoryview(mmap.mmap(-1, rooms * _ROOM)) if rooms else memoryview(b"")
        self._outputs = [os.memfd_create("dlprof") for _ in range(processes)]
        self._written = 0  # by this process
        self._free.write(bytes(range(rooms)))
        self.lost = False  # whether a process ended before it had done its work

    def put(self, task: Task) -> None:
        """Have a span decoded."""
        self._tasks.write(_TASK.pack(task.number, task.room, *task.span))

    def take(self) -> Task | None:
        """Return a span to be decoded, None when there is no further."""
        data = b"" if self._stop[0] else self._tasks.read(_TASK.size)
        if not data:
            return None
        number, room, *span = _TASK.unpack(data)
        return Task(number, room, Span(*span))

    def room(self, number: int) -> memoryview:
        """Return the memory of a room."""
        return self._rooms[number * _ROOM : (number + 1) * _ROOM]

    def free_room(self) -> int | None:
        """Return a room that nobody uses, as soon as there is one; None where nobody is left who could free one."""
        data = b"" if self._stop[0] else self._free.read(1)
        return data[0] if data else None

    def free(self, room: int) -> None:
        """Have a room used again."""
        self._free.write(bytes((room,)))

    def lay_down(self, process: int, done: Done | None) -> None:
        """Have what became of a span joined with the others; None: this process has done its work."""
        length = 0
        if done:
            self._written = messages.next_page(self._written)
            length = messages.write(self._outputs[process], self._written, done)
        self._posts.write(_POST.pack(process, self._written, length))
        self._written += length

    def done(self) -> Iterator[Done]:
        """Return what became of the spans, in the file's order, up to the first that is missing."""
        waiting: dict[int, Done] = {}
        number, working = 0, len(self._outputs)
        while post := self._posts.read(_POST.size):
            process, at, length = _POST.unpack(post)
            if not length:
                working -= 1
                continue
            one: Done = messages.read(self._outputs[process], at, length)
            waiting[one.number] = one
            while number in waiting:
                yield waiting.pop(number)
                number += 1
        self.lost = working > 0

    def leave(self, *, unpacks: bool = False, decodes: bool = False) -> None:
        """Close what only the others use, so that each of them learns when nobody is left who could write to it."""
        works = unpacks or decodes
        self._tasks.close(reads=not decodes, writes=not unpacks)
        # Rooms are freed after everything is unpacked, too.
        self._free.close(reads=not works, writes=not decodes)
        self._posts.close(reads=works, writes=not works)

    def close(self) -> None:
        """Drop what was decoded, and have no further span decoded."""
        self._stop[0] = 1
        for pipe in (self._tasks, self._posts, self._free):
            pipe.close()
        while self._outputs:
            os.close(self._outputs.pop())
