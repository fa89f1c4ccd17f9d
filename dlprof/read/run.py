"""Opens a run and finds its ranks: a run folder of dlprof, a folder of other tools' files, or one such file."""

from __future__ import annotations

import glob
import itertools
import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dlprof import run_folder
from dlprof.errors import DlprofError
from dlprof.files import longer
from dlprof.read import facts
from dlprof.read.limits import MOST_RANKS
from dlprof.read.mixture import Gathered, Taken, beside, gather, one_file
from dlprof.read.opening import Inside, Unpacked, top, unpacked
from dlprof.read.sources import SOURCES
from dlprof.run_folder import SAMPLES, STACKS
from dlprof.units import duration, few, listed

FORMAT = 1

# Names of the readers of other tools' files.
TRACE, NSYS = "torch_trace", "nsys"

# The folder of a rank: its number and its restart. A name with more digits is no rank.
_LIFE = re.compile(r"([0-9]{1,9})(?:\.r([0-9]{1,9}))?")

# A job without a recorded end counts as running if one of its files was written to in the last so many seconds.
_STILL_S = 20.0

# Hosts' clocks may be so far apart: only a rank that began so long after another's end is of a later job.
_CLOCKS_NS = 60_000_000_000

# The most tasks that one warning names.
_MOST_NAMED = 8


@dataclass(frozen=True)
class Rank:
    """What one rank left on disk. `facts`: what the recorder wrote; empty for other tools' files."""

    index: int
    files: Mapping[str, Path] = field(default_factory=dict)  # source or format → its file
    facts: Mapping[str, Any] = field(default_factory=dict)
    resumed_ns: tuple[int, ...] = ()  # when the job, or part of it, continued after a stop
    pieces: Mapping[str, str] = field(default_factory=dict)  # format → this rank's piece of a shared file
    begins: Mapping[str, str] = field(default_factory=dict)  # source → what its lines begin with in a file of several

    @property
    def unpacked_bytes(self) -> int:
        """The estimated size of its files, unpacked. Their tables need about as much memory (seen on real traces)."""
        from dlprof.read.kineto.json_stream import unpacked_bytes

        return sum(map(unpacked_bytes, self.paths))

    @property
    def paths(self) -> list[Path]:
        """Its files, each once."""
        return list(dict.fromkeys(self.files.values()))


@dataclass(frozen=True)
class Run:
    """One job: its ranks, how it started and ended, and warnings about its files.

    `taken`: for each file of another tool, the ranks that it is read for, or why it is left out.
    """

    path: Path
    ranks: tuple[Rank, ...]
    recorded: bool = False
    command: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    exit: Mapping[str, int | None] = field(default_factory=lambda: {"code": None, "signal": None})
    start_ns: int | None = None  # of the command, Unix time
    end_ns: int | None = None  # None: it runs, or its end was not recorded
    oom_kills: int = 0  # processes on the host that the kernel killed during the job, out of memory
    warnings: tuple[str, ...] = ()
    taken: tuple[Taken, ...] = ()

    @property
    def largest_first(self) -> list[Rank]:
        """The ranks with the largest files first, so that no large one is read last."""
        return sorted(self.ranks, key=lambda rank: -rank.unpacked_bytes)

    def share_out(self, jobs: int | None) -> None:
        """Divide the cores, or `jobs` of them, among its traces; kineto/split.py reads each trace with its share."""
        from dlprof.read.kineto import split

        whole = (rank for rank in self.ranks if TRACE in rank.files and TRACE not in rank.pieces)
        bytes_of = {rank.files[TRACE]: rank.unpacked_bytes for rank in whole}
        split.share_out(bytes_of, sum(rank.unpacked_bytes for rank in self.ranks), jobs)


