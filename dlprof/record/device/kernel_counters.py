"""What the kernel has counted of this process: time on the cores, waiting for one, and bytes from storage."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from dlprof.record.log import Descriptor


class KernelCounters:
    """What this process has used of the cores and of storage.

    CPU time is the whole process's in a loader's worker: data sets decode in threads of their own, and a worker ships
    its batches in one. Else it is the asking thread's: OpenMP's others spin on for a while after each operator.
    What it waited for a core is known of `thread`, a number of the kernel's, else of the one that fetches or trains.
    """

    def __init__(self, *, whole_process: bool, thread: int = 0) -> None:
        self._time_ns = time.process_time_ns if whole_process else time.thread_time_ns
        self._schedstat = _opened(f"/proc/self/task/{thread}/schedstat" if thread else "/proc/thread-self/schedstat")
        self._io = _opened("/proc/self/io")

    def cores(self) -> tuple[int, int, int]:
        """Return three times in ns: the process on the cores, the thread waiting for one, the thread on one.

        −1: unknown.
        """
        words = _words(self._schedstat)
        ran, delayed = (int(words[0]), int(words[1])) if words else (-1, -1)
        return time.process_time_ns(), delayed, ran

    def all(self) -> tuple[int, int, int, int]:
        """Return the ns of CPU time and of waiting for a core, and the bytes that came from storage and that were read.

        −1: unknown.
        """
        words = _words(self._io)
        stored, read = (int(words[9]), int(words[1])) if words else (-1, -1)
        _, delayed, _ = self.cores()
        return self._time_ns(), delayed, stored, read

    def close(self) -> None:
        """Close the kernel's files; what they hold is unknown from then on."""
        self._schedstat.close()
        self._io.close()


def used_between(before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    """Return what was used between two answers of KernelCounters (−1: unknown)."""
    return tuple(-1 if b < 0 else a - b for a, b in zip(after, before, strict=True))


def _opened(path: str) -> Descriptor:
    """Open a file of the kernel's, to be read again and again."""
    try:
        return Descriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return Descriptor(-1)


def _words(file: Descriptor) -> list[bytes]:
    """Return the words of such a file now; none where it cannot be read, or the script has closed it."""
    if not file.is_ours:
        return []
    try:
        return os.pread(file.fd, 512, 0).split()
    except OSError:  # of a thread that is no more
        return []
