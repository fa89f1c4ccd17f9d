"""What the kernel knows of a process: since when it runs, whether something awaits it, whose end it never outlives."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

# <malloc.h>, and as much as glibc takes: of larger blocks the kernel has the memory as soon as they are freed.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT, _LARGE = 256 << 20, 32 << 20


def started(pid: int) -> int | None:
    """Return when a process began, in clock ticks since this host did; None: it has ended.

    Together with its number that tells it from every other one, earlier or later.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    words = stat.rpartition(b")")[2].split()
    return None if words[0] in (b"Z", b"X") else int(words[19])


def awaits(pid: int, number: int) -> bool:
    """Return whether a process has work to do, or a signal that it has not taken yet; not where nobody knows."""
    try:
        status = Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return False
    said = dict(line.split(b":", 1) for line in status.splitlines() if b":" in line)
    pending = int(said.get(b"SigPnd", b"0"), 16) | int(said.get(b"ShdPnd", b"0"), 16)
    # A stopped process does nothing with what it was sent, however long one waits.
    state = said.get(b"State", b"").strip()[:1]
    return state in (b"R", b"D") or (state == b"S" and bool(pending >> (number - 1) & 1))


def keep_memory() -> None:
    """Keep what this process frees for what it allocates next, as far as its malloc can be told to.

    Tables are columns of a megabyte that come and go by the hundred. What went back to the kernel is taken from it
    again page by page, and a page costs microseconds in a virtual machine.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # no glibc
        return
    mallopt(_M_TRIM_THRESHOLD, _KEPT)
    mallopt(_M_MMAP_THRESHOLD, _LARGE)


def tied(number: signal.Signals) -> Callable[[], None]:
    """Return what a child of this process calls before its exec: it is then sent a signal when this process ends.

    However this process ends, and whatever the child becomes.
    """
    parent = os.getpid()
    libc = ctypes.CDLL(None)  # loaded by now: between fork and exec is no place for it

    def tie() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it has ended just now
            os._exit(1)

    return tie