def open_run(path: str | os.PathLike[str], window: int | None = None) -> Run:
    """Open a run folder, a folder of other tools' files, or one such file.

    `window`: the number of the window to read where ranks have several, from 1; None: of a recorded run the first, of
    other tools' traces the last complete one. Raises DlprofError if nothing can be read, or there is no such window.
    """
    where = Path(path)
    try:
        if where.is_dir():
            if (where / "run.json").is_file() or (where / "ranks").is_dir():
                return _recorded(where, window)
            return _foreign(where, gather(where, window))
        if where.is_file():
            if where.name in ("run.json", "result.json", "facts.json"):
                raise DlprofError(f"{where}: part of a run, not a trace; give its folder, {where.parent}")
            packed = unpacked(where)
            return _foreign(where, one_file(where)) if packed is None else _packed(where, packed, window)
    except PermissionError as e:
        raise DlprofError(f"{e.filename or where}: permission denied") from None
    if where.exists():
        raise DlprofError(f"{where}: neither a file nor a folder")
    raise DlprofError(f"{where}: no such file or folder")


def _packed(where: Path, found: Unpacked, window: int | None) -> Run:
    """Open the contents of a packed file as if they were in its place."""
    inner = top(found.path) if found.is_archive else found.path
    try:
        run = open_run(inner, window) if found.is_archive else _foreign(where, one_file(inner))
    except DlprofError as e:
        raise DlprofError("; ".join([str(e).replace(str(inner), str(where)), *found.warnings])) from None
    return replace(run, path=where, warnings=(*found.warnings, *run.warnings))


def _facts(inside: Inside, path: Path, shape: Mapping[str, facts.Shape]) -> tuple[Mapping[str, Any], list[str]]:
    """Return the facts in a file that dlprof wrote, and warnings. There are no facts if it is missing or broken."""
    if not inside.holds(path):
        return {}, [f"{path.name} is missing"]
    try:
        reading = facts.read(path, shape)
    except DlprofError as e:
        return {}, [str(e)]
    return reading.facts, list(reading.warnings)


def _tasks(inside: Inside, folder: Path) -> list[Mapping[str, Any]]:
    """Return what the tasks of a job have written themselves."""
    tasks: list[Mapping[str, Any]] = []
    for path in run_folder.in_tasks(folder):
        with suppress(OSError):
            said = run_folder.tasks_in(path) if inside.holds(path) else {}
            tasks += [facts.fitting(facts.TASK, one) for one in said.values()]
    return tasks


# Of the earlier starts of a job, so many are looked for.
_MOST_STARTS = 64


def _unended(folder: Path) -> str:
    """Return a warning that the job's end was not recorded. It still runs if its files were just written to."""
    written = 0.0
    for place in (*run_folder.in_ranks(folder), *run_folder.in_hosts(folder)):
        for path in place.glob("*.jsonl"):
            with suppress(OSError):
                written = max(written, path.stat().st_mtime)
    if time.time() - written < _STILL_S:
        return "the job still runs, or ended just now: the figures are of what was recorded so far"
    return "the recording was cut off: the end of the job was not recorded"


def _recorded(folder: Path, window: int | None = None) -> Run:
    inside = Inside(folder)
    info, warnings = _facts(inside, folder / "run.json", facts.RUN)
    newer = info.get("format", FORMAT)
    if type(newer) is not int or newer > FORMAT:
        raise DlprofError(
            f"{folder / 'run.json'} has format {newer!r}; this dlprof reads format {FORMAT}: upgrade dlprof"
        )
    tasks = info.get("tasks") or _tasks(inside, folder)
    if info and tasks and info.get("end_ns") is None:
        info = {**info, **run_folder.together(tasks)}  # no task wrote the end of the job
    warnings += info.get("warnings") or ()
    warnings += _earlier(folder, info)
    warnings += once_each(
        [(host.name, text) for host in run_folder.in_hosts(folder) for text in _said(inside, host)], "hosts"
    )
    ranks, odd = _ranks(inside, window)
    warnings += odd
    resumed = {at for one in (info, *tasks) for at in one.get("resumed_ns") or ()}
    more = beside(folder, [rank.index for rank in ranks])
    ranks = [
        replace(
            rank,
            files={**rank.files, **more.files.get(rank.index, {})},
            pieces={**rank.pieces, **more.pieces.get(rank.index, {})},
            resumed_ns=tuple(sorted(resumed)),
        )
        for rank in ranks
    ]
    if not ranks:
        warnings.append("no rank left a record: the job ended before its first step, or Python was started without it")
    warnings += _of_tasks(tasks)
    if info and info.get("end_ns") is None:
        warnings.append(_unended(folder))
    ended = info.get("exit") or {}
    seen = [*(info.get("hosts") or ()), *(rank.facts.get("host") for rank in ranks)]
    return Run(
        path=folder,
        ranks=tuple(ranks),
        recorded=True,
        command=tuple(info.get("command") or ()),
        hosts=tuple(dict.fromkeys(host for host in seen if host)),
        exit={"code": ended.get("code"), "signal": ended.get("signal")},
        start_ns=info.get("start_ns"),
        end_ns=info.get("end_ns"),
        oom_kills=int(info.get("oom_kills") or 0),
        warnings=(*warnings, *inside.warnings),
        taken=tuple(one for one in more.taken if one.ranks),
    )


