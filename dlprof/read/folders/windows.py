"""The windows of a job that was traced several times: which file of which rank belongs to which, and which is whole.

A profiler with a schedule writes a file a window and rank. Some jobs put each window into a folder
(profiles/iteration_100/rank0.json), others all files into one.
"""

from __future__ import annotations

import os
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dlprof.errors import DlprofError
from dlprof.read.limits import most_unpacked
from dlprof.read.opening import open_file

_BLOCK = 1 << 20

# How torch's tensorboard_trace_handler names the files of a process without a name: host_pid.time.pt.trace.json.
_OF_PROCESS = re.compile(r"(.+_\d+)\.\d{10,20}\.pt\.trace\.json(?:\.gz)?")


class Window(NamedTuple):
    """One file of a rank, and when it began on a clock that all files of the rank share; None: not known."""

    path: Path
    began_ns: int | None


def named_process(path: Path) -> str:
    """Return the host and process that a file's name tells, "" where it tells none."""
    found = _OF_PROCESS.fullmatch(path.name)
    return found[1] if found else ""


def windows_of(by_rank: Mapping[int, Sequence[Window]]) -> list[dict[int, Path]]:
    """Return the windows in their order, each with the files of its ranks.

    Where each folder holds a rank once at most, a folder is a window. Else the n-th file of each rank is of window n,
    in the order of their times, or of their names where a time is missing.
    """
    if not by_rank:
        return []
    folders: dict[Path, dict[int, Window]] = defaultdict(dict)
    for rank, files in by_rank.items():
        for one in files:
            folders[one.path.parent].setdefault(rank, one)
    several = any(len(files) > 1 for files in by_rank.values())
    alone = sum(map(len, folders.values())) == sum(map(len, by_rank.values()))
    # Folders that ranks share are windows; a rank's own folder is not.
    shared = len(by_rank) == 1 or any(len(of) > 1 for of in folders.values())
    if several and alone and shared:
        ordered = _in_order([Window(folder, _earliest(of.values())) for folder, of in folders.items()])
        return [{rank: one.path for rank, one in sorted(folders[w.path].items())} for w in ordered]
    sorted_files = {rank: _in_order(files) for rank, files in by_rank.items()}
    most = max(map(len, sorted_files.values()))
    return [{r: files[n].path for r, files in sorted(sorted_files.items()) if n < len(files)} for n in range(most)]


def whole(windows: Sequence[Mapping[int, Path]]) -> int:
    """Return the number, from 1 on, of the last window that all ranks have and no file of which is cut off.

    Where none is, the last one that the most ranks have.
    """
    most = max(map(len, windows))
    full = [n for n, window in enumerate(windows, 1) if len(window) == most]
    return next((n for n in reversed(full) if not any(map(is_cut, windows[n - 1].values()))), full[-1])


def is_cut(path: Path) -> bool:
    """Return whether a JSON file, packed or not, stops short of its end; also where it cannot be read."""
    try:
        with open_file(path) as file:
            packed = file.read(2) == b"\x1f\x8b"
            if not packed:
                file.seek(max(file.seek(0, os.SEEK_END) - 256, 0))
                return not file.read().rstrip().endswith((b"}", b"]"))
            left = most_unpacked(os.fstat(file.fileno()).st_size)
            file.seek(0)
            member = zlib.decompressobj(wbits=31)
            while block := file.read(_BLOCK):
                while block and left > 0 and not member.eof:
                    left -= len(member.decompress(block, _BLOCK))
                    block = member.unconsumed_tail
            return not member.eof
    except (DlprofError, zlib.error):
        return True


def _earliest(windows: Iterable[Window]) -> int | None:
    times = [one.began_ns for one in windows]
    return min((t for t in times if t is not None), default=None) if None not in times else None


def _in_order(windows: Sequence[Window]) -> list[Window]:
    """Return windows by time, or as they stand (in the natural order of their names) where a time is missing."""
    if any(one.began_ns is None for one in windows):
        return list(windows)
    return sorted(windows, key=lambda one: one.began_ns or 0)
