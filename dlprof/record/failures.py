"""What a rank says of its own trouble: the errors that it handles or ends with, and what it does while it stands still.

Of a standstill: its threads' stacks, the error it handles, its last collectives. Written by the thread of ours that
looks after the rank's end, into still.json and flight_recorder.json of its folder: once in each standstill, and where
`dlprof hang` asks for it by a file `ask`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter_ns
from traceback import walk_tb
from types import FrameType
from typing import Any

from dlprof import redaction
from dlprof.files import write
from dlprof.record.calls.frames import own_files
from dlprof.record.step_clock import StepClock

STILL, ASK, FLIGHT = "still.json", "ask", "flight_recorder.json"

# A rank stands still after so many of its steps, and so long, where `--hang` says no other time.
STEPS, LEAST_S = 20, 60.0

_ASKED_NS = 2_000_000_000  # after which it looks whether it is asked
_CHECKED_NS = 5_000_000_000  # after which it looks whether it has gone on
_MOST_FRAMES = 60
_BUSY = 0.5  # of a core


def seconds(asked: str, mean_s: float) -> float:
    """Return after how long without a step a job stands still; `asked` as `launch.options.hang` checks it."""
    if asked == "off":
        return math.inf
    return float(asked) if asked not in ("", "auto") else max(STEPS * mean_s, LEAST_S)


class Still:
    """Knows when the rank of a clock stands still. Called twice a second while it has ended no step for a moment."""

    def __init__(self, clock: StepClock, unix: Callable[[int], int]) -> None:
        self._clock = clock
        self._unix = unix
        self._asked = os.environ.get("DLPROF_HANG", "")
        self._written_in = -1  # the step in which it has been written
        self._begun_ns = self._checked_ns = self._looked_ns = perf_counter_ns()
        self._used_ns = time.process_time_ns()

    def end(self, folder: Path, *, well: bool = False) -> None:
        """Delete what was written of a standstill if the rank has gone on since, or ends well. May raise OSError.

        A rank may have gone on without a step, as where it evaluates or saves: to further collectives.
        """
        if self._written_in == -1:
            return
        on = self._written_in != self._clock.row.number
        flight = folder / FLIGHT
        if well or on or (flight.exists() and flight.read_text() != _calls()):
            self._written_in = -1 if on else self._written_in
            for name in (STILL, FLIGHT):
                (folder / name).unlink(missing_ok=True)

    def look(self, folder: Path) -> None:
        """Write what the rank does, if it is due or asked for. May raise OSError."""
        row, now = self._clock.row, perf_counter_ns()
        if now - self._checked_ns > _CHECKED_NS:
            self._checked_ns = now
            with contextlib.suppress(OSError):
                self.end(folder)
        still_ns = now - row.start_ns
        if still_ns < _ASKED_NS:
            return
        busy = self._busy(now)
        mean_s = (row.start_ns - self._begun_ns) / max(row.number, 1) / 1e9
        due = self._written_in != row.number and still_ns / 1e9 >= seconds(self._asked, mean_s)
        if not due and not (folder / ASK).exists():
            return
        self._written_in = row.number
        (folder / ASK).unlink(missing_ok=True)
        if calls := _calls():
            write(folder / FLIGHT, calls)
        found = {
            "at_ns": time.time_ns(),
            "step": row.number,
            "since_ns": self._unix(row.start_ns),
            "threads": stacks(self._clock.owner),
            "busy": busy,
            "handles": handled(self._clock.owner),
        }
        write(folder / STILL, json.dumps(found))

    def _busy(self, now: int) -> bool:
        """Return whether the process has used a core since the last call, or most of one."""
        used = time.process_time_ns()
        passed, spent = now - self._looked_ns, used - self._used_ns
        self._looked_ns, self._used_ns = now, used
        return spent > _BUSY * passed


def stacks(training: int) -> list[dict[str, Any]]:
    """Return the stacks of this process's threads of Python, innermost frame first, the training thread's first."""
    names = {thread.ident: thread.name for thread in list(threading._active.values())}  # type: ignore[attr-defined]
    found = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != training):
        frames: list[list[Any]] = []
        at: Any = frame
        while at is not None and len(frames) < _MOST_FRAMES:
            code = at.f_code
            frames.append([getattr(code, "co_qualname", code.co_name), code.co_filename, at.f_lineno or 0])
            at = at.f_back
        found.append({"name": names.get(ident, ""), "main": ident == training, "frames": frames})
    return found


def _calls() -> str:
    """Return PyTorch's flight recorder as JSON; "" where there is none. No call in it waits for a device or a rank."""
    if "torch.distributed" not in sys.modules:
        return ""
    with contextlib.suppress(Exception):  # another torch, or one without collectives
        from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

        data = _dump_fr_trace_json()
        return data.decode() if isinstance(data, bytes) else str(data)
    return ""


