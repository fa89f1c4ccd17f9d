"""Lets a process that is told to end leave its recording first, and end as soon as it would without us.

Python runs a signal's handler in the main thread, once that is back from C; a rank that waits in a collective for
another one never is. So a thread hears of the signal too, through the descriptor that Python's own handler in C writes
to. Where ours does not begin in a moment, the thread leaves the files, and the signal then ends the process.

The same thread looks after the steps of a rank that makes none any more: what it holds in memory goes to the disk.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import contextlib
import ctypes
import fcntl
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

from dlprof.log import file_of

# How long the main thread may take to begin: it is back from C far sooner where it runs Python. With a trace that only
# it can close it gets longer, for one step may be in C as long as that.
_BEGINS_S, _BEGINS_TRACED_S = 0.25, 1.0

# How long the thread may take to leave the files: what hangs the main thread, as a device may, could hang it too.
_LEAVES_S = 2.0

_PATIENCE_NS = 5_000_000_000  # that a second signal waits for what the first has begun to write

_SAVES_EVERY_S = 0.5

# Our descriptors lie so far below the limit: the kernel gives the lowest that is free, so that whoever closes what he
# never opened, as daemons do, does not get ours for a file of his own.
_BELOW_LIMIT, _HIGHEST = 16, 1 << 10


class Recording(Protocol):
    """What is to be left: a Recorder."""

    @property
    def traced(self) -> bool:
        """Whether a trace is being recorded."""

    @property
    def stopping(self) -> tuple[int, int]:
        """The thread that writes the files right now and since when, perf_counter ns; zeros where nobody does."""

    def stop(self, ended: str, *, at_once: bool = False) -> None:
        """Leave all files; `at_once`: from any thread, without waiting for the one that trains."""

    def wait(self, seconds: float) -> bool:
        """Wait until the files are there, and tell whether they are."""

    def save(self) -> None:
        """Bring the steps that have ended to the disk."""


class _Default(int):
    """A handler that `signal.getsignal` and `signal.signal` tell as SIG_DFL, which is what a script finds without us.

    They look a handler up by its value, and this is an int of SIG_DFL's; the C module beneath takes what can be called.
    """

    handle: Callable[[int, FrameType | None], None]

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.handle(number, frame)


class Ending:
    """Ends a recording with its process."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._handler = _Default(signal.SIG_DFL)
        self._handler.handle = self._terminated
        self._begun = threading.Event()
        self._due = 0  # the signal that came while the files were being written
        self._pipe: tuple[int, int] | None = None
        self._files: tuple[object, object] = (None, None)

    def start(self) -> None:
        """Take SIGTERM where nobody has, and begin to look after the steps; in the main thread, if that trains."""
        with contextlib.suppress(OSError, ValueError):  # not the main thread: a SIGTERM ends the process at once
            if _signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and _takes(self._handler):
                self._listen()
        # None of threading's: a script that waits for all threads that it finds there would wait for ever.
        with contextlib.suppress(RuntimeError):  # no thread more is allowed here
            _thread.start_new_thread(self._look_after, ())

    def finished(self) -> None:
        """End by the signal that came while the files were being written, if one did."""
        if self._due:
            _die(self._due)

    def forked(self) -> None:
        """Leave a fork's child as it would be without us."""
        if _signal.getsignal(signal.SIGTERM) is self._handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._pipe is not None:
            # Or the child's signals would be told to the parent.
            with contextlib.suppress(ValueError):
                theirs = signal.set_wakeup_fd(-1)
                if theirs not in (-1, self._pipe[1]):
                    signal.set_wakeup_fd(theirs)
            for fd, file in zip(self._pipe, self._files, strict=True):
                if file_of(fd) == file:
                    os.close(fd)
            self._pipe = None

    def _listen(self) -> None:
        """Let Python's handler in C tell the thread of signals, unless it tells somebody else already."""
        pipe = tuple(map(_high, os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)))
        theirs = signal.set_wakeup_fd(pipe[1], warn_on_full_buffer=False)
        if theirs != -1:
            signal.set_wakeup_fd(theirs)
            for fd in pipe:
                os.close(fd)
            return
        self._pipe, self._files = (pipe[0], pipe[1]), (file_of(pipe[0]), file_of(pipe[1]))

    def _terminated(self, number: int, _: FrameType | None) -> None:
        self._begun.set()
        # A scheduler signals the whole job, and so does the launcher that it signalled: files first.
        thread, since = self._recording.stopping
        if thread == get_ident() and perf_counter_ns() - since < _PATIENCE_NS:
            self._due = number
            return
        if not self._waited():
            self._recording.stop(f"signal {number}")
        _die(number)

    def _look_after(self) -> None:
        poll, listening = select.poll(), self._pipe
        if listening is not None:
            poll.register(listening[0], select.POLLIN)
        while not self._recording.wait(0):
            if not poll.poll(_SAVES_EVERY_S * 1000) or listening is None:
                with contextlib.suppress(Exception):  # tried again in a moment; the training thread says what is wrong
                    self._recording.save()
            elif file_of(listening[0]) != self._files[0]:
                poll.unregister(listening[0])  # the script has closed it: what has its number now is not ours to read
                listening = None
            else:
                with contextlib.suppress(BlockingIOError):
                    if signal.SIGTERM in os.read(listening[0], 4096):
                        self._see_to_the_end()

    def _see_to_the_end(self) -> None:
        """Where the handler is still ours and does not begin, leave the files and let the signal end the process."""
        if _signal.getsignal(signal.SIGTERM) is not self._handler:
            return
        if self._begun.wait(_BEGINS_TRACED_S if self._recording.traced else _BEGINS_S):
            return
        if not self._waited():
            ended = f"signal {int(signal.SIGTERM)}"
            leave = functools.partial(self._recording.stop, ended, at_once=True)
            leaving = threading.Thread(target=leave, daemon=True)
            with contextlib.suppress(RuntimeError):
                leaving.start()
                leaving.join(_LEAVES_S)
        _die(signal.SIGTERM)

    def _waited(self) -> bool:
        """Wait where another thread writes the files right now, as at the end of the script; tell whether one did."""
        thread, since = self._recording.stopping
        left = _PATIENCE_NS - (perf_counter_ns() - since)
        if thread and left > 0:
            self._recording.wait(left / 1e9)
        return bool(thread)


def _takes(handler: _Default) -> bool:
    """Make this SIGTERM's handler; tell whether it is one now, and did not pass for SIG_DFL."""
    _signal.signal(signal.SIGTERM, handler)
    return _signal.getsignal(signal.SIGTERM) is handler


def _high(fd: int) -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    limit = min(limit, _HIGHEST) if limit != resource.RLIM_INFINITY else _HIGHEST
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(limit - _BELOW_LIMIT, 3))
    finally:
        os.close(fd)


def _die(number: int) -> None:
    # By the C library: Python lets only its main thread change what a signal does.
    ctypes.CDLL(None).signal(int(number), None)
    os.kill(os.getpid(), number)
