"""What Python is doing: py-spy beside each rank and its loader workers, in bursts.

py-spy reads the memory of processes that run on. It never stops them (`--nonblocking`): a stop costs the step half a
millisecond and more, and on a busy machine as long as it takes until py-spy gets a core again. A stack that changes
while it is read is lost or, rarely, wrong. It is the least urgent process of the machine, and most of the time there is
none. It writes its file only at its end: with bursts, a kill costs the last one at most.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from dlprof import redaction
from dlprof.record.calls import MOST_FILE_BYTES, MOST_SOURCE, own_files
from dlprof.record.launch.process import OF_THE_JOB, has_ended, stat_of, tied, wait_or_kill
from dlprof.record.log import Part
from dlprof.record.samplers.sampling import Host, RankHere, Sampler
from dlprof.run_folder import STACKS

# How py-spy writes a process: with its command, which may hold anything, line ends too. What follows is another
# process, or a thread.
_PROCESS = re.compile(rb'process \d+:"')
_THREAD = b'";thread ('
_FRAME = re.compile(rb"(?:.*;)?.* \((.+):(\d+)\)")

# A line that begins a loop; and the most lines of one that are looked at.
_LOOP = re.compile(r"\s*(async )?(for|while)\b")
_MOST_LOOP = 200

# The most lines of a burst whose text is kept, those with the most samples; and of how many files.
_MOST_LINES = 40
_MOST_FILES = 12

# The first burst is short, so that a job that dies young leaves something; later ones are long enough that py-spy's
# start, which is most of its work, counts for little. The pauses grow: a job does the same for hours.
_FIRST_S = 3
_BURST_S = 10
_FIRST_PAUSE_S = 5.0
_LAST_PAUSE_S = 120.0

# How often this looks at what it has begun or at who has come, and at most how late it is for a rank that comes later.
_LOOK_S = 0.5
_LATE_S = 5.0

# A process that has loaded torch and is no rank yet is looked at from this age on until it is one, so that a report can
# tell what the start of a long-starting job was spent on; how often a second, for how long, and how many at once.
_START_AFTER_S = 0.5
_START_RATE = 40
_START_MOST_S = 900
_MOST_STARTING = 8

# How long the end of the job waits for py-spy to write what it has.
_STOP_S = 0.7


class StacksSampler(Sampler):
    """Writes the log `stacks` of each rank here, a line a burst.

    It holds, in gzip, a line of JSON after `#`, and py-spy's raw lines.

    The JSON holds the text of the user's lines that were seen most, so that a report can tell what they call: py-spy
    sees no function of C, and the script may be another one by then. A burst with `start` is of the process before it
    was a rank.
    """

    name = "stacks"

    def __init__(self) -> None:
        asked = os.environ.get("DLPROF_STACKS") or "off"
        self._rate = 0 if asked == "off" else int(asked)
        self._spies: dict[RankHere, _Spy] = {}
        self._starting: dict[int, _Spy] = {}  # by process

    @property
    def period_s(self) -> float:
        """Short while py-spy runs, and until there is a rank; else as long as it pauses."""
        if not self._rate:
            return math.inf
        wait = min((spy.wait_s for spy in self._spies.values()), default=0.0)
        return min(max(wait, _LOOK_S), _LATE_S)

    def start(self, host: Host) -> None:
        """Find py-spy."""
        super().start(host)
        self._command = find()
        if self._rate and self._command is None:
            self._rate = 0
            host.warn("stacks are not sampled: py-spy is not installed (pip install py-spy)")

    def tick(self) -> None:
        """Begin and end bursts; a rank that has ended has ended its own."""
        if not self._rate or self._command is None:
            return
        for rank in self.host.ranks:
            if rank not in self._spies:
                spy = self._starting.pop(rank.pid, None) or _Spy(self._command, self._rate, rank.pid, self.host.run)
                spy.announce(self.host.log("stacks", rank, STACKS), self.host.run / "ranks" / rank.name)
                self._spies[rank] = spy
        with suppress(OSError, ValueError):
            self._look_at_starts()
        for rank, spy in tuple(self._spies.items()):
            here = rank in self.host.ranks
            if problem := spy.tick(go_on=here):
                self.host.look()
            # A rank that was just ending cannot be looked at, and that is no problem.
            if problem and rank in self.host.ranks:
                # What py-spy cannot do for one rank it cannot do for the others.
                self._rate = 0
                self.host.warn(f"stacks are not sampled: {problem} (see `dlprof doctor`); the job goes on without them")
                self.stop()
                return
            if not here and not spy.running:
                del self._spies[rank]

    def _look_at_starts(self) -> None:
        """Begin to look at processes that have loaded torch and are no rank, and end it where they have gone."""
        # Neither workers of a rank, which are looked at with it, nor what has started the ranks.
        known = {rank.pid for rank in self.host.ranks}
        started_by = {pid: _parent(pid) for pid in {*self.host.loaded(), *known}}
        launchers = {started_by[rank] for rank in known}
        loaded = {pid for pid, by in started_by.items() if pid not in known | launchers and by not in known}
        for pid in self._starting.keys() - loaded:
            self._starting.pop(pid).drop()
        for pid in sorted(loaded - self._starting.keys(), reverse=True)[: _MOST_STARTING - len(self._starting)]:
            self._starting[pid] = _Spy(self._command or "", self._rate, pid, self.host.run)
        for spy in self._starting.values():
            spy.tick(go_on=True)

    def stop(self) -> None:
        """End the bursts that are under way, and keep what they saw."""
        for spy in self._starting.values():
            spy.drop()
        self._starting.clear()
        for spy in self._spies.values():
            spy.interrupt()
        until = time.monotonic() + _STOP_S
        for spy in self._spies.values():
            spy.finish(max(until - time.monotonic(), 0.1))
        self._spies.clear()


def _parent(pid: int) -> int:
    """Return who started a process; 0: it has gone."""
    stat = stat_of(pid)
    return 0 if has_ended(stat) else int(stat[1])


def find() -> str | None:
    """Return the path of py-spy: beside this Python, else on the PATH."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.is_file() else shutil.which("py-spy")


