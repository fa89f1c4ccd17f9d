"""A run on disk and its ranks: a folder that dlprof recorded, a folder of traces from anywhere, or one trace file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dlprof.errors import DlprofError
from dlprof.hosts import BOOT, longer
from dlprof.read.opening import Inside
from dlprof.read.sources import SOURCES, Reading
from dlprof.units import few

FORMAT = 1

# Which reader foreign files are for.
TRACE = "torch_trace"

# How deep below a folder foreign traces are looked for (profiles/iteration_100/rank0.json), and how many files are
# looked into before the folder is taken for something else than a folder of traces.
DEPTH = 3
MOST_FILES = 20_000

_TRACES = (".json", ".json.gz", ".trace", ".trace.gz", ".pt.trace")

# The folder of a rank, and which of its lives it was; a rank of more digits is nobody's.
_LIFE = re.compile(r"([0-9]{1,9})(?:\.r([0-9]{1,9}))?")

# Tasks that one warning names.
_MOST_NAMED = 8


@dataclass(frozen=True)
class Rank:
    """What one rank left on disk. `facts` are the recorder's; of a foreign trace, empty."""

    index: int
    files: Mapping[str, Path] = field(default_factory=dict)  # source → what is read of it
    facts: Mapping[str, Any] = field(default_factory=dict)
    resumed_ns: tuple[int, ...] = ()  # when the job, or a part of it, went on again after it was stopped

    @property
    def unpacked_bytes(self) -> int:
        """An estimate of what its files hold, unpacked; tables need about as much memory (seen on real traces)."""
        from dlprof.read.kineto.json_stream import unpacked_bytes

        return sum(map(unpacked_bytes, self.files.values()))


