"""Samples a host: one process a host (`__main__.py`) drives the samplers, as recorder.py drives the collectors.

Whoever started the process holds the other end of its stdin: when that closes, or is written to, the job is over.
Whatever fails here costs one sampler and one line on stderr, never the job.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import select
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlprof import run_folder
from dlprof.files import boot, longer
from dlprof.plain import tell, words_of
from dlprof.record.launch.process import started, started_with
from dlprof.record.log import Log, Part
from dlprof.record.ranks import Word, hellos, leave_note, words_here

# How often a process that found its host claimed tries again: the one that samples ends with its own supervisor.
_CLAIM_AGAIN_S = 2.0

# How often samplers read where the user has not said it, in seconds: a job of hours does the same for hours. The time
# between two readings is this part of its age, within these limits.
_AGE_SHARE = 600
_LEAST_S, _MOST_S = 1.0, 5.0


@dataclass(frozen=True)
class RankHere:
    """A rank that runs on this host, as its facts.json says."""

    rank: int
    name: str  # of its folder below ranks/
    pid: int
    since: int  # the kernel's start time of the process, which tells it from a later one of the same pid
    device: Mapping[str, Any] = field(compare=False)  # type, uuid, name ...; empty if unknown


class Sampler(ABC):
    """One source of measurements of a host; it lives on the only thread of the samplers' process.

    start and tick may raise: the sampler is then off. A child process that a sampler starts must be tied to this one
    (process.tied), which may be killed at any time.
    """

    name: str
    host: Host

    @property
    def period_s(self) -> float:
        """The seconds to the next tick, read after each: as its host's, where a sampler has none of its own."""
        return self.host.period_s

    def start(self, host: Host) -> None:
        """Begin: host.folder exists. Ranks come later, host.ranks is empty as yet."""
        self.host = host

    @abstractmethod
    def tick(self) -> None:
        """Take one reading; host.ranks has just been brought up to date."""

    def stop(self) -> None:  # noqa: B027 - most hold nothing in memory
        """End, and leave what is in memory on disk. The end of the user's command waits for it: be quick."""


def line(row: Mapping[str, Any]) -> str:
    """Return a reading as a line of a log, headed by both clocks: Unix time, and one that no clock service moves."""
    clocks = {"at_ns": time.time_ns(), "perf_ns": time.perf_counter_ns()}
    return json.dumps(clocks | dict(row), separators=(",", ":")) + "\n"


class Host:
    """What a sampler knows of its host: its folder, and the ranks that run here now."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.name = os.uname().nodename
        self.boot = boot()
        self.began_s = time.monotonic()
        self.folder = run_folder.host_folder(run, self.name)
        self.ranks: tuple[RankHere, ...] = ()
        # Where ranks say of themselves that they train, and how much they had said at the last look.
        self._words, self._words_bytes = self.folder / run_folder.notes_name(self.boot), -1
        self._files: dict[str, Log] = {}
        self._hello_bytes = -1
        self._loaded: list[int] = []  # processes that have said that they loaded torch
        self._unread: set[Word] = set()  # of ranks that have no facts yet
        self._elsewhere: set[Word] = set()  # of ranks of another host of this name, or that ended
        self._warned: set[str] = set()

    @property
    def period_s(self) -> float:
        """The seconds between two readings: the user's setting, else more the longer the job has run."""
        asked = os.environ.get("DLPROF_SAMPLE") or "auto"
        if asked != "auto":
            return float(asked)
        return min(max((time.monotonic() - self.began_s) / _AGE_SHARE, _LEAST_S), _MOST_S)

    def settle(self) -> None:
        """Make the folder; where another machine has this one's name and was first, one with a longer name."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with (self.folder / run_folder.SAMPLES).open("x") as file:
                file.write(run_folder.begins("boot") + f'"boot":"{self.boot}"}}\n')
        except FileExistsError:
            if run_folder.boot_of(self.folder) != self.boot:
                self.folder = self.folder.with_name(longer(self.name, self.boot))
                self.folder.mkdir(exist_ok=True)

    def log(self, name: str, rank: RankHere | None = None, file: str = run_folder.SAMPLES) -> Part:
        """Return a log of this host, or of a rank here, in a file of the host's folder. Raises OSError."""
        self._files[file] = self._files.get(file) or Log(self.folder / file)
        return Part(self._files[file], name, rank.name if rank is not None else "")

    def warn(self, text: str) -> None:
        """Say something once on stderr and keep it for the report."""
        if text in self._warned:
            return
        self._warned.add(text)
        tell(text)
        with contextlib.suppress(OSError):
            leave_note(self.folder, "warning", text=text)

    def look(self) -> None:
        """Bring `ranks` up to date. Costs one stat while no rank comes: the folder may be on a busy network disk.

        Only this host's own folder is looked at: the job may have thousands of ranks elsewhere.
        """
        self.ranks = tuple(rank for rank in self.ranks if started(rank.pid) == rank.since)
        try:
            if (size := self._words.stat().st_size) != self._words_bytes:
                known = {rank.name for rank in self.ranks}
                words = {word for word in words_here(self.run) if word.folder not in known}
                self._unread = words - self._elsewhere
                self._words_bytes = size
        except OSError:
            return
        for word in sorted(self._unread):
            try:
                rank = self._here(word, json.loads((self.run / "ranks" / word.folder / "facts.json").read_bytes()))
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue  # not yet written, or by somebody else
            self._unread.discard(word)
            if rank is None:
                self._elsewhere.add(word)
            else:
                self.ranks = (*self.ranks, rank)

    def loaded(self) -> list[int]:
        """Return the processes of this run here that have loaded torch, and run: ranks, launchers, workers.

        Costs one stat of the run's folder while no process comes. Raises OSError where none has come yet.
        """
        if (size := self._words.stat().st_size) != self._hello_bytes:
            self._hello_bytes = size
            self._loaded = [said["pid"] for said in hellos(self._words.parent) if said.get("torch")]
        run = b"DLPROF_RUN=" + os.fsencode(self.run)
        # The list may be of another host of this name.
        return [pid for pid in self._loaded if started_with(pid, {run})]

    def _here(self, word: Word, facts: Any) -> RankHere | None:
        here = facts["host"] == self.name and facts.get("boot", self.boot) == self.boot
        since = started(int(facts["pid"])) if here else None
        if since is None:
            return None
        return RankHere(int(facts["rank"]), word.folder, facts["pid"], since, facts.get("device") or {})