def _boot(inside: Inside, host: Path) -> str:
    """Return the boot id of the machine that sampled into a host's folder; "": not known."""
    new = inside.holds(host / run_folder.SAMPLES)
    return run_folder.boot_of(host) if new else inside.text(host / "boot")  # of an older run


def _said(inside: Inside, host: Path) -> list[str]:
    """Return the warnings of what sampled a host."""
    start, said = run_folder.begins("warning"), inside.text(host / "warnings.txt").splitlines()  # of an older run
    for path in sorted(host.glob(run_folder.notes_name("*"))):
        for line in inside.text(path).splitlines():
            with suppress(ValueError, RecursionError, LookupError, TypeError):
                said += [" ".join(json.loads(line)["text"].splitlines())] if line.startswith(start) else []
    return said


_RESTARTED = re.compile(r"(.+) \(restart \d+\)")


def _earlier(folder: Path, info: Mapping[str, Any]) -> list[str]:
    """Say what the earlier starts of a job that its scheduler started again did: their runs lie beside this one."""
    job = _RESTARTED.fullmatch(str(info.get("batch") or ""))
    if job is None:
        return []
    runs = list[tuple[int, str, Mapping[str, Any]]]()
    stem = re.sub(r"-\d+$", "", folder.resolve().name)
    for path in itertools.islice(folder.resolve().parent.glob(f"{glob.escape(stem)}*/run.json"), _MOST_STARTS):
        other = _facts(Inside(path.parent), path, facts.RUN)[0]
        batch, began = str(other.get("batch") or ""), other.get("start_ns")
        same = batch == job[1] or ((again := _RESTARTED.fullmatch(batch)) is not None and again[1] == job[1])
        if same and began is not None and began < (info.get("start_ns") or 0):
            runs.append((began, path.parent.name, other))
    if not runs:
        return []
    said, ended = [], None
    for began, name, other in sorted(runs, key=lambda run: run[0]):
        ended, how = other.get("end_ns"), other.get("exit") or {}
        by = f"by signal {how['signal']}" if how.get("signal") else f"with exit code {how.get('code')}"
        said.append(f"{name} ran {duration(ended - began)} and ended {by}" if ended else f"{name} was cut off")
    later = max((info.get("start_ns") or 0) - ended, 0) if ended else None
    waited = f"; it was started again {duration(later)} later" if later is not None else ""
    return [f"{info['batch']}: before this start of it, {few(said, 4)}{waited}"]


def _foreign(where: Path, found: Gathered) -> Run:
    ranks = [Rank(rank, files, pieces=found.pieces.get(rank, {})) for rank, files in sorted(found.files.items())]
    return Run(path=where, ranks=tuple(ranks), warnings=found.warnings, taken=found.taken)