class _Spy:
    """The bursts of one process: until it is a rank a single one, of its start, which has no log yet."""

    def __init__(self, command: str, rate: int, pid: int, run: Path) -> None:
        self._command = [command, "record", "--pid", str(pid), "--subprocesses", "--nonblocking", "--idle", "--threads"]
        self._command += ["--full-filenames", "--format", "raw"]
        self._rate = rate
        self._log: Part | None = None
        self._of = run  # what it looks at, in the name of what py-spy writes into
        self._starts = False  # whether the burst that runs, or is over, is of the start
        self._seen = -1  # what py-spy writes into: no file, since the command lines in it must not reach the disk
        self._process: subprocess.Popen[bytes] | None = None
        self._begun_ns = 0
        self._since_ns = time.time_ns()
        self._texts: set[tuple[str, int]] = set()  # the lines whose text is written
        self._seconds = _FIRST_S
        self._pause_s = _FIRST_PAUSE_S
        self._next = time.monotonic() + _START_AFTER_S
        self._failures = 0  # one after the other

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def wait_s(self) -> float:
        return 0.0 if self.running else self._next - time.monotonic()

    def announce(self, log: Part, folder: Path) -> None:
        """The process is a rank now: the burst of its start ends, and those of the rank follow."""
        self._log, self._of = log, folder
        self._next = 0.0
        self.interrupt()

    def drop(self) -> None:
        """End a burst and forget what it saw."""
        if self._process is not None:
            self._process.kill()
            with self._process:
                self._process = None
            os.close(self._seen)

    def tick(self, *, go_on: bool) -> str:
        """End a burst that is over, and begin one that is due; say what went wrong, "" for nothing."""
        problem = ""
        if self._log is None and self._starts:
            return ""  # one burst is enough of a start, and is written when the rank is known
        if self._process is not None and self._process.poll() is not None:
            problem = self._take()
        if go_on and not problem and self._process is None and time.monotonic() >= self._next:
            self._begin()
        return problem

    def interrupt(self) -> None:
        if self._process is not None and self._process.poll() is None:
            # The only signal at which it writes what it has.
            self._process.send_signal(signal.SIGINT)

    def finish(self, seconds: float) -> None:
        if self._process is None:
            return
        wait_or_kill(self._process, seconds)
        with suppress(OSError):
            self._take()

    def _begin(self) -> None:
        tie = tied(signal.SIGINT)

        def before_exec() -> None:
            tie()
            for number in {*OF_THE_JOB} - {signal.SIGINT}:
                signal.signal(number, signal.SIG_IGN)
            os.nice(19)

        self._begun_ns = time.time_ns()
        self._starts = self._log is None
        rate, seconds = (_START_RATE, _START_MOST_S) if self._starts else (self._rate, self._seconds)
        self._seen = os.memfd_create(str(self._of)[-200:])
        self._process = subprocess.Popen(
            [
                *(*self._command, "--rate", str(rate)),
                *("--duration", str(seconds), "--output", f"/proc/self/fd/{self._seen}"),
            ],
            pass_fds=[self._seen],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=before_exec,
        )

    def _take(self) -> str:
        """Append what a burst left; say why it left nothing, "" where it did or the rank has just ended."""
        process, self._process = self._process, None
        if process is None:
            return ""
        starts, self._starts = self._starts, False
        with process:
            said = process.stderr.read().decode(errors="replace") if process.stderr is not None else ""
        if not starts:
            self._next = time.monotonic() + self._pause_s
            self._pause_s = min(self._pause_s * 2, _LAST_PAUSE_S)
            self._seconds = _BURST_S
        with os.fdopen(self._seen, "rb") as written:
            seen = written.read()
        if self._log is None or (starts and not seen):
            return ""
        if not seen:
            self._failures += 1
            # Once may be chance: the rank was ending, or had not quite begun.
            return _reason(said) if process.returncode and (self._failures > 1 or _denied(said)) else ""
        self._failures = 0
        rate = _START_RATE if starts else self._rate
        burst: dict[str, Any] = {"start_ns": self._begun_ns, "end_ns": time.time_ns(), "rate": rate}
        if starts:
            burst["start"] = True
        lines = without_commands(seen)
        with suppress(Exception):  # the stacks are worth more than the text of their lines
            texts, loops = texts_of(lines, self._since_ns)
            burst["lines"] = [one for one in texts if (one[0], one[1]) not in self._texts]
            burst["loops"] = [one for one in loops if (one[0], one[1]) not in self._texts]
            self._texts.update((file, line) for file, line, _ in texts)
        member = gzip.compress(b"#" + json.dumps(burst).encode() + b"\n" + lines, 6)
        self._log.write(f'{{"gzip":"{base64.b64encode(member).decode()}"}}\n')
        return ""


