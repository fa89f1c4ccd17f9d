"""Writes the recording when a process gets SIGTERM, and ends the process about as fast as without dlprof.

Python runs a signal handler in the main thread, after it returns from C. A rank that is blocked in a collective may
never return. So a thread also hears of the signal, through the descriptor that Python's C handler writes to
(`signal.set_wakeup_fd`). If the handler does not start in time, the thread writes the files and ends the process.

The same thread writes the steps that a hung rank still has in memory.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import contextlib
import ctypes
import functools
import os
import resource
import select
import signal
import threading
from collections.abc import Callable
from threading import get_ident
from time import perf_counter_ns
from types import FrameType
from typing import Protocol

from dlprof.record.log import Descriptor, moved
from dlprof.record.stepping import Phases

# How long the main thread may take to start the handler. It gets longer while a trace is open: only the main thread can
# close it, and a step may spend that long in C.
_BEGINS_S, _BEGINS_TRACED_S = 0.25, 1.0

# How long the thread may take to write the files: a hung device could block it as well.
_LEAVES_S = 2.0

_PATIENCE_NS = 5_000_000_000  # that a second signal waits for what the first has begun to write

_SAVES_EVERY_S = 0.5

# Our descriptors lie this far below the limit. The kernel hands out the lowest free number, so a script that closes
# descriptors it did not open, as daemons do, does not get these numbers for its own files.
_BELOW_LIMIT, _HIGHEST = 16, 1 << 10


class _Default(int):
    """A handler that `signal.getsignal` and `signal.signal` show as SIG_DFL, which a script sees without dlprof.

    They look handlers up by value, and this is an int with SIG_DFL's value. The C module below accepts any callable.
    """

    handle: Callable[[int, FrameType | None], None]

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.handle(number, frame)


class Recording(Protocol):
    """What is ended: the recorder."""

    stopping: tuple[int, int]  # the thread that writes the files right now, and since when
    has_stopped: threading.Event

    @property
    def clock(self) -> Phases:
        """The clock of the steps."""

    def save(self) -> None:
        """Bring the last steps to the disk."""

    def stop(self, ended: str, *, at_once: bool = False) -> None:
        """End the recording."""


class Ending:
    """Ends a recording with its process."""

    def __init__(self, recorder: Recording) -> None:
        self._recorder = recorder
        self._handler = _Default(signal.SIG_DFL)
        self._handler.handle = self._terminated
        self._begun = threading.Event()
        self._due = 0  # the signal that came while the files were being written
        self._pipe: tuple[Descriptor, Descriptor] | None = None

    def start(self) -> None:
        """Install the handler, unless the script has one, and start the thread. Call it on the training thread."""
        with contextlib.suppress(OSError, ValueError):  # not the main thread: a SIGTERM ends the process at once
            if _signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
                _signal.signal(signal.SIGTERM, self._handler)
                if _signal.getsignal(signal.SIGTERM) is self._handler:
                    self._listen()
        # Not a threading.Thread: a script that joins all threads in threading.enumerate() would wait forever.
        with contextlib.suppress(RuntimeError):  # no thread more is allowed here
            _thread.start_new_thread(self._look_after, ())

    def finished(self) -> None:
        """End the process if a signal came while the files were being written."""
        if self._due:
            _die(self._due)

    def undo(self) -> None:
        """Give the process its handler and descriptor back: in a forked child, or after the recording has ended."""
        try:
            if _signal.getsignal(signal.SIGTERM) is self._handler:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self._pipe is None:
                return
            # Otherwise the parent would hear of the child's signals.
            theirs = signal.set_wakeup_fd(-1)
            if theirs not in (-1, self._pipe[1].fd):
                signal.set_wakeup_fd(theirs)
        except ValueError:
            return  # not on the main thread, which alone may: both stay
        for end in self._pipe:
            end.close()
        self._pipe = None

    def _listen(self) -> None:
        """Have Python's C handler write to our pipe, unless the script already set a descriptor."""
        reads, writes = (Descriptor(_high(fd)) for fd in os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))
        theirs = signal.set_wakeup_fd(writes.fd, warn_on_full_buffer=False)
        if theirs == -1:
            self._pipe = reads, writes
            return
        signal.set_wakeup_fd(theirs)
        reads.close()
        writes.close()

    def _terminated(self, number: int, _: FrameType | None) -> None:
        self._begun.set()
        # A scheduler signals the whole job, and so does the launcher that it signalled: files first.
        thread, since = self._recorder.stopping
        if thread == get_ident() and perf_counter_ns() - since < _PATIENCE_NS:
            self._due = number
            return
        if not self._waited():
            self._recorder.stop(f"signal {number}")
        _die(number)

    def _look_after(self) -> None:
        poll, listening = select.poll(), self._pipe
        if listening is not None:
            poll.register(listening[0].fd, select.POLLIN)
        while not self._recorder.has_stopped.is_set():
            if not poll.poll(_SAVES_EVERY_S * 1000) or listening is None:
                with contextlib.suppress(Exception):  # tried again; the training thread reports what is wrong
                    self._recorder.save()
            elif not listening[0].is_ours:
                poll.unregister(listening[0].fd)  # the script closed it: the number now belongs to another file
                listening = None
            else:
                with contextlib.suppress(BlockingIOError):
                    if signal.SIGTERM in os.read(listening[0].fd, 4096):
                        self._see_to_the_end()

    def _see_to_the_end(self) -> None:
        """If the handler is still ours and does not start, write the files and end the process."""
        if _signal.getsignal(signal.SIGTERM) is not self._handler:
            return
        if self._begun.wait(_BEGINS_TRACED_S if self._recorder.clock.ranges else _BEGINS_S):
            return
        if not self._waited():
            ended = f"signal {int(signal.SIGTERM)}"
            leave = functools.partial(self._recorder.stop, ended, at_once=True)
            leaving = threading.Thread(target=leave, daemon=True)
            with contextlib.suppress(RuntimeError):
                leaving.start()
                leaving.join(_LEAVES_S)
        _die(signal.SIGTERM)

    def _waited(self) -> bool:
        """If another thread is writing the files, as at the end of the script, wait for it; return whether one was."""
        thread, since = self._recorder.stopping
        left = _PATIENCE_NS - (perf_counter_ns() - since)
        if thread and left > 0:
            self._recorder.has_stopped.wait(left / 1e9)
        return bool(thread)


def _high(fd: int) -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    limit = min(limit, _HIGHEST) if limit != resource.RLIM_INFINITY else _HIGHEST
    return moved(fd, max(limit - _BELOW_LIMIT, 3))


def _die(number: int) -> None:
    # Through libc: Python allows only the main thread to change a handler.
    ctypes.CDLL(None).signal(int(number), None)
    os.kill(os.getpid(), number)