def claimed_name(run: Path) -> str:
    """Return the name that the process has which samples this host for a run.

    It is the kernel's, not a lock file: it ends with the process, and network disks often know no locks. Containers of
    other names may share it, with the host's network.
    """
    what = os.fsencode(run.resolve()) + f"\0{os.uname().nodename}\0{boot()}".encode()
    return f"\0dlprof-{hashlib.sha256(what).hexdigest()[:32]}"


def claim(name: str) -> socket.socket | None:
    """Take that name for this process, as long as the socket is open; None: another one has it."""
    claimed = socket.socket(socket.AF_UNIX)
    try:
        claimed.bind(name)
    except OSError:
        claimed.close()
        return None
    return claimed


def over(end: int, seconds: float) -> bool:
    """Wait, and return whether the job is over: the other end of the descriptor `end` was closed or written to."""
    return bool(select.select([end], [], [], min(max(seconds, 0.0), 3600.0))[0])


def sample(run: Path, samplers: Iterable[Callable[[], Sampler]], end: int) -> None:
    """Drive the samplers of this host until the job is over; or wait to, while another process does."""
    name = claimed_name(run)  # once: processes that wait do not access the disk
    while (claimed := claim(name)) is None:
        if over(end, _CLAIM_AGAIN_S):
            return
    with claimed:
        host = Host(run)
        host.settle()
        due: dict[Sampler, float] = {}
        now = time.monotonic()  # one moment for all: those of one period then wake this process once
        try:
            for make in samplers:
                if over(end, 0):
                    return
                with _guarded(host, getattr(make, "name", str(make))):
                    sampler = make()
                    sampler.start(host)
                    due[sampler] = now
            _drive(host, due, end)
        finally:
            for sampler in due:
                with _guarded(host, sampler.name):
                    sampler.stop()


def _drive(host: Host, due: dict[Sampler, float], end: int) -> None:
    # Where all are off the host stays claimed: the next process would only fail as this one did.
    while not over(end, min(due.values(), default=math.inf) - time.monotonic()):
        host.look()
        for sampler, at in tuple(due.items()):
            now = time.monotonic()
            if at > now:
                continue
            began = time.thread_time()
            del due[sampler]
            with _guarded(host, sampler.name, or_else=sampler.stop):
                sampler.tick()
                # Never to catch up, and where readings are dear, fewer of them: no more than a tenth of a core.
                due[sampler] = max(at + sampler.period_s, now + 10 * (time.thread_time() - began))


@contextlib.contextmanager
def _guarded(host: Host, name: str, or_else: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Switch a sampler off where it raises: it must cost neither the others nor the job."""
    try:
        yield
    except Exception as e:  # noqa: BLE001 - see above
        host.warn(f"the {name} sampler is off: {words_of(e)}; the job goes on without it")
        with contextlib.suppress(Exception):
            or_else()