def texts_of(lines: bytes, since_ns: int) -> tuple[list[tuple[str, int, str]], list[tuple[str, int, int]]]:
    """Return file, line and text of the user's lines that are the innermost of the most stacks, redacted.

    And of those in a loop that is no loop of training the file, the line and the loop's line, whose text is there too.
    A file that was written after `since_ns` may not be what runs: its lines have no text.
    """
    is_own, found = own_files(), Counter[tuple[str, int]]()
    for folded in lines.splitlines():
        stack, _, times = folded.rpartition(b" ")
        for frame in reversed(stack.split(b";")):
            place = _FRAME.fullmatch(frame)
            if place is not None and is_own(file := place[1].decode(errors="replace")):
                found[file, int(place[2])] += int(times) if times.isdigit() else 0
                break
    sources: dict[str, list[str]] = {}
    texts: dict[tuple[str, int], str] = {}
    loops = []
    for (file, line), _ in found.most_common(_MOST_LINES):
        if file not in sources:
            sources[file] = _source(file, since_ns) if len(sources) < _MOST_FILES else []
        if line <= len(sources[file]) and (text := _line_of(sources[file], line)):
            texts[file, line] = text
            if loop := _loop_around(sources[file], line):
                loops.append((file, line, loop))
                texts[file, loop] = _line_of(sources[file], loop)
    return [(file, line, text) for (file, line), text in texts.items()], loops


def _line_of(source: list[str], line: int) -> str:
    return " ".join(source[line - 1].split())[:MOST_SOURCE]


def _loop_around(source: list[str], line: int) -> int:
    """Return the number of the line where the innermost loop around a line begins; 0: none, or it holds a step.

    By indentation, within the same function. A line that begins a loop is in that loop.
    """
    if _LOOP.match(source[line - 1]):
        return 0 if _holds_step(source, line) else line
    indent = _indent(source[line - 1])
    for at in range(line - 1, max(line - _MOST_LOOP, 0), -1):
        above = source[at - 1]
        if above.strip() and _indent(above) < indent:
            indent = _indent(above)
            if _LOOP.match(above):
                return 0 if _holds_step(source, at) else at
            if above.lstrip().startswith(("def ", "async def ", "class ")):
                return 0
    return 0


def _holds_step(source: list[str], loop: int) -> bool:
    """Return whether a loop trains: it goes through a loader, or has a backward pass in it."""
    inside = [source[loop - 1]]
    for text in source[loop : loop + _MOST_LOOP]:
        if text.strip() and _indent(text) <= _indent(source[loop - 1]):
            break
        inside.append(text)
    return any("backward(" in text or "oader" in text for text in inside)


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())


def _source(file: str, since_ns: int) -> list[str]:
    """Return the lines of a file of source, without what must not be kept; none where it may not be what runs."""
    path = Path(file)
    with suppress(OSError):
        known = path.stat()
        if stat.S_ISREG(known.st_mode) and known.st_size <= MOST_FILE_BYTES and known.st_mtime_ns <= since_ns:
            return redaction.source(path.read_text(errors="replace")).splitlines()
    return []


def without_commands(seen: bytes) -> bytes:
    """Return py-spy's raw lines without the command lines of the processes; a line that is none of them is left out."""
    found: list[bytes] = []
    begun: list[bytes] = []  # a line whose command has line ends of its own
    for line in seen.splitlines(keepends=True):
        if begun or _PROCESS.match(line):
            begun.append(line)
        if begun and _THREAD in line:
            processes, _, thread = b"".join(begun).rpartition(_THREAD)
            found += [process + b'";' for process in _PROCESS.findall(processes)]
            found += [_THREAD[2:], thread]
            begun.clear()
    return b"".join(found)


def _denied(said: str) -> str:
    """Return the line in which py-spy says that it may not, "" where it does not say so."""
    return next((line.strip() for line in said.splitlines() if "ermission" in line or "not permitted" in line), "")


def _reason(said: str) -> str:
    """Return the line in which py-spy says what went wrong."""
    first = next((line.strip() for line in said.splitlines() if line.strip()), "it left nothing")
    return f"py-spy: {_denied(said) or first}"
