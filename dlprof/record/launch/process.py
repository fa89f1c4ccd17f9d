"""What the kernel knows of a process: its start time, pending signals, and the parent that it must not outlive."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

_LIBC = ctypes.CDLL(None)  # loaded here, since it must not be loaded between fork and exec
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

# What a user, a terminal or a scheduler sends a job, to all of its processes: none of ours but the supervisor heeds it.
OF_THE_JOB = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

# From <malloc.h>. 32 MiB is glibc's maximum: the memory of larger blocks goes back to the kernel when they are freed.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT, _LARGE = 256 << 20, 32 << 20


def stat_of(pid: int | str) -> list[bytes]:
    """Return the fields of /proc/PID/stat, starting with the state; [] if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []


def stats() -> dict[int, list[bytes]]:
    """Return the same for every visible process by its number, including zombies."""
    numbers = (name for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208 - names are enough
    return {int(number): stat for number in numbers if (stat := stat_of(number))}


def has_ended(stat: list[bytes]) -> bool:
    """Return whether a process has ended, from the result of `stat_of`."""
    return not stat or stat[0] in (b"Z", b"X")


def running() -> dict[int, list[bytes]]:
    """Return the stats of the processes that have not ended."""
    return {pid: stat for pid, stat in stats().items() if not has_ended(stat)}


def family(roots: Iterable[int], stats: Mapping[int, list[bytes]]) -> list[int]:
    """List these processes and all their descendants that are in `stats`."""
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        children.setdefault(int(stat[1]), []).append(pid)
    found = list(roots)
    for one in found:
        found += (child for child in sorted(children.get(one, ())) if child not in found)
    return found


def started(pid: int) -> int | None:
    """Return when a process began, in clock ticks since this host booted; None if it has ended.

    Together with its number this identifies a process: numbers are reused.
    """
    stat = stat_of(pid)
    return None if has_ended(stat) else int(stat[19])


def started_with(pid: int, variables: set[bytes]) -> bool:
    """Return whether a process was started with these variables, as b"NAME=VALUE"; False where that is not known."""
    with contextlib.suppress(OSError):  # it belongs to another user, or has ended
        return variables <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    return False


def awaits(pid: int, number: int) -> bool:
    """Return whether a process has work to do, or a pending signal of this number; False if that is unknown."""
    try:
        status = Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return False
    values = dict(line.split(b":", 1) for line in status.splitlines() if b":" in line)
    pending = int(values.get(b"SigPnd", b"0"), 16) | int(values.get(b"ShdPnd", b"0"), 16)
    # A stopped process does not handle signals, however long one waits.
    state = values.get(b"State", b"").strip()[:1]
    return state in (b"R", b"D") or (state == b"S" and bool(pending >> (number - 1) & 1))


def wait_or_kill(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for the end of a child, and kill it after this time."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def keep_memory() -> None:
    """Make malloc keep freed memory for later allocations, if it supports that.

    Tables are columns of a megabyte that are allocated and freed by the hundred. Memory that went back to the kernel
    must be mapped again page by page, and a page costs microseconds in a virtual machine.
    """
    mallopt = getattr(_LIBC, "mallopt", None)
    if mallopt is None:  # not glibc
        return
    mallopt(_M_TRIM_THRESHOLD, _KEPT)
    mallopt(_M_MMAP_THRESHOLD, _LARGE)


def start(thread: threading.Thread) -> None:
    """Start a thread, if this process is allowed any more of them."""
    with contextlib.suppress(RuntimeError):
        thread.start()


def tie(number: signal.Signals, parent: int) -> None:
    """Make the kernel send this process a signal when its parent ends; end now if the parent has ended already."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def tied(number: signal.Signals) -> Callable[[], None]:
    """Return a function that a child of this process calls before its exec, so that it ends with this process."""
    return functools.partial(tie, number, os.getpid())
