"""Finds the format and the rank of each file of other tools, in a folder or given alone.

A folder may hold traces of several ranks and several windows of each, logs of GPUs, stacks, and other files. It counts
as one job. The content of a file decides its format (formats.py). `Gathered.taken` has the ranks that each file is read
for, or why it is left out: a file of no known format is described in some words.

A profiler with a schedule writes a file for each window and rank. Some jobs put each window into a folder
(profiles/iteration_100/rank0.json), others all files into one.
"""

from __future__ import annotations

import os
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from dlprof import run_folder
from dlprof.errors import DlprofError, RefusedError
from dlprof.files import KEPT
from dlprof.read.formats import JOINED, Format, Head, Part, format_named, formats, recognised
from dlprof.read.kineto.patterns import rank_in
from dlprof.read.limits import DEPTH, MOST_APART_NS, MOST_FILES, MOST_OTHERS, MOST_RANKS, most_unpacked
from dlprof.read.opening import Inside, open_file, unpacked
from dlprof.units import count, duration, few, listed

_TRACES = (".json", ".json.gz", ".trace", ".trace.gz", ".pt.trace")

# A file with this table makes a rank. Other files are added to it.
_SPANS = "spans"


@dataclass(frozen=True)
class Taken:
    """One file: its format, and the ranks that it is read for, or why it is left out."""

    path: Path
    format: Format | None
    ranks: tuple[int, ...] = ()
    left: str = ""


@dataclass(frozen=True)
class Gathered:
    """The files of each rank by format, with the rank's piece if a file holds several ranks; and the warnings."""

    files: Mapping[int, Mapping[str, Path]]
    pieces: Mapping[int, Mapping[str, str]]
    taken: tuple[Taken, ...]
    warnings: tuple[str, ...] = ()


class _Found(NamedTuple):
    path: Path
    format: Format
    part: Part