@dataclass(frozen=True)
class Run:
    """One training job: its ranks, how it was started and ended, and what was odd about its files."""

    path: Path
    ranks: tuple[Rank, ...]
    recorded: bool = False
    command: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    exit: Mapping[str, int | None] = field(default_factory=lambda: {"code": None, "signal": None})
    warnings: tuple[str, ...] = ()

    @property
    def largest_first(self) -> list[Rank]:
        """The ranks in the order in which they are best read: no big one is left for the end."""
        return sorted(self.ranks, key=lambda rank: -rank.unpacked_bytes)


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open a run folder, a folder of traces or one trace file; raise DlprofError where there is nothing in it."""
    where = Path(path)
    try:
        if where.is_dir():
            if (where / "run.json").is_file() or (where / "ranks").is_dir():
                return _recorded(where)
            return _foreign(where)
        if where.is_file():
            return _one_file(where)
    except PermissionError as e:
        raise DlprofError(f"{e.filename or where}: permission denied") from None
    if where.exists():
        raise DlprofError(f"{where}: neither a file nor a folder")
    raise DlprofError(f"{where}: no such file or folder")


def _facts(inside: Inside, path: Path, read: Callable[[Path], Reading]) -> tuple[Mapping[str, Any], list[str]]:
    """Read what a file of ours says; what is missing or broken gives nothing and a warning."""
    if not inside.holds(path):
        return {}, [f"{path.name} is missing"]
    try:
        reading = read(path)
    except DlprofError as e:
        return {}, [str(e)]
    return reading.facts, list(reading.warnings)


def _recorded(folder: Path) -> Run:
    from dlprof.read import facts as reader

    inside = Inside(folder)
    info, warnings = _facts(inside, folder / "run.json", reader.read_run)
    newer = info.get("format", FORMAT)
    if type(newer) is not int or newer > FORMAT:
        raise DlprofError(
            f"{folder / 'run.json'} has format {newer!r}; this dlprof reads format {FORMAT}: upgrade dlprof"
        )
    warnings += info.get("warnings") or ()
    warnings += _of_hosts(inside)
    attempts: dict[int, list[tuple[int, Path]]] = {}
    strangers = []
    for sub in sorted((folder / "ranks").glob("*")) if inside.holds_folder(folder / "ranks") else ():
        # 00003, its second life under torch-elastic 00003.r1, another process that claimed the same rank 00003.4711
        life = _LIFE.fullmatch(sub.name)
        if not inside.holds_folder(sub):
            continue
        if life:
            attempts.setdefault(int(life[1]), []).append((int(life[2] or 0), sub))
        else:
            strangers.append(sub.name)
    if strangers:
        warnings.append(f"several processes claimed the same rank; not read: {', '.join(strangers)}")
    last = max((a for lives in attempts.values() for a, _ in lives), default=0)
    if last:
        warnings.append(f"the job was restarted {last} × by its launcher: the figures are of the last start")
    hosts: dict[Any, Path] = {path.name: path for path in folder.glob("hosts/*") if inside.holds_folder(path)}
    boots = {name: boot for name, path in hosts.items() if (boot := inside.text(path / BOOT))}
    ranks = []
    of_ranks: list[tuple[str, str]] = []
    for index, lives in sorted(attempts.items()):
        attempt, sub = max(lives)
        if attempt < last:
            warnings.append(f"rank {index} left nothing after the last restart")
            continue
        facts, odd = _facts(inside, sub / "facts.json", reader.read)
        of_ranks += [(f"rank {index}", warning) for warning in (*odd, *(facts.get("warnings") or ()))]
        files = _files(inside, sub)
        # Where machines share a name, the first to sample has it, else the first rank's.
        name, boot = facts.get("host"), facts.get("boot") or ""
        if name and boot and boots.setdefault(name, boot) != boot:
            facts = {**facts, "host": longer(name, boot)}
        # What was sampled of a host belongs to none of its ranks: the first one brings it.
        host = hosts.pop(facts.get("host"), None)
        if host is not None:
            files |= _files(inside, host, of_host=True)
        ranks.append(Rank(index, files, facts))
    tasks = info.get("tasks") or _tasks(inside)
    resumed = {at for one in (info, *tasks) for at in one.get("resumed_ns") or ()}
    ranks = [replace(rank, resumed_ns=tuple(sorted(resumed))) for rank in _with_log(inside, ranks, warnings)]
    warnings += together(of_ranks, "ranks")
    if not ranks:
        warnings.append("no rank left a record: the job ended before its first step, or Python was started without it")
    ended = info.get("exit") or {}
    warnings += _of_tasks(tasks)
    if info and info.get("end_ns") is None:
        warnings.append("the recording was cut off: nobody saw the job end")
    warnings += inside.warnings
    seen = [*(info.get("hosts") or ()), *(rank.facts.get("host") for rank in ranks)]
    return Run(
        path=folder,
        ranks=tuple(ranks),
        recorded=True,
        command=tuple(info.get("command") or ()),
        hosts=tuple(dict.fromkeys(host for host in seen if host)),
        exit={"code": ended.get("code"), "signal": ended.get("signal")},
        warnings=tuple(warnings),
    )


def _tasks(inside: Inside) -> list[Mapping[str, Any]]:
    """Return what each task of a job said of itself, where none had seen all of them end."""
    from dlprof.read import facts as reader

    said: list[Mapping[str, Any]] = []
    for path in sorted(p for p in inside.root.glob("tasks/*.json") if inside.holds(p)):
        try:
            said.append(reader.read_task(path).facts)
        except (OSError, DlprofError):  # noqa: PERF203 - each may be half written
            said.append({})
    return said


def _of_tasks(tasks: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return which tasks of a job failed, the first first, and whose end nobody saw; nothing where all ended alike."""
    said: dict[str, list[str]] = {}
    for task in sorted(tasks, key=lambda task: task.get("end_ns") or 2**62):
        code, signal = ((task.get("exit") or {}).get(name) for name in ("code", "signal"))
        end = "did not end, as far as is known" if not task.get("end_ns") else f"ended with exit code {code}"
        words = f"ended by signal {signal}" if signal else end
        number, host = task.get("number"), task.get("host") or "an unknown host"
        said.setdefault(words, []).append(host if number is None else f"{number} on {host}")
    if len(said) < 2:
        return []
    said.pop("ended with exit code 0", None)
    return [
        f"task {who[0]} {words}" if len(who) == 1 else f"{len(who)} tasks {words}: {few(who, _MOST_NAMED)}"
        for words, who in said.items()
    ]


def _of_hosts(inside: Inside) -> list[str]:
    """Return the warnings of each host's samplers; the same of several once."""
    files = sorted(inside.root.glob("hosts/*/warnings.txt"))
    return together([(path.parent.name, line) for path in files for line in inside.text(path).splitlines()], "hosts")


def together(warnings: Iterable[tuple[str, str]], kind: str) -> list[str]:
    """Return each warning once, behind the name of the only one who has it, or how many of their kind have."""
    who: dict[str, list[str]] = {}
    for name, text in warnings:
        who.setdefault(text, []).append(name)
    return [f"{names[0] if len(names) == 1 else f'{len(names)} {kind}'}: {text}" for text, names in who.items()]


