"""What a job that was started without dlprof spends its time on, from stacks that py-spy samples for some seconds.

Nothing in the job is changed or stopped. A share is that of the samples; its interval is Wilson's for 95 % (Wilson,
JASA 1927), as if the samples were independent: samples within one step are not quite, so short looks are less sure.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dlprof.errors import DlprofError
from dlprof.live.gather import ranks_below
from dlprof.live.look import WAITS, Frame, activity, is_own, line_of, mine, role_of
from dlprof.read.stacks import read as read_stacks
from dlprof.record.samplers.stacks import find, without_commands

RATE = 47  # a second: not in phase with steps of 5, 10 or 20 ms
_MOST_RANKS = 8  # that are sampled at once: py-spy takes some of a core for each
_Z = 1.96


@dataclass(frozen=True)
class Part:
    """A part of the time of a rank's training thread: `share` of it, between `low` and `high` with 95 %."""

    what: str
    share: float
    low: float
    high: float
    lines: tuple[tuple[str, str, float], ...] = ()  # the user's lines in it: place, text, share of the rank's time


@dataclass(frozen=True)
class Sampled:
    """What a rank did while it was sampled. `gil`: for each thread the share of the time in which it held the GIL."""

    rank: int
    pid: int
    samples: int
    seconds: float
    parts: tuple[Part, ...]
    working: float | None  # share of the workers' time in which they make batches; None: there are none
    worker_lines: tuple[tuple[str, str, float], ...] = ()
    gil: Mapping[str, float] = field(default_factory=dict)
    workers: int = 0
    cores: float = 0.0  # used by the rank's process
    worker_cores: float = 0.0  # used by its workers together
    problem: str = ""


def attach(pids: Sequence[int], seconds: float) -> list[Sampled]:
    """Sample the ranks among these processes of the user's and all that they have started. Raises DlprofError."""
    if (command := find()) is None:
        raise DlprofError("py-spy is not installed (pip install py-spy)")
    processes = mine()
    seen, ranks = ranks_below(pids, processes)
    problems = {one.unseen for one in ranks.values() if one.unseen}
    if len(problems) == 1 and all(one.unseen for one in ranks.values()):
        raise DlprofError(f"the stacks of the job cannot be read: {problems.pop()} (see `dlprof doctor`)")
    chosen = dict(sorted(ranks.items())[:_MOST_RANKS])
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dlprof-") as name:
        spies = [
            _start(command, one.pid, Path(name, f"{n}{kind}"), seconds, kind)
            for n, one in chosen.items()
            for kind in ("", "gil")
        ]
        for each in spies:
            _wait(each, seconds + 30)
        passed_s, after = time.monotonic() - began_s, mine()

        def cores(pids: Iterable[int]) -> float:
            both = (pid for pid in pids if pid in after and pid in processes)
            return sum(after[pid].cpu_s - processes[pid].cpu_s for pid in both) / passed_s

        found = []
        for n, one in chosen.items():
            workers = [w.pid for w in seen if w.parent == one.pid and role_of(w) == "worker"]
            sampled = _sampled(n, one.pid, Path(name), seconds)
            found.append(replace(sampled, workers=len(workers), cores=cores([one.pid]), worker_cores=cores(workers)))
        return found


def _start(command: str, pid: int, out: Path, seconds: float, kind: str) -> subprocess.Popen[bytes]:
    words = [command, "record", "--pid", str(pid), "--nonblocking", "--threads", "--full-filenames", "--format", "raw"]
    words += ["--gil"] if kind else ["--idle", "--subprocesses"]
    words += ["--rate", str(RATE), "--duration", str(max(round(seconds), 1)), "--output", str(out)]
    return subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: os.nice(10) and None,
    )


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # the only signal at which it writes what it has
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _sampled(number: int, pid: int, folder: Path, seconds: float) -> Sampled:
    raw = folder / str(number)
    main: Counter[tuple[str, str, int]] = Counter()
    making: Counter[tuple[str, int]] = Counter()
    of_workers = 0
    problem = ""
    try:
        raw.write_bytes(without_commands(raw.read_bytes()))
        rows = read_stacks(raw).tables["stacks"]
        for role, stack, samples in zip(rows["role"], rows["stack"], rows["samples"], strict=True):
            frames = _frames(stack)
            if role == "main":
                main[_kind(frames)] += int(samples)
            elif role == "worker":
                of_workers += int(samples)
                if any("_utils/fetch.py" in frame.file for frame in frames):
                    own = next((frame for frame in frames if is_own(frame.file)), Frame("", "", 0))
                    making[own.file, own.line] += int(samples)
    except (OSError, DlprofError) as e:
        problem = str(e) if isinstance(e, DlprofError) else "py-spy left nothing"
    total = sum(main.values())
    parts: dict[str, Counter[tuple[str, int]]] = {}
    for (what, file, line), samples in main.items():
        parts.setdefault(what, Counter())[file, line] += samples
    made = [_part(what, lines, total) for what, lines in parts.items()]
    return Sampled(
        rank=number,
        pid=pid,
        samples=total,
        seconds=seconds,
        parts=tuple(sorted(made, key=lambda part: -part.share)),
        working=sum(making.values()) / of_workers if of_workers else None,
        worker_lines=_lines(making, of_workers),
        gil=_gil(folder / f"{number}gil", total),
        problem=problem,
    )


def _frames(stack: str) -> list[Frame]:
    """Return the frames of a row of the table `stacks`, innermost first."""
    found = []
    for text in reversed(stack.split(";")):
        name, _, place = text.rpartition(" (")
        file, _, line = place.rstrip(")").rpartition(":")
        found.append(Frame(name, file, int(line) if line.isdigit() else 0))
    return found


def _kind(frames: Sequence[Frame]) -> tuple[str, str, int]:
    """Return what a stack is of, and the user's innermost line in it."""
    own = next((frame for frame in frames if is_own(frame.file)), Frame("", "", 0))
    what, _ = activity(frames)
    if what == "code" and frames[:1] == [own] and WAITS.search(line_of(own.file, own.line)):
        what = "device"
    return what, own.file, own.line


def _part(what: str, lines: Counter[tuple[str, int]], total: int) -> Part:
    low, high = interval(sum(lines.values()), total)
    return Part(what, sum(lines.values()) / total, low, high, _lines(lines, total))


def _lines(lines: Counter[tuple[str, int]], total: int) -> tuple[tuple[str, str, float], ...]:
    return tuple(
        (f"{file.rpartition('/')[2]}:{line}", line_of(file, line), samples / total)
        for (file, line), samples in lines.most_common(3)
        if file
    )


def _gil(path: Path, total: int) -> dict[str, float]:
    """Return the share of the samples in which each thread held the GIL, by its name; {} where that is not known."""
    held: Counter[str] = Counter()
    try:
        lines = without_commands(path.read_bytes()).decode(errors="replace").splitlines()
    except OSError:
        return {}
    for line in lines:
        head, _, times = line.rpartition(" ")
        _, sign, thread = head.partition("thread (")
        if sign and times.isdigit():
            held[thread.partition(";")[0].partition("): ")[2] or "unnamed"] += int(times)
    return {name: min(samples / total, 1.0) for name, samples in held.most_common(6)} if total else {}


def interval(found: int, total: int) -> tuple[float, float]:
    """Return Wilson's interval for a share of `total` samples, with 95 %."""
    if not total:
        return 0.0, 1.0
    share, z2 = found / total, _Z * _Z
    middle, half = share + z2 / (2 * total), _Z * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total))
    return max((middle - half) / (1 + z2 / total), 0.0), min((middle + half) / (1 + z2 / total), 1.0)