def _ranks(inside: Inside, asked: int | None) -> tuple[list[Rank], list[str]]:
    """Return the ranks of a recorded run, each from its last start and with one window's trace, and warnings."""
    warnings = []
    lives: dict[int, list[tuple[int, Path]]] = {}
    strangers = []
    same: dict[tuple[int, int], Path] = {}  # the folders by device and inode
    for folder in run_folder.in_ranks(inside.root) if inside.holds_folder(inside.root / "ranks") else ():
        # 00003: rank 3. 00003.r1: its first restart by torch-elastic. 00003.4711: another process that claimed rank 3.
        life = _LIFE.fullmatch(folder.name)
        if life and int(life[1]) < MOST_RANKS and inside.holds_folder(folder):
            found = folder.stat()
            if (of := same.setdefault((found.st_dev, found.st_ino), folder)) is not folder:
                warnings.append(f"{folder.name} is the folder {of.name} under another name: it is not read again")
                continue
            lives.setdefault(int(life[1]), []).append((int(life[2] or 0), folder))
        elif inside.holds_folder(folder):
            strangers.append(folder.name)
    if strangers:
        why = "several processes claimed the same rank, or one that no job has"
        warnings.append(f"{why}; not read: {few(strangers, 8)}")
    last = max((attempt for mine in lives.values() for attempt, _ in mine), default=0)
    if last:
        warnings.append(f"the job was restarted {last} × by its launcher: the figures are of the last start")
    hosts: dict[Any, Path] = {path.name: path for path in run_folder.in_hosts(inside.root) if inside.holds_folder(path)}
    every_host = dict(hosts)
    boots = {name: boot for name, path in hosts.items() if (boot := _boot(inside, path))}
    ranks = []
    of_ranks: list[tuple[str, str]] = []
    known: dict[int, tuple[Path, Mapping[str, Any]]] = {}
    odd_of: dict[int, list[str]] = {}
    for index, mine in sorted(lives.items()):
        attempt, folder = max(mine)
        if attempt < last:
            warnings.append(f"rank {index} left nothing after the last restart")
            continue
        recorded, odd = _facts(inside, folder / "facts.json", facts.RANK)
        known[index] = folder, recorded
        odd_of[index] = odd
    of_job, others = of_one_job({index: recorded for index, (_, recorded) in known.items()})
    warnings += others
    traces = {index: _traces(inside, *known[index]) for index in known if index in of_job}
    number = _number(inside.root, asked, traces.values())
    for index, (folder, recorded) in known.items():
        if index not in of_job:
            continue
        recorded = _of_window(recorded, number)
        of_ranks += [(f"rank {index}", text) for text in (*odd_of[index], *(recorded.get("warnings") or ()))]
        # Where hosts share a name, the one whose sampler started first keeps it, else the first rank's host.
        name, boot = recorded.get("host"), recorded.get("boot") or ""
        if name and boot and boots.setdefault(name, boot) != boot:
            recorded = {**recorded, "host": longer(name, boot)}
        # A host's samples belong to no single rank. They are read with its first rank.
        at = every_host.get(recorded.get("host"), next(iter(every_host.values())) if len(every_host) == 1 else None)
        sources = _sources(inside, folder, at, hosts.pop(recorded.get("host"), None))
        files = {name: path for name, (path, _) in sources.items() if name != TRACE}
        begun = {name: begins for name, (_, begins) in sources.items() if begins}
        files |= {TRACE: traces[index][number]} if number in traces[index] else {}
        window = recorded.get("window") or {}
        begins, ends = window.get("first_step"), window.get("last_step")
        if begins is not None and ends is not None and ends < begins:  # the job ended as the window began
            files.pop(TRACE, None)
        at = every_host.get(recorded.get("host"))
        exported = _nsys_of(inside, at, recorded.get("pid")) if at and TRACE not in files else None
        if exported is None:
            ranks.append(Rank(index, files, recorded, begins=begun))
        else:
            files, pieces = {**files, NSYS: exported[0]}, {NSYS: exported[1]}
            ranks.append(Rank(index, files, recorded, pieces=pieces, begins=begun))
    return ranks, warnings + once_each(of_ranks, "ranks")


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
    for rank, recorded in sorted(ranks.items(), key=lambda item: (_began(item[1]), item[0])):
        for job in jobs:
            why = job.differs(recorded)
            if not why:
                break
            reasons[why] = None
        else:
            job = _Job()
            jobs.append(job)
        job.add(rank, recorded)
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


