"""What the files of a folder belong to: windows of one job, ranks of several jobs, and files that no format knows.

A profiler with a schedule writes a file a window and rank. Some jobs put each window into a folder
(profiles/iteration_100/rank0.json), others all files into one. The ranks of two jobs that were given one folder must
not be averaged. A file that is left is described in a few words, so that the report can list it.
"""

from __future__ import annotations

import os
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dlprof.errors import DlprofError
from dlprof.read.formats import Head
from dlprof.read.kineto.patterns import rank_in
from dlprof.read.limits import most_unpacked
from dlprof.read.opening import open_file
from dlprof.units import listed

_BLOCK = 1 << 20

# How torch's tensorboard_trace_handler names the files of a process without a name: host_pid.time.pt.trace.json.
_OF_PROCESS = re.compile(r"(.+_\d+)\.\d{10,20}\.pt\.trace\.json(?:\.gz)?")


class Window(NamedTuple):
    """One file of a rank, and when it began on a clock that all files of the rank share; None: not known."""

    path: Path
    began_ns: int | None


def named_process(path: Path) -> str:
    """Return the host and process that a file's name tells, "" if it tells none."""
    found = _OF_PROCESS.fullmatch(path.name)
    return found[1] if found else ""


def runs_of(files: Iterable[tuple[Path, int | None]]) -> list[set[Path]]:
    """Return the folders of each run, given traces and their ranks: TensorBoard's folder of logs has a folder a run.

    Folders are of one run if a process wrote into both, or if they hold different ranks; all are where the name of a
    file does not tell its process. But where no file tells its rank either, they are only if they are named by ranks.
    """
    folders: dict[Path, tuple[set[str], set[int | None]]] = {}
    for path, rank in files:
        processes, ranks = folders.setdefault(path.parent, (set(), set()))
        processes.add(named_process(path))
        ranks.add(rank)
    if any("" in processes for processes, _ in folders.values()):
        known = any(rank is not None for _, ranks in folders.values() for rank in ranks)
        by_rank = all(d.name.isdecimal() or rank_in(d.name) is not None for d in folders)
        return [set(folders)] if known or by_rank else [{d} for d in folders]
    runs: list[tuple[set[Path], set[str], set[int | None]]] = []
    for folder, (processes, ranks) in folders.items():
        for inside, others, theirs in runs:
            if processes & others or (None not in ranks | theirs and not ranks & theirs):
                inside.add(folder)
                others |= processes
                theirs |= ranks
                break
        else:
            runs.append(({folder}, processes, ranks))
    return [inside for inside, _, _ in runs]


def windows_of(by_rank: Mapping[int, Sequence[Window]]) -> list[dict[int, Path]]:
    """Return the windows in their order, each with the files of its ranks.

    If no folder holds a rank twice, each folder is a window. Else the n-th file of each rank belongs to window n, in
    order of their times, or of their names if a time is missing.
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
    """Return the number, from 1, of the last window that all ranks have, without files that are cut off.

    If there is none, return the last one among those with the most ranks.
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
    """Return windows by time, or unchanged (in natural order of names) if a time is missing."""
    if any(one.began_ns is None for one in windows):
        return list(windows)
    return sorted(windows, key=lambda one: one.began_ns or 0)


# By the first bytes; the sizes and offsets are those of the formats' own documents.
_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG\r\n", "a picture"),
    (b"\xff\xd8\xff", "a picture"),
    (b"GIF8", "a picture"),
    (b"%PDF", "a PDF"),
    (b"PK\x03\x04", "a zip file (torch.save writes checkpoints so; an archive is read where it is named itself)"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive: unpack it with `7z x FILE`"),
    (b"Rar!", "a rar archive: unpack it with `unrar x FILE`"),
    (b"\x04\x22\x4d\x18", "packed with lz4: unpack it with `lz4 -d FILE`"),
    (b"SQLite format 3\0", "an SQLite database without the tables of nsys"),
    (b"\x80\x02", "a pickle"),
    (b"\x80\x03", "a pickle"),
    (b"\x80\x04", "a pickle"),
    (b"\x80\x05", "a pickle"),
    (b"\x7fELF", "a program"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x89HDF", "an HDF5 file"),
    (b"PAR1", "a Parquet file"),
    (b"\x28\xb5\x2f\xfd", "packed with zstd: unpack it with `zstd -d FILE`"),
)


_TAR = (257, b"ustar")


_SHAPES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"<svg|<\?xml[^>]*>\s*<svg"), "a picture"),
    (re.compile(r"\s*<(?:!doctype|html)", re.I), "a web page"),
    (re.compile(r'(?s).*^(?:#!.*python|import |from \w[\w.]* import |def |"""|class )', re.M), "Python source"),
    (re.compile(r"(?:[^,\n]*,){2,}[^,\n]*\n(?:[^,\n]*,){2,}"), "a table of no known columns"),
)


