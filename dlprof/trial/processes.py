"""The processes of a short run: all that descend from it or carry its mark, wherever they went; and their end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from dlprof.record.launch.process import family, has_ended, running, stat_of

# How long they may take to end themselves: what they measured is on disk every half second anyway.
GRACE_S = 5.0

# How often it is looked again for processes that others have started meanwhile.
_LOOKS = 20
_PAUSE_S = 0.05


def processes_of(root: int, folder: Path) -> set[int]:
    """Return the live processes that `root` has started, directly or not, and those that record into the folder.

    A process whose parent has ended is somebody else's child; the folder still stands in its environment.
    """
    mark = b"DLPROF_RUN=" + os.fsencode(folder)
    known = running()
    # Itself, what it leads (setsid), and what has its mark.
    roots = [root, *(pid for pid, stat in known.items() if int(stat[3]) == root or _is_marked(pid, mark))]
    return {pid for pid in family(roots, known) if pid in known and pid != os.getpid()}


def _is_marked(pid: int, mark: bytes) -> bool:
    with contextlib.suppress(OSError):  # another user's, or it has ended
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def end(root: int, folder: Path) -> None:
    """End a run's processes: all but `root`, which then ends by itself, with SIGTERM; those that stay are killed.

    On return none of them is left, but for a process that the kernel itself cannot end.
    """
    for pid in processes_of(root, folder) - {root}:
        _send(pid, signal.SIGTERM)
        _send(pid, signal.SIGCONT)  # a stopped one would hear of it never
    until = time.monotonic() + GRACE_S
    while not has_ended(stat_of(root)) and time.monotonic() < until:
        time.sleep(_PAUSE_S)
    kill(root, folder)


def kill(root: int, folder: Path) -> None:
    """Kill a run's processes, `root` too unless it is this one, until none is left."""
    for _ in range(_LOOKS):
        left = processes_of(root, folder)
        if not left:
            return
        for pid in left:
            _send(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