def _traces(inside: Inside, folder: Path, recorded: Mapping[str, Any]) -> dict[int, Path]:
    """Return the trace of each of a rank's windows, by the window's number."""
    entries = (recorded.get("windows") or [])[:16]  # files from elsewhere may name any number
    later = [int(w["number"]) for w in entries if w.get("number") and w.get("trace")]
    names = {1: "trace.json"} | {number: f"trace-{number}.json" for number in later}
    paths = ((number, folder / f"{name}{packed}") for packed in ("", ".gz") for number, name in names.items())
    return {number: path for number, path in paths if inside.holds(path)}


def _number(run: Path, asked: int | None, traces: Iterable[Mapping[int, Path]]) -> int:
    """Return which window is read: the first that any rank has a trace of, or the one that is asked for."""
    numbers = sorted(set(itertools.chain(*traces)))
    if asked is None:
        return next(iter(numbers), 1)
    if asked not in numbers:
        there = f"its windows: {listed(numbers)}" if numbers else "it has no trace"
        raise DlprofError(f"{run}: no trace of window {asked}; {there}")
    return asked


def _of_window(recorded: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """Return a rank's facts with a later window in the first one's place."""
    if number == 1:
        return recorded
    window = next((w for w in recorded.get("windows") or () if w.get("number") == number), {"state": "missed"})
    return {**recorded, "window": {**window, "theirs": (recorded.get("window") or {}).get("theirs")}}


def _nsys_of(inside: Inside, host: Path, pid: int | None) -> tuple[Path, str] | None:
    """Return the nsys export of the host that holds process `pid`, and the name of the piece; None: there is none."""
    for path in sorted(host.glob("nsys*.sqlite")):
        if inside.holds(path) and pid is not None:
            from dlprof.read.nsys.format import piece_of

            if piece := piece_of(path, pid):
                return path, piece
    return None


def _of_tasks(tasks: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return warnings of tasks that failed, in order of time, or have no known end; none if all tasks ended alike."""
    ends: dict[str, list[str]] = {}
    for task in sorted(tasks, key=lambda task: task.get("end_ns") or 2**62):
        code, signal = ((task.get("exit") or {}).get(name) for name in ("code", "signal"))
        end = f"ended with exit code {code}" if task.get("end_ns") else "did not end, as far as is known"
        number, host = task.get("number"), task.get("host") or "an unknown host"
        named = host if number is None else f"{number} on {host}"
        ends.setdefault(f"ended by signal {signal}" if signal else end, []).append(named)
    if len(ends) < 2:
        return []
    ends.pop("ended with exit code 0", None)
    return [
        f"task {who[0]} {end}" if len(who) == 1 else f"{len(who)} tasks {end}: {few(who, _MOST_NAMED)}"
        for end, who in ends.items()
    ]


def once_each(warnings: Iterable[tuple[str, str]], kind: str) -> list[str]:
    """Return each warning once, prefixed with the name that has it, or with the number of names and `kind`."""
    who: dict[str, list[str]] = {}
    for name, text in warnings:
        who.setdefault(text, []).append(name)
    return [f"{names[0] if len(names) == 1 else f'{len(names)} {kind}'}: {text}" for text, names in who.items()]


def _sources(inside: Inside, folder: Path, host: Path | None, first: Path | None) -> dict[str, tuple[Path, str]]:
    """Return the file of each source of a rank, and what its lines begin with there; "": the file is all its own.

    `host`: the folder of the rank's host; `first`: that too, where the host's own samples are read with this rank. A
    log that is not in the file after all is missed when it is read.
    """
    name = folder.relative_to(inside.root / "ranks").as_posix()
    found = {}
    for source in SOURCES:
        own = first if source.of_host else folder
        beside = source.within in (SAMPLES, STACKS) and not source.of_host
        shared, rank = (host, name) if beside else (own, "")
        if source.within and shared is not None and inside.holds(shared / source.within):
            found[source.name] = shared / source.within, run_folder.begins(source.log, rank)
        elif own is not None and (path := next((own / f for f in source.files if inside.holds(own / f)), None)):
            found[source.name] = path, ""
    return found
