"""Follows a run folder while it is written, or reads one that is over: what its step logs and samples say now.

A look reads only what is new. Whatever stands in the files, nothing here raises for it: what cannot be read is counted.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlprof import run_folder
from dlprof.errors import DlprofError
from dlprof.files import longer
from dlprof.record.ranks import words_here

PARTS = ("fetch", "lead", "forward", "backward", "optimizer")  # of a step, as `NAME_ns` in the table `steps`
_SUMMED = ("steps", "dur_ns", *(f"{part}_ns" for part in PARTS), "samples", "tokens", "fetches")
_USED, _NEEDED = (*_SUMMED, "step", "start_ns", "first", "profiled"), {"step", "start_ns", "dur_ns"}
_LAST = 20  # lines of the step log that "now" is made of

# Bytes of all step logs together that the first look reads, a second's work; of each at least, some 30 steps; and of
# one log at any later look. Beyond that: of a file that is read as a whole, and of the end of a log of samples: some
# readings of a host with 64 ranks.
_FIRST, _LEAST_FIRST, _NEXT, _WHOLE, _TAIL = 16 << 20, 24 << 10, 8 << 20, 16 << 20, 256 << 10

# Of more ranks than MANY only the FEW with the most time of their own are looked at closely; and so many hosts.
MANY, FEW, _HOSTS = 64, 16, 16

# A rank is waited for whose own time exceeds the median one's by so much of that, and of the step: less is chance.
_BEHIND, _BEHIND_STEP = 0.1, 0.02

_LIFE = re.compile(r"([0-9]{1,9})(?:\.r([0-9]{1,9}))?")


def stands_still(still_s: float, step_s: float) -> bool:
    """Return whether a job that has ended no step for so long, and whose steps take so long, stands still."""
    return still_s > max(20 * step_s, 10.0)


def find(path: Path | None) -> Path:
    """Return the run that a path is or holds, None: ./runs; of several the newest, before all one that is written now.

    Raises DlprofError where there is none.
    """
    folder = path or Path("runs")
    with contextlib.suppress(OSError):
        if _is_run(folder):
            return folder
        if runs := [one for one in folder.iterdir() if _is_run(one)]:
            return max(runs, key=_freshness)
    if path is None:
        raise DlprofError("there is no run in ./runs: `dlprof top RUN` names one")
    raise DlprofError(f"{path}: {'no run of dlprof' if os.path.lexists(path) else 'there is no such folder'}")


def _is_run(path: Path) -> bool:
    return (path / "run.json").is_file() or (path / "ranks").is_dir()


def _freshness(run: Path) -> tuple[bool, float]:
    """Return whether a run is being written, and when that was last done, Unix s."""
    written = 0.0
    steps, _ = run_folder.log_of(run / "ranks" / "00000", "steps")
    for path in (run, run / "run.json", run / "ranks", steps):
        with contextlib.suppress(OSError):
            written = max(written, path.stat().st_mtime)
    # One whose recording was killed has no end either; after an hour it counts as over.
    return not _last(run / "run.json", _WHOLE)[-1].get("end_ns") and time.time() - written < 3600, written


def _bytes(path: Path, at: int, most: int) -> bytes:
    """Return a piece of a file, from its end where `at` is negative; b"" where it cannot be read, or is no file."""
    with contextlib.suppress(OSError, ValueError):
        if path.is_file():  # and no pipe, which could keep us waiting
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                at = file.seek(max(size + at, 0) if at < 0 else at)
                return file.read(min(most, max(size - at, 0)))  # it makes room for as much as is asked for
    return b""


def _object(text: bytes) -> dict[str, Any]:
    """Return the object that a text of JSON is; {} where it is none."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text)
        return found if isinstance(found, dict) else {}
    return {}


def _last(path: Path, most: int = _TAIL, start: str = "") -> list[dict[str, Any]]:
    """Return the last objects in a file of a line for each, of those that begin so; [{}] where there are none."""
    size = -1
    with contextlib.suppress(OSError, ValueError):
        size = path.stat().st_size
    lines = [line for line in _tail(path, size, most) if line.startswith(start.encode())]
    return [row for line in lines[-4:] if (row := _object(line))] or [{}]


@functools.lru_cache(maxsize=16)
def _tail(path: Path, _size: int, most: int) -> list[bytes]:
    """Return the last lines of a file of this size, in which several ranks may look for theirs."""
    return _bytes(path, -most, most).splitlines()


