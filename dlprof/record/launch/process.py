"""What the kernel knows of a process: since when it runs, whether something awaits it, whose end it never outlives."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path

_LIBC = ctypes.CDLL(None)  # loaded here: between fork and exec is no place for it
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

# <malloc.h>, and as much as glibc takes: of larger blocks the kernel has the memory as soon as they are freed.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT, _LARGE = 256 << 20, 32 << 20


def stat_of(pid: int | str) -> list[bytes]:
    """Return the words of /proc/PID/stat from the process's state on; none where it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []


def started(pid: int) -> int | None:
    """Return when a process began, in clock ticks since this host did; None: it has ended.

    Together with its number that tells it from every other one, earlier or later.
    """
    stat = stat_of(pid)
    return int(stat[19]) if stat and stat[0] not in (b"Z", b"X") else None


def awaits(pid: int, number: int) -> bool:
    """Return whether a process has work to do, or a signal that it has not taken yet; False: or nobody knows."""
    try:
        status = Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return False
    values = dict(line.split(b":", 1) for line in status.splitlines() if b":" in line)
    pending = int(values.get(b"SigPnd", b"0"), 16) | int(values.get(b"ShdPnd", b"0"), 16)
    # A stopped process does nothing with what it was sent, however long one waits.
    state = values.get(b"State", b"").strip()[:1]
    return state in (b"R", b"D") or (state == b"S" and bool(pending >> (number - 1) & 1))


def keep_memory() -> None:
    """Keep what this process frees for what it allocates next, as far as its malloc can be told to.

    Tables are columns of a megabyte that come and go by the hundred. What went back to the kernel is taken from it
    again page by page, and a page costs microseconds in a virtual machine.
    """
    mallopt = getattr(_LIBC, "mallopt", None)
    if mallopt is None:  # no glibc
        return
    mallopt(_M_TRIM_THRESHOLD, _KEPT)
    mallopt(_M_MMAP_THRESHOLD, _LARGE)


def tie(number: signal.Signals, parent: int) -> None:
    """Have the kernel send this process a signal when its parent ends, however that ends; end if it has just ended."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def tied(number: signal.Signals) -> Callable[[], None]:
    """Return what a child of this process calls before its exec, to be tied to this process whatever it becomes."""
    return functools.partial(tie, number, os.getpid())