# -- errors

_MOST_TEXT = 2_000  # characters of an error's text

# What PyTorch's allocator of host memory says in a RuntimeError.
_ON_HOST = "DefaultCPUAllocator: can't allocate memory"

# The most characters of any other error's text, of which only the first line is kept.
_MOST_LINE = 300

# The lines of a worker's traceback, which is in the text of the error that its loader raises.
_WORKERS = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def last_error() -> dict[str, Any] | None:
    """Return the error that nobody caught and that ends the process, as `described`; None: it ends otherwise."""
    error = _uncaught()
    return None if error is None else described(error)


def _uncaught() -> BaseException | None:
    """Return the error that Python kept when it printed it, before exit handlers run."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)  # before Python 3.12 only the second


def handled(thread: int) -> dict[str, Any] | None:
    """Return the error that a thread handles right now, as `described`; None: none."""
    # Before Python 3.12 these are triples, as sys.exc_info() returns them.
    found: Any = sys._current_exceptions().get(thread)
    error = found[1] if isinstance(found, tuple) else found
    return None if error is None else described(error)


def described(error: BaseException) -> dict[str, Any]:
    """Return an error's type, text and site.

    The text is the first line of what a library says, redacted: what the user's own code says may hold anything, and is
    left out, but for what the system says of a file. The site of an error in a loader's worker is the line there.
    """
    is_own, said, site = own_files(), str(error), _site(error)
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    if "DataLoader worker" in said:
        there = [found for found in _WORKERS.findall(said) if is_own(found[0])]
        site = "{2} ({0}:{1})".format(*there[-1]) if there else site
    line = said.strip().partition("\n")[0] + _signal_of_worker(frames)
    if frames and is_own(frames[-1].f_code.co_filename):
        line = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else ""
    return {"type": type(error).__name__, "text": redaction.text(line)[:_MOST_LINE], "site": site}


def _signal_of_worker(frames: Iterable[FrameType]) -> str:
    """Return what killed the worker of a DataLoader, in the words of torch where its SIGCHLD handler comes first.

    Where it comes second, torch says "exited unexpectedly" only; the exit codes are in the frame that raised it.
    """
    for frame in frames:
        for worker in frame.f_locals.get("failed_workers") or ():
            if (code := getattr(worker, "exitcode", None) or 0) < 0:
                return f": is killed by signal: {signal.strsignal(-code)}."
    return ""


def memory_failure() -> dict[str, Any] | None:
    """Return the out-of-memory error that ends the process: type, text and site; None if it ends otherwise."""
    error = _uncaught()
    kind, text = type(error).__name__, str(error)
    if error is None or (kind not in ("OutOfMemoryError", "MemoryError") and _ON_HOST not in text):
        return None
    return {"type": kind, "text": text[:_MOST_TEXT], "site": _site(error)}


def _site(error: BaseException) -> str:
    """Return the innermost line of the user's own files in the traceback, as "function (file:line)"; "" if none."""
    is_own, site = own_files(), ""
    for frame, line in walk_tb(error.__traceback__):
        if is_own(frame.f_code.co_filename):
            site = f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{line})"
    return site