def number(row: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return a number of a row, the default where it is none or beyond reason."""
    value: Any = row.get(name)
    return value if type(value) in (int, float) and abs(value) < 1 << 62 else default


def _objects(row: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the object, or those of a list, that a row has under a name."""
    found = row.get(name)
    return [one for one in (found if isinstance(found, list) else [found]) if isinstance(one, dict)]


class Log:
    """A log of JSON lines that grows, in the folder of a rank; a line that is not whole waits.

    The first look reads the last `most` bytes of its file, more where there is none of its lines in them.
    """

    def __init__(self, folder: Path, name: str, most: int) -> None:
        self._folder, self._name, self._most, self._at = folder, name, most, -1
        self.skipped = False  # what was before those bytes was left out
        self.broken = 0  # lines that are no objects

    def follow(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the objects that are new, and whether the file is another one than before, or was cut off."""
        path, start = run_folder.log_of(self._folder, self._name)
        size = -1
        with contextlib.suppress(OSError, ValueError):
            size = path.stat().st_size
        if size in (-1, self._at):
            return [], False
        anew, first, most = size < self._at, self._at < 0, _NEXT
        if first:
            self._at, most = max(size - self._most, 0), self._most
            self.skipped = self._at > 0
        self._at = 0 if anew else self._at
        data = _bytes(path, self._at, most)
        # What has no end of a line in so many bytes is no log of ours.
        end = data.rfind(b"\n") + 1 or (len(data) if len(data) == most else 0)
        lines = [line for line in data[:end].splitlines()[first and self.skipped :] if line.startswith(start.encode())]
        if first and self.skipped and not lines and most < _WHOLE:
            self._at, self._most = -1, 4 * most  # something else was written last
            return self.follow()
        self._at += end
        rows = [_object(line) for line in lines]
        self.broken += rows.count({})
        return [row for row in rows if row], anew


def _checked(row: Mapping[str, Any]) -> dict[str, int] | None:
    """Return what is used here of a line of the step log, 0 where it was not measured; None for a line of another."""
    found = {}
    for name in _USED:
        value = row.get(name, 1 if name == "steps" else 0)
        if type(value) is not int or value >= 1 << 62 or (value < 0 and name in _NEEDED):
            return None
        found[name] = max(value, 0)
    return found if row.keys() >= _NEEDED and found["steps"] else None


def _add(total: Counter[str], row: Mapping[str, int]) -> Counter[str]:
    """Add the figures of a line to a total, and return that; Counter.update takes five times as long."""
    for name in _SUMMED:
        total[name] += row[name]
    return total


class Rank:
    """What a rank's folder has said so far: of one life, since a restarted rank has a folder for each of its lives."""

    def __init__(self, number: int, life: int, folder: Path, most: int) -> None:
        self.number, self.life, self.folder = number, life, folder
        self.log, self._stalls = Log(folder, "steps", most), Log(folder, "stalls", most)
        self._facts: tuple[float, dict[str, Any]] = (0.0, {})
        self._begin()

    def _begin(self) -> None:
        # By kind of step, and whether it is at an epoch's begin or end, or the profiler's.
        self._sums: dict[tuple[str, bool], Counter[str]] = defaultdict(Counter)
        self._recent: dict[str, deque[dict[str, int]]] = defaultdict(lambda: deque(maxlen=_LAST))
        self._early: list[tuple[str, dict[str, int]]] = []  # written before their time on the device was known
        self.step, self.ended_ns, self._known_ns, self.broken, self.epochs, self.in_epoch = -1, 0, 0, 0, 0, 0
        self.stalls: deque[dict[str, Any]] = deque(maxlen=4)
        self.stalled_ns: Counter[str] = Counter()  # by kind

    def read(self, *, closely: bool) -> None:
        """Read what is new; the stalls too, if closely."""
        rows, anew = self.log.follow()
        if anew:
            self._begin()
        for raw in rows:
            kind = raw["kind"] if raw.get("kind") in ("train", "validation") else "other"
            if (row := _checked(raw)) is None:
                self.broken += 1
                continue
            end_ns = row["start_ns"] + row["dur_ns"]
            self.step, self.ended_ns = max(self.step, row["step"] + row["steps"] - 1), max(self.ended_ns, end_ns)
            if raw.get("outstanding"):
                self._early.append((kind, row))
            else:
                self._known_ns = end_ns
                self._count(kind, row)
        # Those come again, once that time is known.
        self._early = [(kind, row) for kind, row in self._early if row["start_ns"] >= self._known_ns]
        for stall in self._stalls.follow()[0] if closely else ():
            self.stalls.append(stall)
            self.stalled_ns[str(stall.get("kind"))[:40]] += max(int(number(stall, "dur_ns", 0)), 0)

    def _count(self, kind: str, row: dict[str, int]) -> None:
        _add(self._sums[kind, bool(row["first"] or row["profiled"])], row)
        self._recent[kind].append(row)
        if kind == "train":
            self.epochs += row["steps"] if row["first"] else 0
            self.in_epoch = 1 if row["first"] else self.in_epoch + row["steps"]

    def by_kind(self) -> dict[str, Counter[str]]:
        """Return the sums of its steps, by kind: train, validation, other."""
        found: dict[str, Counter[str]] = defaultdict(Counter)
        for kind, row in [*((kind, sums) for (kind, _), sums in self._sums.items()), *self._early]:
            _add(found[kind], row)
        return found

    def now(self) -> tuple[Counter[str], Counter[str]]:
        """Return the sums of its last steps, and of all that were read: of training, where there is any.

        Without those at an epoch's begin or end and the profiler's, where there are others.
        """
        kind = "train" if "train" in self._recent else max(self._recent, default="")
        rows, last = list(self._recent[kind]) if kind else [], Counter[str]()
        for row in [row for row in rows if not (row["first"] or row["profiled"])] or rows:
            _add(last, row)
        return last, self._sums.get((kind, False)) or self._sums.get((kind, True)) or Counter()

    def facts(self) -> dict[str, Any]:
        """Return what the rank has written about itself; {} where that cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            written = (self.folder / "facts.json").stat().st_mtime
            if written != self._facts[0]:
                self._facts = written, _last(self.folder / "facts.json", _WHOLE)[-1]
        return self._facts[1]


@dataclass(frozen=True)
class RankNow:
    """A rank's last steps, per step and in seconds. None: not measured."""

    rank: int
    restarts: int
    step: int
    step_s: float
    mean_s: float  # of all steps that were read
    parts_s: Mapping[str, float]  # fetch, lead, forward, backward, optimizer, rest
    own_s: float  # fetch, lead and forward: what waits for no other rank
    still_s: float  # since its last step ended
    samples_per_s: float | None
    tokens_per_s: float | None
    machine: Mapping[str, Any]  # the last samples of its GPU and processes, as `machine` returns them


@dataclass(frozen=True)
class Now:
    """A run as it is now; its step is that of the median rank, its throughput that of the mean one times the ranks."""

    run: str
    command: Sequence[str]
    state: str  # starting, running, still, ended; gone: so too, but nobody was left to write it
    elapsed_s: float
    still_s: float | None  # since any rank has ended a step; None: the run is over, or has made none
    exit: Mapping[str, Any]
    rank_count: int
    ranks: Sequence[RankNow]  # of many ranks, those with the most time of their own
    step: int | None
    step_s: float | None
    mean_s: float | None
    samples_per_s: float | None
    tokens_per_s: float | None
    throughput_of: str  # job; rank, where it is not known which ranks work on the same samples
    waited_for: int | None
    epoch: Mapping[str, float]  # number, step, steps, left_s; {}: not known
    hosts: Sequence[Mapping[str, Any]]
    stalls: Sequence[Mapping[str, Any]]
    warnings: Sequence[str]


class Follower:
    """Follows a run. `here`: only the ranks of this host. `most`: bytes that the first look reads of all step logs."""

    def __init__(self, run: Path, *, here: bool = False, most: int = _FIRST) -> None:
        self.run, self._here, self._most = run, here, most
        self.lives: dict[str, Rank] = {}  # by their folders' names

    @property
    def ranks(self) -> list[Rank]:
        """The ranks that have ended a step, each in its last life, by number."""
        lives = sorted(self.lives.values(), key=lambda one: (one.number, one.life))
        return [one for one in {one.number: one for one in lives}.values() if one.ended_ns]

    def read(self) -> None:
        """Read what is new."""
        here = (self.run / "ranks" / word.folder for word in words_here(self.run)) if self._here else ()
        found = here if self._here else run_folder.in_ranks(self.run)
        new = [(life, path) for path in found if path.name not in self.lives and (life := _LIFE.fullmatch(path.name))]
        most = max(self._most // max(len(new), 1), _LEAST_FIRST)
        self.lives |= {path.name: Rank(int(life[1]), int(life[2] or 0), path, most) for life, path in new}
        for one in self.lives.values():
            one.read(closely=len(self.lives) <= MANY)

    def now(self) -> Now:
        """Return the run as it is now, by what was read."""
        about, ranks = _last(self.run / "run.json", _WHOLE)[-1], self.ranks
        all_of = [of(rank) for rank in ranks]
        step_s, mean_s, still_s = (
            middle([getattr(one, name) for one in all_of]) if all_of else None
            for name, middle in (("step_s", statistics.median), ("mean_s", statistics.median), ("still_s", min))
        )
        over_ns, state = number(about, "end_ns", 0), "starting" if still_s is None else "running"
        if over_ns > 0:
            state, still_s = "ended", None
        elif still_s is not None and stands_still(still_s, mean_s or 0):
            state = "gone" if _is_gone(self.run) else "still"
        until_ns = over_ns or time.time_ns()
        times, share_of = _share(ranks[0].facts() if ranks else {})
        rates = []
        for name in ("samples_per_s", "tokens_per_s"):
            known = [rate for one in all_of if (rate := getattr(one, name)) is not None]
            rates.append(statistics.mean(known) * times if known else None)
        closely = {one.rank for one in (all_of if len(all_of) <= MANY else slowest(all_of)[:FEW])}
        command, broken = about.get("command"), sum(one.broken + one.log.broken for one in self.lives.values())
        stalls = [{"rank": rank.number, **stall} for rank in ranks for stall in rank.stalls]
        return Now(
            run=str(self.run),
            command=tuple(map(str, command)) if isinstance(command, list) else (),
            state=state,
            elapsed_s=max((until_ns - number(about, "start_ns", until_ns)) / 1e9, 0.0),
            still_s=still_s,
            exit=next(iter(_objects(about, "exit")), {}) if state == "ended" else {},
            rank_count=len(ranks),
            ranks=tuple(of(rank, machine(rank)) for rank in ranks if rank.number in closely),
            step=ranks[0].step if ranks else None,
            step_s=step_s,
            mean_s=mean_s,
            samples_per_s=rates[0],
            tokens_per_s=rates[1],
            throughput_of=share_of,
            waited_for=_waited_for(all_of) if state not in ("still", "gone") else None,
            epoch=_epoch(ranks[0]) if ranks and state not in ("ended", "still", "gone") else {},
            hosts=tuple(map(host, run_folder.in_hosts(self.run)[:_HOSTS])),
            stalls=sorted(stalls, key=lambda stall: float(number(stall, "start_ns", 0)))[-3:],
            warnings=(f"{broken} lines of step logs cannot be read",) if broken else (),
        )


def of(rank: Rank, machine: Mapping[str, Any] | None = None) -> RankNow:
    """Return the figures of a rank's last steps."""
    now, usual = rank.now()
    steps, seconds = max(now["steps"], 1), max(now["dur_ns"], 1) / 1e9
    parts = {part: now[f"{part}_ns"] / steps / 1e9 for part in PARTS}
    return RankNow(
        rank=rank.number,
        restarts=rank.life,
        step=rank.step,
        step_s=now["dur_ns"] / steps / 1e9,
        mean_s=usual["dur_ns"] / max(usual["steps"], 1) / 1e9,
        parts_s=parts | {"rest": max(now["dur_ns"] / steps / 1e9 - sum(parts.values()), 0.0)},
        own_s=parts["fetch"] + parts["lead"] + parts["forward"],
        still_s=max(time.time() - rank.ended_ns / 1e9, 0.0),
        samples_per_s=now["samples"] / seconds if now["samples"] else None,
        tokens_per_s=now["tokens"] / seconds if now["tokens"] else None,
        machine=machine or {},
    )


def slowest(ranks: Sequence[RankNow]) -> list[RankNow]:
    """Return ranks in the order of their own time, the longest first."""
    return sorted(ranks, key=lambda one: -one.own_s)


def _is_gone(run: Path) -> bool:
    """Return whether all ranks have ended, none of which is on another host."""
    words = list(words_here(run))
    hosts = {path.name for path in run_folder.in_hosts(run)}
    return bool(words) and hosts <= {os.uname().nodename} and not any(word.runs for word in words)


def _waited_for(ranks: Sequence[RankNow]) -> int | None:
    """Return the rank with so much time of its own that the others wait for it; None: there is none."""
    most, usual = slowest(ranks)[:1], statistics.median([one.own_s for one in ranks] or [0])
    late = len(ranks) > 1 and most[0].own_s - usual > max(_BEHIND * usual, _BEHIND_STEP * most[0].step_s)
    return most[0].rank if late else None


# Samples of a rank, by their log and their name in it; all but the first in bytes.
_SAMPLES = {
    "gpu_busy_share": ("gpu", "busy_share"),
    "gpu_memory_bytes": ("gpu", "memory_used_bytes"),
    "gpu_memory_limit_bytes": ("gpu", "memory_total_bytes"),
    "allocated_bytes": ("memory", "allocated_bytes"),  # by tensors on the device
    "rss_bytes": ("processes", "rss_bytes"),
    "workers_rss_bytes": ("processes", "children_rss_bytes"),  # pages that they share counted for each
}


def machine(rank: Rank) -> dict[str, Any]:
    """Return the last samples of a rank: _SAMPLES, cores in use, host, and the memory limit of its container.

    None: not measured.
    """
    logs = {name: _last(*_sampled(rank, name)) for name in ("gpu", "processes")}
    path, start = run_folder.log_of(rank.folder, "memory")
    logs["memory"] = _last(path, _TAIL, start)
    found = {name: number(logs[log][-1], key) for name, (log, key) in _SAMPLES.items()}
    first, last = logs["processes"][0], logs["processes"][-1]
    used, passed = (
        sum(number(last, name, 0) - number(first, name, 0) for name in names)
        for names in (("cpu_s", "children_cpu_s"), ("at_ns",))
    )
    cpu = next(iter(_objects(rank.facts(), "cpu")), {})
    found["cores"] = max(used * 1e9 / passed, 0.0) if passed > 0 else None
    return found | {"memory_limit_bytes": number(cpu, "memory_limit_bytes"), "host": str(rank.facts().get("host", ""))}


def _sampled(rank: Rank, log: str) -> tuple[Path, int, str]:
    """Return the file with the samples of a rank, how much of its end is read, and what they begin with."""
    ranks = next(folder for folder in rank.folder.parents if folder.name == "ranks")
    name, boot = str(rank.facts().get("host", "")), rank.facts().get("boot")
    at = run_folder.host_folder(ranks.parent, name)
    if boot and run_folder.boot_of(at) not in ("", boot):
        at = at.with_name(longer(name, str(boot)))
    path = at / run_folder.SAMPLES
    if path.exists():
        return path, _TAIL, run_folder.begins(log, rank.folder.relative_to(ranks).as_posix())
    return rank.folder / f"{log}.jsonl", _TAIL, ""


def host(folder: Path) -> dict[str, Any]:
    """Return a host's last sample: its name, the share of its cores in use, its memory in bytes."""
    new = folder / run_folder.SAMPLES
    last = (_last(new, _TAIL, run_folder.begins("host")) if new.exists() else _last(folder / "host.jsonl"))[-1]
    names = ("cpu_share", "memory_used_bytes", "memory_available_bytes")
    return {"host": folder.name} | {name: number(last, name) for name in names}


def _share(facts: Mapping[str, Any]) -> tuple[int, str]:
    """Return how many times a rank's throughput the job's is, where that is plain, as reports do; else the rank's."""
    world, models = max(int(number(facts, "world_size", 1)), 1), _objects(facts, "models")
    cut = facts.get("pipeline") or any(number(model, "tensor_parallel", 1) > 1 for model in models)
    copies = any(model.get("ddp") or model.get("fsdp") for model in models)
    return (world, "job") if world == 1 or (copies and not cut) else (1, "rank")


def _epoch(rank: Rank) -> dict[str, float]:
    """Return where in an epoch a rank is, and for how long it goes on, s; {} where that is not known."""
    loaders = [one for one in _objects(rank.facts(), "loaders") if one.get("role") == "train"]
    usual = rank.now()[1]
    if len(loaders) != 1 or loaders[0].get("iterable") or rank.log.skipped or not rank.epochs or not usual["steps"]:
        return {}
    length, batch, replicas = (int(number(loaders[0], n, 0)) for n in ("dataset_length", "batch_size", "replicas"))
    if length < 1 or batch < 1:
        return {}
    mine = -(-length // max(replicas, 1))
    batches = mine // batch if loaders[0].get("drop_last") else -(-mine // batch)
    steps = -(-batches // max(round(usual["fetches"] / usual["steps"]), 1))
    if rank.in_epoch > steps:  # the script does not end its epochs where its loader does
        return {}
    left_s = (steps - rank.in_epoch) * usual["dur_ns"] / usual["steps"] / 1e9
    return {"number": rank.epochs, "step": rank.in_epoch, "steps": steps, "left_s": left_s}