@dataclass
class _Ranks:
    """Collects which files are read for which rank. `left`: why a file is not read."""

    files: dict[int, dict[str, Path]] = field(default_factory=dict)
    pieces: dict[int, dict[str, str]] = field(default_factory=dict)
    left: dict[Path, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    hosts: dict[str, int] = field(default_factory=dict)  # host → its first rank

    def first_of(self, path: Path) -> int:
        """Return the first rank of the host that a path names; the first of all if it names no host, or several."""
        named = [host for host in self.hosts if _names(path, host)]
        return self.hosts[named[0]] if len(named) == 1 else min(self.files, default=0)

    def put(self, rank: int, one: _Found) -> None:
        """Add a part of a file to a rank, unless another file already has its tables."""
        mine = self.files.setdefault(rank, {})
        exclusive = set(one.format.tables) - JOINED
        for name, path in mine.items():
            if name == one.format.name and path != one.path:
                self.left[one.path] = f"rank {rank} has another {one.format.title}, {path.name}, which is read"
                return
            if name != one.format.name and (both := exclusive & set(format_named(name).tables)):
                self.left[one.path] = f"the {', '.join(sorted(both))} of rank {rank} are read from {path.name}"
                return
        mine[one.format.name] = one.path
        if one.part.host:
            self.hosts[one.part.host] = min(rank, self.hosts.get(one.part.host, rank))
        if one.part.piece:
            self.pieces.setdefault(rank, {})[one.format.name] = one.part.piece


def one_file(path: Path) -> Gathered:
    """Return the ranks of one file; raise DlprofError if it has no format that is read."""
    head = Head(path)
    known = recognised(head)
    if known is None:
        # JSON may still be a trace that was cut off early: its reader reports what is wrong.
        if head.opens not in ("{", "["):
            raise DlprofError(f"{path}: {described(head)}; `dlprof explain sources` lists what is read")
        known = format_named("torch_trace"), (Part(),)
    found, parts = known
    if found.read is None:
        raise DlprofError(f"{path}: {found.title}: {found.left}")
    ranks = _Ranks()
    parts = _ranked(path, parts, ranks.warnings)
    # Parts without a rank get the free numbers, in order.
    numbered = {part.rank: part for part in parts if part.rank is not None}
    free = (n for n in range(len(parts)) if n not in numbered)
    numbered |= dict(zip(free, [part for part in parts if part.rank is None], strict=False))
    for rank, part in numbered.items():
        ranks.put(rank, _Found(path, found, part))
    taken = Taken(path, found, tuple(sorted(ranks.files)))
    return Gathered(ranks.files, ranks.pieces, (taken,), tuple(ranks.warnings))


def gather(folder: Path, window: int | None = None) -> Gathered:
    """Find the files of other tools below a folder, and the rank of each.

    `window`: the number of the window to read where ranks have several, from 1; None: the last complete one. Raises
    DlprofError if nothing in the folder can be read, or it has no such window, and RefusedError if runs of dlprof's own
    are all that is in it: they are not one job.
    """
    inside = Inside(folder)
    paths, unseen, runs = _below(inside)
    paths, linked = _once(paths)
    ranks = _Ranks()
    warnings = ranks.warnings
    warnings += inside.warnings
    found, taken = _judged(paths, warnings)
    if linked:
        names = few([f"{one.path.name} ({one.left})" for one in linked], 4)
        warnings.append(f"files with several names in the folder are read once: {names}")
    if unseen:
        warnings.append(
            f"{count(unseen, 'more file')} in the folder {'was' if unseen == 1 else 'were'} not looked into"
        )
    if runs:
        runs = sorted(runs, key=lambda run: run.stat().st_mtime_ns, reverse=True)
        several = len(runs) > 1
        names = f"name {'one' if several else 'it'}: {few(list(map(str, runs)), 6)}{several * ' (the newest first)'}"
        if not any(_SPANS in f.format.tables for f in found):
            raise RefusedError(f"{folder} holds {count(len(runs), 'run')} of dlprof and is none itself: {names}")
        warnings.append(f"{count(len(runs), 'run')} of dlprof in the folder {'are' if several else 'is'} left; {names}")
    if not found:
        raise DlprofError(_nothing(folder, paths, taken, warnings))
    of_first: Format | None = None
    of_ranks = sorted((f for f in formats() if _SPANS in f.tables), key=lambda f: -f.precedence)
    for one in of_ranks:
        mine = [f for f in found if f.format is one]
        if mine and ranks.files:  # ranks from two kinds of traces are not comparable, nor on one clock
            kind = of_first.title if of_first else ""
            ranks.left |= dict.fromkeys((f.path for f in mine), f"the spans of the ranks are read from a {kind}")
            continue
        of_first = one if mine else of_first
        mine = _of_one_run(_of_one_size(mine, folder, ranks), folder, ranks)
        chosen = _of_one_time(_chosen(_by_rank(mine, ranks), folder, window, ranks), ranks)
        for rank, each in chosen.items():
            ranks.put(rank, each)
    for f in found:
        if f.format not in of_ranks:
            _beside(f, ranks)
    every = (*_uses(found, ranks), *taken)
    # Of the files left out, a user may expect known formats and JSON to be read.
    unread = [f"{one.path.name} ({one.left})" for one in every if one.format and one.format.read is None]
    unread += [one.path.name for one in every if not one.format and one.path.name.endswith(_TRACES)]
    if unread:
        warnings.append(f"left out: {few(unread, 8)}")
    return Gathered(dict(sorted(ranks.files.items())), ranks.pieces, (*every, *linked), tuple(warnings))


def beside(folder: Path, known: Sequence[int]) -> Gathered:
    """Find files of other tools in a run folder, without its subfolders, to read with the run's ranks."""
    inside = Inside(folder)
    paths = [path for path in sorted(folder.glob("*")) if path.name not in _OURS and inside.holds(path)]
    paths, linked = _once(paths)
    found, taken = _judged(paths, [])
    taken += linked
    ranks = _Ranks({rank: {} for rank in known})
    for f in found:
        if _SPANS in f.format.tables:
            ranks.left[f.path] = "the run has its own recording"
        else:
            _beside(f, ranks)
    return Gathered(ranks.files, ranks.pieces, (*_uses(found, ranks), *taken))


# Files that dlprof writes into a run folder.
_OURS = frozenset({"run.json", "result.json", "report.html"})


def _uses(found: Iterable[_Found], ranks: _Ranks) -> Iterator[Taken]:
    """Return for each file what it is read for, or why it is left out."""
    readers: dict[tuple[Path, str], list[int]] = {}
    for rank, mine in ranks.files.items():
        for name, path in mine.items():
            readers.setdefault((path, name), []).append(rank)
    for path, of in {f.path: f.format for f in found}.items():
        read = tuple(sorted(readers.get((path, of.name), ())))
        yield Taken(path, of, read, "" if read else ranks.left.get(path, "no rank needs it"))


def _once(paths: Sequence[Path]) -> tuple[list[Path], list[Taken]]:
    """Return each file once, by device and inode, and the other names: a second name is no second rank."""
    names: dict[tuple[int, int], Path] = {}
    same: dict[Path, Path] = {}
    for path in sorted(paths, key=Path.is_symlink):  # a file before the links to it
        try:
            found = path.stat()
        except OSError:
            continue
        first = names.setdefault((found.st_dev, found.st_ino), path)
        if first is not path:
            same[path] = first
    return [p for p in paths if p not in same], [
        Taken(path, None, left=f"the same file as {first.name}") for path, first in same.items()
    ]


def _ranked(path: Path, parts: Sequence[Part], warnings: list[str]) -> Sequence[Part]:
    """Replace impossible ranks with None, with a warning."""
    odd = [part.rank for part in parts if part.rank is not None and part.rank >= MOST_RANKS]
    if odd:
        warnings.append(f"{path.name}: says that it is of rank {odd[0]:,}, which no job has: its rank is unknown")
    return [part._replace(rank=None) if part.rank in odd else part for part in parts]


def _judged(paths: Iterable[Path], warnings: list[str]) -> tuple[list[_Found], list[Taken]]:
    """Return the parts of the files that are read, and the reasons for leaving out the others; add warnings."""
    found, taken = [], []
    for path in paths:
        try:
            head = Head(path)
        except DlprofError as e:
            taken.append(Taken(path, None, left=str(e)))
            continue
        known = recognised(head)
        if known is None and (inner := unpacked(path, archives=False)):
            warnings += inner.warnings
            path, head = inner.path, Head(inner.path)
            known = recognised(head)
        if known is None:
            taken.append(Taken(path, None, left=described(head)))
        elif known[0].read is None:
            taken.append(Taken(path, known[0], left=known[0].left))
        else:
            found += [_Found(path, known[0], part) for part in _ranked(path, known[1], warnings)]
    return found, taken


def _nothing(folder: Path, paths: Sequence[Path], taken: Sequence[Taken], warnings: Sequence[str]) -> str:
    """Return the reason why a folder has nothing to read."""
    seen = f"looked into {count(len(paths), 'file')}" if paths else "it is empty"
    known = {f"{one.format.title}: {one.left}": None for one in taken if one.format}
    seen = "; ".join((seen, *known, *warnings))
    return f"{folder}: no torch-profiler traces, no files of other tools and no dlprof run in it ({seen})"


# Each of these chooses files of ranks. It notes in `ranks` why it leaves others, and warns.


def _of_one_size(found: list[_Found], folder: Path, ranks: _Ranks) -> list[_Found]:
    """Return the traces of the job with most of them, of those that say how many ranks it has."""
    files: dict[int, dict[Path, int]] = {}
    for f in found:
        if f.part.world_size:
            files.setdefault(f.part.world_size, {})[f.path] = f.part.began_ns or 0
    if len(files) < 2:
        return found
    read = max(files, key=lambda size: (len(files[size]), max(files[size].values())))
    others = [f for f in found if f.part.world_size not in (None, read)]
    ranks.left |= {f.path: f"of another job, of {count(f.part.world_size or 0, 'rank')}" for f in others}
    names = few(list(dict.fromkeys(str(f.path.relative_to(folder)) for f in others)), 4)
    ranks.warnings.append(
        f"traces are of jobs of {' and '.join(map(str, sorted(files)))} ranks, and not of one: those of"
        f" {count(read, 'rank')} are read, left out: {names}"
    )
    return [f for f in found if f not in others]


def _of_one_run(found: list[_Found], folder: Path, ranks: _Ranks) -> list[_Found]:
    """Return the traces of the run that began last, of those that have folders of their own."""
    runs = runs_of((f.path, f.part.rank) for f in found)
    if len(runs) < 2:
        return found
    began = {f.path.parent: f.part.began_ns or 0 for f in sorted(found, key=lambda f: f.part.began_ns or 0)}
    *others, read = sorted(runs, key=lambda run: max(began[d] for d in run))
    name, *names = (few(sorted(str(d.relative_to(folder)) for d in run), 2) for run in (read, *others))
    ranks.left |= {f.path: f"of another run; that of {name} is read" for f in found if f.path.parent not in read}
    ranks.warnings.append(
        f"{len(runs)} runs are there; read: {name}, which began last. Name the folder of another: {few(names, 4)}"
    )
    return [f for f in found if f.path.parent in read]


def _by_rank(found: Sequence[_Found], ranks: _Ranks) -> dict[int, list[_Found]]:
    """Return the files of each rank, of all windows."""
    by_rank: dict[int, list[_Found]] = {}
    nameless: dict[str, list[_Found]] = {}
    for f in found:
        if f.part.rank is not None:
            by_rank.setdefault(f.part.rank, []).append(f)
        else:
            nameless.setdefault(named_process(f.path) or f"{f.path}:{f.part.piece}", []).append(f)
    unknown = [f.path for files in nameless.values() for f in files]
    if nameless and by_rank:
        ranks.left |= dict.fromkeys(unknown, "its rank is unknown, and other files name theirs")
        ranks.warnings.append(f"left out, since their rank is unknown: {few([p.name for p in unknown], 8)}")
    elif len(nameless) > 1:
        ranks.warnings.append("no trace names its rank: they are numbered in the order of their names")
    return by_rank or dict(enumerate(nameless.values()))


def _chosen(
    by_rank: Mapping[int, Sequence[_Found]], folder: Path, wanted: int | None, ranks: _Ranks
) -> dict[int, _Found]:
    """Return the file to read for each rank: of the `wanted` window, or of the last complete one."""
    by_path = {(rank, f.path): f for rank, files in by_rank.items() for f in files}
    windows = windows_of({r: [Window(f.path, f.part.began_ns) for f in files] for r, files in by_rank.items()})
    if len(windows) < 2:
        if wanted is not None and wanted != 1 and by_rank:
            raise DlprofError(f"{folder}: there is no window {wanted}: each rank has one")
        return {rank: by_path[rank, path] for of in windows for rank, path in of.items()}
    if wanted is not None and not 1 <= wanted <= len(windows):
        raise DlprofError(f"{folder}: there is no window {wanted}: there are {len(windows)}")
    number = whole(windows) if wanted is None else wanted
    chosen = windows[number - 1]
    for at, window in enumerate(windows, 1):
        if at != number:
            ranks.left |= dict.fromkeys(window.values(), f"of window {at}; window {number} is read")
    for path in chosen.values():
        ranks.left.pop(path, None)
    kind = "the one asked for" if wanted is not None else "the last complete one"
    names = [path.relative_to(folder) if path.is_relative_to(folder) else path.name for path in chosen.values()]
    name = few(list(map(str, names)), 3)
    ranks.warnings.append(
        f"{len(windows)} windows are there; read: {number}, {kind} ({name}; --window N reads another)"
    )
    if lost := sorted(set(by_rank) - set(chosen)):
        ranks.warnings.append(f"window {number} lacks rank {few(lost, 8)}")
    return {rank: by_path[rank, path] for rank, path in sorted(chosen.items())}


def _of_one_time(chosen: dict[int, _Found], ranks: _Ranks) -> dict[int, _Found]:
    """Return the largest group of ranks with traces that began at about the same time.

    If two groups are equally large, the later one is returned. Traces that began further apart come from several jobs,
    or have other units.
    """
    groups: list[list[int]] = []
    first = 0
    began = {rank: one.part.began_ns for rank, one in chosen.items() if one.part.began_ns is not None}
    for rank, at in sorted(began.items(), key=lambda item: item[1]):
        if not groups or at - first > MOST_APART_NS:
            groups.append([])
            first = at
        groups[-1].append(rank)
    if len(groups) < 2:
        return chosen
    *_, read = sorted(groups, key=len)
    others = sorted(began.keys() - read)
    apart = max(began.values()) - min(began.values())
    ranks.left |= {
        chosen[rank].path: f"it began too far apart from the traces of ranks {listed(read)}" for rank in others
    }
    ranks.warnings.append(
        f"traces began {duration(apart)} apart: they are of several jobs, or their clocks have different zeros or"
        f" units; read are ranks {listed(read)}, left out are {listed(others)}"
    )
    return {rank: one for rank, one in chosen.items() if rank not in others}


def _beside(f: _Found, ranks: _Ranks) -> None:
    """Add a file to its rank; if that is unknown, or the file belongs to a host, to the first rank."""
    if f.format.of_host or f.part.rank is None:
        ranks.put(ranks.first_of(f.path), f)
        return
    of_traces = any(_SPANS in format_named(name).tables for mine in ranks.files.values() for name in mine)
    if f.part.rank in ranks.files or f.format.of_any_rank or not of_traces:
        ranks.put(f.part.rank, f)
    else:
        ranks.left[f.path] = f"it is of rank {f.part.rank}, of which there is no trace"


def _names(path: Path, host: str) -> bool:
    """Return whether a file or its folder is named after a host, with or without its domain."""
    text = "/".join(path.parts[-2:])
    return any(
        re.search(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", text) for name in {host, host.partition(".")[0]}
    )


def _below(inside: Inside) -> tuple[list[Path], int, list[Path]]:
    """List the files to look into, level by level, in natural order of names; count the others; list dlprof's runs."""
    found: list[Path] = []
    runs: list[Path] = []
    traces = others = unseen = 0
    level = [inside.root]
    for _ in range(DEPTH + 1):
        below: list[Path] = []
        for d in level:
            try:
                entries = sorted(os.scandir(d), key=lambda e: _natural(e.name))
            except OSError:
                continue
            for e in entries:
                path, link = Path(e.path), e.is_symlink()
                if inside.holds_folder(path) if link else e.is_dir():
                    if e.name != KEPT:
                        (runs if _is_run(path) else below).append(path)
                elif not (inside.holds(path) if link else e.is_file()):
                    continue
                elif e.name.endswith(_TRACES):
                    traces += 1
                    found.append(path)
                elif others < MOST_OTHERS:
                    others += 1
                    found.append(path)
                else:
                    unseen += 1
            if traces > MOST_FILES:
                raise DlprofError(
                    f"{inside.root}: more than {MOST_FILES} JSON files below it; name the folder of the traces"
                )
        level = below
    return found, unseen, runs


def _is_run(folder: Path) -> bool:
    return (folder / "ranks").is_dir() and ((folder / "run.json").is_file() or run_folder.recorded(folder))


def _natural(name: str) -> list[tuple[int, str]]:
    """Order rank10 after rank9."""
    return [(int(p), "") if p.isdecimal() else (-1, p) for p in re.split(r"(\d{1,18})", name) if p]


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

_TAR_AT, _TAR = 257, b"ustar"

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
    if start[_TAR_AT:].startswith(_TAR):
        return "a tar archive, which is read where it is named itself"
    if head.opens in ("{", "["):
        return "JSON of no known format"
    if not head.is_text:
        return "of no known format"
    text = start.decode(errors="replace")
    return next((words for shape, words in _SHAPES if shape.match(text)), "text of no known format")