def described(head: Head) -> str:
    """Return what a file without a known format seems to be."""
    start = head.start
    if not head.size:
        return "empty"
    if head.is_packed and not start:
        return "damaged gzip data"
    for magic, words in _MAGIC:
        if start.startswith(magic):
            return words
    if start[_TAR[0] : _TAR[0] + len(_TAR[1])] == _TAR[1]:
        return "a tar archive, which is read where it is named itself"
    if head.opens in ("{", "["):
        return "JSON of no known format"
    if not head.is_text:
        return "of no known format"
    text = start.decode(errors="replace")
    return next((words for shape, words in _SHAPES if shape.match(text)), "text of no known format")


# Hosts' clocks may be so far apart: only a rank that began so long after another's end is of a later job.
_CLOCKS_NS = 60_000_000_000


@dataclass
class _Job:
    """What is known of the ranks that were taken for one job so far; None: nothing is."""

    ranks: list[int] = field(default_factory=list)
    named: dict[str, str] = field(default_factory=dict)  # what launchers call it, by the name of the variable
    size: int | None = None
    ended_ns: int | None = None  # when the first of them did

    def differs(self, facts: Mapping[str, Any]) -> str:
        """Return what shows that a rank is of another job; "": nothing does."""
        for name, value in self.named.items():
            if _named(facts).get(name, value) != value:
                return name
        size, began = facts.get("world_size"), _began(facts)
        if not facts.get("backend"):
            return ""  # without a process group they may come and go as they like
        if self.size and size and self.size != size:
            return "the number of their ranks"
        return "when they ran" if self.ended_ns and began - self.ended_ns > _CLOCKS_NS else ""

    def add(self, rank: int, facts: Mapping[str, Any]) -> None:
        """Take a rank for one of this job."""
        self.ranks.append(rank)
        self.named = {**_named(facts), **self.named}
        if facts.get("backend"):
            self.size = self.size or facts.get("world_size")
            ended = facts.get("ended_ns")
            self.ended_ns = min(filter(None, (self.ended_ns, ended)), default=None)


def of_one_job(ranks: Mapping[int, Mapping[str, Any]]) -> tuple[set[int], list[str]]:
    """Return the ranks of one job, given the facts of all ranks by number, and a warning if there are other jobs.

    Of several jobs, the one with most ranks is returned; of equally large ones, the latest. Ranks belong to two jobs if
    their launchers' ids differ, if their process groups differ in size, or if one had ended before the other began.
    Unknown facts, as in older recordings, are ignored.
    """
    jobs: list[_Job] = []
    reasons: dict[str, None] = {}
    for rank, facts in sorted(ranks.items(), key=lambda item: (_began(item[1]), item[0])):
        for job in jobs:
            why = job.differs(facts)
            if not why:
                break
            reasons[why] = None
        else:
            job = _Job()
            jobs.append(job)
        job.add(rank, facts)
    if len(jobs) < 2:
        return set(ranks), []
    *others, read = sorted(jobs, key=lambda job: len(job.ranks))  # of those as large, the last to begin stays the last
    left = [rank for job in others for rank in job.ranks]
    return set(read.ranks), [
        f"the folder holds ranks of {len(jobs)} jobs, which differ in {' and '.join(reasons)}: read are ranks"
        f" {listed(read.ranks)}, left out are {listed(left)}"
    ]


def _named(facts: Mapping[str, Any]) -> dict[str, str]:
    return {name: value for name, value in (facts.get("launch") or {}).items() if value is not None}


def _began(facts: Mapping[str, Any]) -> int:
    return (facts.get("clock") or {}).get("unix_ns") or 0
