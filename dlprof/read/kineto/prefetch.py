"""Decodes traces in another process while this one still imports what the analysis needs.

Importing takes a third of a second on one core, while the others are idle. Decoded rows go into an unnamed file in
memory. The process that reads the trace later, this one or a fork of it, takes them from there. If anything fails, that
process decodes the trace itself. Several processes decode a trace that is large enough to be split (split.py).
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from dlprof.read.kineto import split
from dlprof.read.kineto.event_columns import Rows, decode
from dlprof.read.kineto.events import BlurredTimes
from dlprof.read.kineto.json_stream import unpacked_bytes

# Imports of pandas and the rules take about as long as decoding two files. For a larger file the gain is small, and
# passing on its rows takes memory again.
MOST_FILES = 2
MOST_BYTES = 256 << 20

_STOP, _BEGUN = 0, 1  # offsets in shared memory: whether to stop, and one byte for each file


@dataclass(frozen=True)
class _Place:
    """Where the rows of one file come to lie: `ready` is read from until they are there."""

    number: int
    rows: int
    ready: int
    shared: mmap.mmap

    @property
    def is_begun(self) -> bool:
        return bool(self.shared[_BEGUN + self.number])

    def close(self) -> None:
        os.close(self.rows)
        os.close(self.ready)


_places: dict[Path, _Place] = {}
_split: dict[Path, split.Decoding] = {}


def begin(paths: Sequence[Path]) -> None:
    """Start decoding the first of these files, in order; do nothing if no core is free for it."""
    if _split:
        return
    if paths and (begun := split.begin(paths[0])):
        _split[paths[0]] = begun
        return
    chosen = list(islice((path for path in paths if unpacked_bytes(path) <= MOST_BYTES), MOST_FILES))
    # Forking is safe while this process has no thread of its own.
    if not chosen or _places or not hasattr(os, "memfd_create") or threading.active_count() > 1:
        return
    if len(os.sched_getaffinity(0)) < 2:
        return
    ends = []
    try:
        shared = mmap.mmap(-1, _BEGUN + len(chosen))
        for number, path in enumerate(chosen):
            ready, done = os.pipe()
            ends.append(done)
            _places[path] = _Place(number, os.memfd_create("dlprof"), ready, shared)
        multiprocessing.get_context("fork").Process(target=_decode, args=(ends,), daemon=True).start()
    except OSError:  # no process, file or memory is available
        pass
    finally:
        for end in ends:
            os.close(end)


def stop() -> None:
    """Start no further file: the readers now need the cores."""
    for place in _places.values():
        place.shared[_STOP] = True


def is_begun(path: Path | None) -> bool:
    """Return whether a file is being decoded or was decoded, and its rows were not read yet."""
    place = _places.get(path) if path is not None else None
    return place is not None and place.is_begun


def forget() -> None:
    """Drop decoded rows that were not read."""
    for begun in (_places, _split):
        while begun:
            begun.popitem()[1].close()


def rows_of(path: Path) -> Rows | None:
    """Wait for the rows of a file that was begun, and return them; None if the caller must decode it."""
    if path in _split:
        with contextlib.suppress(BlurredTimes):
            return _split.pop(path).rows()
    place = _places.pop(path, None)
    if place is None:
        return None
    try:
        if place.is_begun and os.read(place.ready, 1):
            with mmap.mmap(place.rows, 0, access=mmap.ACCESS_READ) as pickled:
                rows: Rows = pickle.loads(pickled)
                return rows
    except (OSError, ValueError, MemoryError, EOFError, pickle.UnpicklingError):
        pass
    finally:
        place.close()
    return None


def _decode(ends: Sequence[int]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    for (path, place), end in zip(_places.items(), ends, strict=True):
        if place.shared[_STOP]:
            return
        place.shared[_BEGUN + place.number] = True
        try:
            with os.fdopen(place.rows, "wb") as file:
                pickle.dump(decode(path), file, protocol=pickle.HIGHEST_PROTOCOL)
            os.write(end, b"1")
        except Exception:  # noqa: BLE001 - reading the file raises the same, and reports it
            pass
        finally:
            os.close(end)