def _files(inside: Inside, folder: Path, *, of_host: bool = False) -> dict[str, Path]:
    """Find the file of each source that a rank, or a host, left."""
    sources = [s for s in SOURCES if s.of_host == of_host]
    found = {s.name: next((folder / f for f in s.files if inside.holds(folder / f)), None) for s in sources}
    return {source: path for source, path in found.items() if path is not None}


def _one_file(path: Path) -> Run:
    from dlprof.read.kineto import headers

    if path.name in ("run.json", "result.json", "facts.json"):
        raise DlprofError(f"{path}: part of a run, not a trace; give its folder, {path.parent}")
    rank = headers.peek(path).get("rank")
    return Run(path=path, ranks=(Rank(rank if isinstance(rank, int) else 0, {TRACE: path}),))


def _foreign(folder: Path) -> Run:
    """Find the traces below a folder and who of them is which rank."""
    from dlprof.read.kineto import headers

    inside = Inside(folder)
    files = _candidates(inside)
    peeks = [(f, headers.peek(f)) for f in files]
    traces = [(f, p) for f, p in peeks if p.get("is_trace")]
    if not traces:
        seen = "it is empty" if not any(folder.iterdir()) else f"looked into {len(files)} .json and .json.gz files"
        seen = "; ".join((seen, *inside.warnings))
        raise DlprofError(f"{folder}: no torch-profiler traces and no dlprof run in it ({seen})")
    warnings = inside.warnings
    skipped = len(peeks) - len(traces)
    if skipped:
        other = ", ".join(f.name for f, p in peeks if not p.get("is_trace"))
        warnings.append(f"{skipped} other files were left out: {other[:200]}")
    by_rank: dict[int, list[Path]] = {}
    nameless = []
    for f, p in traces:
        if isinstance(p.get("rank"), int):
            by_rank.setdefault(p["rank"], []).append(f)
        else:
            nameless.append(f)
    if nameless and by_rank:
        warnings.append(f"left out, since they do not tell their rank: {', '.join(f.name for f in nameless)[:200]}")
    elif nameless:
        by_rank = {i: [f] for i, f in enumerate(nameless)}
        if len(nameless) > 1:
            warnings.append("no trace tells its rank: they are numbered in the order of their names")
    for rank, same in sorted(by_rank.items()):
        if len(same) > 1:
            chosen = same[-1]
            warnings.append(
                f"rank {rank} is there {len(same)} times; read: {chosen.relative_to(folder)} (name another to read it)"
            )
            by_rank[rank] = [chosen]
    ranks = _with_log(inside, [Rank(r, {TRACE: f[0]}) for r, f in sorted(by_rank.items())], warnings)
    return Run(path=folder, ranks=tuple(ranks), warnings=tuple(warnings))


def _with_log(inside: Inside, ranks: list[Rank], warnings: list[str]) -> list[Rank]:
    """Return the first rank what somebody had nvidia-smi log into the folder: it is of all GPUs of a host."""
    tables = [path for path in sorted(inside.root.glob("*.csv")) if inside.holds(path)]
    if not tables:
        return ranks
    from dlprof.read import nvidia_smi

    logs = [path for path in tables if nvidia_smi.is_log(path)]
    if not logs or not ranks:
        return ranks
    if len(logs) > 1:
        warnings.append(f"several logs of nvidia-smi; read: {logs[0].name}")
    first = ranks[0]
    return [replace(first, files={**first.files, "nvidia_smi": logs[0]}), *ranks[1:]]


def _candidates(inside: Inside) -> list[Path]:
    """List the files that may be traces, level by level, each in the natural order of names."""
    found: list[Path] = []
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
                    below.append(path)
                elif e.name.endswith(_TRACES) and (inside.holds(path) if link else e.is_file()):
                    found.append(path)
            if len(found) > MOST_FILES:
                raise DlprofError(
                    f"{inside.root}: more than {MOST_FILES} JSON files below it; name the folder of the traces"
                )
        level = below
    return found


def _natural(name: str) -> list[tuple[int, str]]:
    """Order rank10 after rank9."""
    return [(int(p), "") if p.isdecimal() else (-1, p) for p in re.split(r"(\d{1,18})", name) if p]
