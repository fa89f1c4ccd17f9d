"""Hands objects from one process to another through a file in memory: their arrays are written once and not copied."""

from __future__ import annotations

import mmap
import os
import pickle
import struct
from typing import Any

_COUNT = struct.Struct("<q")
_ALIGNED = 64


def write(file: int, at: int, message: Any) -> int:
    """Write a message behind the byte `at` of a file, which is a multiple of a page; return its length."""
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
