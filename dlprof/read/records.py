"""Finds the lines of one log in a file, which may hold several: `run_folder` says how these are told apart.

Such a file is looked through once, for where the lines of each log stand; then each log is read alone. So what a log
takes to read does not grow with the logs beside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlprof.errors import DlprofError
from dlprof.read.limits import MOST_LINE, limit
from dlprof.read.opening import lines_of, open_file

_BATCH = 4 << 20  # bytes that are read at once
_LOOKED = 1 << 19  # and where they are only looked through: as much as stays in a core's cache

_HEAD = b'{"log":"'
_KEY = len(_HEAD)  # bytes by which logs are told apart at first sight
_MOST_NAME = 64


class NotThereError(DlprofError):
    """A file of several logs has not this one."""


def lines_in(path: Path, begins: str = "") -> Iterator[list[bytes]]:
    """Return a log's lines, thousands at a time: all of a file, or those that begin so since the log began anew.

    Raises DlprofError if the file cannot be read, NotThereError if it has several logs and not this one.
    """
    if not begins:
        with open_file(path) as file:
            yield from lines_of(file)
        return
    name = begins[len(_HEAD) :].partition('"')[0].encode()
    starts, ends = _places(path, *_state(path)).get(name, _NOWHERE)
    anew = np.flatnonzero(ends - starts == len(_HEAD) + len(name) + 2)  # as {"log":"modules"}
    first, there, start = (int(anew[-1]) + 1 if len(anew) else 0), bool(len(anew)), begins.encode()
    of_all = len(start) <= len(_HEAD) + len(name) + 2  # ranks too
    while first < len(starts):
        last = max(int(np.searchsorted(ends, starts[first] + _BATCH)), first + 1)
        # A process writes many lines at once: those that follow each other are taken as one.
        begun, ended = starts[first:last] - starts[first], ends[first:last] - starts[first]
        parted = np.flatnonzero(begun[1:] != ended[:-1] + 1)
        places = zip(begun[[0, *(parted + 1)]].tolist(), ended[[*parted, -1]].tolist(), strict=True)
        with open_file(path) as file:
            file.seek(int(starts[first]))
            data = file.read(int(ended[-1]))
        lines = b"\n".join([data[begin:end] for begin, end in places]).split(b"\n")
        lines = lines if of_all else [line for line in lines if line.startswith(start)]
        there, first = there or bool(lines), last
        yield lines
    if not there:
        raise NotThereError(f"{path}: nothing of {name.decode(errors='replace')} in it")


def last_line(path: Path, begins: str) -> bytes:
    """Return the last line that is whole of a log in a file of several; raises as `lines_in` does."""
    for lines in reversed(list(lines_in(path, begins))):
        for line in reversed(lines):
            if line.endswith(b"}"):
                return line
    raise NotThereError(f"{path}: it was cut off")


_NOWHERE = np.empty((2, 0), dtype=np.int64)


def _state(path: Path) -> tuple[int, int]:
    """Return size and time of a file; −1: there is none, as opening it says."""
    try:
        at = path.stat()
    except OSError:
        return -1, -1
    return at.st_size, at.st_mtime_ns


@lru_cache(maxsize=2)
def _places(path: Path, size: int, _written_ns: int) -> dict[bytes, NDArray[np.int64]]:
    """Return where the lines of each log begin and end, in order (two rows), by its name; what is no log's is left out.

    Up to a line that is longer than MOST_LINE, or the end of `size` bytes, whose last line may be cut off.
    """
    found: dict[bytes, list[NDArray[np.int64]]] = defaultdict(list)
    with open_file(path) as file:
        at, held = 0, b""
        while block := file.read(min(_LOOKED, size - at - len(held))):
            data = held + block
            if at + len(data) == size:
                data += b"\n"
            ends = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == ord("\n"))
            for name, starts_of, ends_of in _lines(data, ends):
                found[name].append(np.stack([starts_of, ends_of]) + at)
            read = int(ends[-1]) + 1 if len(ends) else 0
            held, at = data[read:], at + read
            if len(held) > limit(MOST_LINE):
                break
    return {name: _in_order(np.concatenate(parts, axis=1)) for name, parts in found.items()}


def _in_order(places: NDArray[np.int64]) -> NDArray[np.int64]:
    return places[:, np.argsort(places[0], kind="stable")]


def _lines(data: bytes, ends: NDArray[Any]) -> Iterator[tuple[bytes, NDArray[Any], NDArray[Any]]]:
    """Return name, begins and ends of the lines in data, by their first bytes: a log may come several times."""
    starts = np.concatenate(([0], ends[:-1] + 1)) if len(ends) else ends
    # The eight bytes at each place, as one number. Names have two letters or more.
    eight = np.ndarray(len(data), "<u8", data + bytes(8), strides=(1,))
    whole = ends - starts >= len(_HEAD) + _KEY // 2
    starts, ends = starts[whole], ends[whole]
    ours = eight[starts] == np.frombuffer(_HEAD, "<u8")[0]
    starts, ends = starts[ours], ends[ours]
    keys = eight[starts + len(_HEAD)]
    while len(keys):
        of_key = keys == keys[0]
        first = int(starts[0]) + len(_HEAD)
        yield data[first : first + _MOST_NAME].partition(b'"')[0], starts[of_key], ends[of_key]
        starts, ends, keys = starts[~of_key], ends[~of_key], keys[~of_key]
