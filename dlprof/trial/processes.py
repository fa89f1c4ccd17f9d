"""The processes of a short run: all that descend from it or carry its mark, wherever they went; and their end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from dlprof.record.launch.process import stat_of

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
    parents: dict[int, int] = {}
    found = {root}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - names are enough
        if not entry.isdigit():
            continue
        stat = stat_of(entry)
        if not stat or stat[0] in (b"Z", b"X"):
            continue
        pid = int(entry)
        parents[pid] = int(stat[1])
        if int(stat[3]) == root:  # what it leads (setsid)
            found.add(pid)
            continue
        with contextlib.suppress(OSError):  # another user's, or it has ended
            if mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                found.add(pid)
    for pid in parents:
        above = [pid]
        while above[-1] in parents and above[-1] not in found and len(above) <= len(parents):
            above.append(parents[above[-1]])
        if above[-1] in found:
            found.update(above)
    return {pid for pid in found if pid in parents and pid != os.getpid()}


def end(root: int, folder: Path) -> None:
    """End a run's processes: all but `root`, which then ends by itself, with SIGTERM; those that stay are killed.

    On return none of them is left, but for a process that the kernel itself cannot end.
    """
    for pid in processes_of(root, folder) - {root}:
        _send(pid, signal.SIGTERM)
        _send(pid, signal.SIGCONT)  # a stopped one would hear of it never
    until = time.monotonic() + GRACE_S
    while _runs(root) and time.monotonic() < until:
        time.sleep(_PAUSE_S)
    for _ in range(_LOOKS):
        left = processes_of(root, folder)
        if not left:
            return
        for pid in left:
            _send(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)


def _runs(pid: int) -> bool:
    stat = stat_of(pid)
    return bool(stat) and stat[0] not in (b"Z", b"X")


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
