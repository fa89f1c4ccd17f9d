"""What the kernel knows of a process: since when it runs, whether something awaits it, whose end it never outlives."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping
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


def stats() -> dict[int, list[bytes]]:
    """Return the same of every process that can be seen, by its number: also of one that nobody has waited for yet."""
    numbers = (name for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208 - names are enough
    return {int(number): stat for number in numbers if (stat := stat_of(number))}


def has_ended(stat: list[bytes]) -> bool:
    """Return whether a process has ended, by what `stat_of` said of it."""
    return not stat or stat[0] in (b"Z", b"X")


def running() -> dict[int, list[bytes]]:
    """Return the stats of those that have not ended."""
    return {pid: stat for pid, stat in stats().items() if not has_ended(stat)}


def family(roots: Iterable[int], stats: Mapping[int, list[bytes]]) -> list[int]:
    """List these processes, those that they have started, and those that these have, as far as `stats` has them."""
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        children.setdefault(int(stat[1]), []).append(pid)
    found = list(roots)
    for one in found:
        found += (child for child in sorted(children.get(one, ())) if child not in found)
    return found


def started(pid: int) -> int | None:
    """Return when a process began, in clock ticks since this host did; None: it has ended.

    Together with its number that tells it from every other one, earlier or later.
    """
    stat = stat_of(pid)
    return None if has_ended(stat) else int(stat[19])


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


def wait_or_kill(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for the end of a child, and kill it after so long."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


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
