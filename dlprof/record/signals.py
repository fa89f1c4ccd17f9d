"""The signals of a rank: the script's handlers wait while our code runs, and SIGTERM brings the recording to the disk.

Python calls a handler between two instructions of whatever the main thread is at. In a hook of ours, what the handler
raises would be taken for our own failure, or leave the hook half done; in a callback of the garbage collector Python
drops it. So each handler of the script's is replaced by an object that checks where the main thread is: in our code,
the signal is set again, and Python calls again a few instructions later; else the handler is called. After many such
calls, which slow our code down, a thread checks instead; it sends the signal again when the main thread has left our
code. This is done where handlers reach the C module `_signal`, which shows them as they were: `signal.signal` and
`signal.getsignal` stay Python's own.

After SIGTERM the process ends about as fast as without dlprof. Python runs a handler in the main thread, after it
returns from C: a rank that is blocked in a collective may never return. So a thread also hears of the signal, through
the descriptor that Python's C handler writes to (`signal.set_wakeup_fd`). If the handler does not start in time, the
thread writes the files and ends the process. The same thread writes the steps that a hung rank still has in memory.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import contextlib
import ctypes
import functools
import operator
import os
import resource
import select
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from threading import get_ident
from time import perf_counter_ns, sleep
from types import FrameType
from typing import TYPE_CHECKING, Any

from dlprof.record.calls.attribution import is_wrapper, passed
from dlprof.record.log import Descriptor, moved

if TYPE_CHECKING:
    from dlprof.record.recorder import Recorder

# If our code takes longer, as in a system call that hangs, Ctrl-C must get through.
_WAITS_NS = 1_000_000_000

# Python calls it so often, at each turn of a loop, which takes a millisecond. Few hooks have more of them.
_MOST_ASKED = 100
_LOOKS_EVERY_S = 0.001

_OURS = os.path.dirname(__file__) + os.sep  # noqa: PTH120 - as co_filename is written

# Python calls these where an object dies, our own ones' too, and drops what they raise.
_DROPPING: tuple[Any, ...] = (weakref.WeakSet(), weakref.WeakKeyDictionary(), weakref.WeakValueDictionary())
_DROPPING = tuple(one._remove.__code__ for one in _DROPPING)

# asyncio's and uvloop's handler that does nothing: they hear of a signal by set_wakeup_fd, and would hear of it twice.
_SILENT = "_sighandler_noop"

# Takes the signal and, as every handler, a frame, which the C function does not look at. It has no frame of its own.
_set_again = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.py_object)(("PyErr_SetInterruptEx", ctypes.pythonapi))
_handler_of = sys.modules["_signal"].getsignal
_nothing = operator.is_  # takes two arguments, and has no frame either

_runs = 0  # of handlers so far


def handler_runs() -> int:
    """Return how many handlers of the script's have been called so far: one of them may have raised what comes by."""
    return _runs


# By number, since when a signal waits, in ns.
_since: dict[int, int] = {}
os.register_at_fork(after_in_child=_since.clear)  # the threads that look are the parent's


class _Waiting:
    """A handler of the script's. Python calls what `__call__` returns: no frame of ours is in a traceback."""

    __slots__ = ("asked", "handler", "number")

    def __init__(self, number: int, handler: Callable[..., Any]) -> None:
        self.number, self.handler, self.asked = int(number), handler, 0

    def _due(self) -> Callable[..., Any]:
        global _runs
        if _is_ours(sys._getframe(1)):
            now, since = perf_counter_ns(), _since.get(self.number)
            if since is None:
                _since[self.number], self.asked = (since := now), 0
                with contextlib.suppress(RuntimeError):  # no thread can be started: the next signal tries again
                    _thread.start_new_thread(self._send_again, ())
            self.asked += 1
            if now - since < _WAITS_NS:
                return _set_again if self.asked <= _MOST_ASKED else _nothing
        _since.pop(self.number, None)
        _runs += 1
        return self.handler

    __call__ = property(_due)

    def _send_again(self) -> None:
        """Send the signal to the main thread when that has left our code, or has been there for too long.

        Unlike what is set again, what the kernel sends ends a system call that the main thread is in.
        """
        main: Any = threading.main_thread().ident
        while (since := _since.get(self.number)) is not None and _handler_of(self.number) is self:
            sleep(_LOOKS_EVERY_S)
            late = perf_counter_ns() - since >= _WAITS_NS
            if self.number in _since and (late or not _is_ours(sys._current_frames().get(main))):
                signal.pthread_kill(main, self.number)


def _is_ours(frame: FrameType | None) -> bool:
    """Return whether a frame runs code of ours, or was called by it; what a wrapper passes on is the script's.

    Ours calls what has wrappers too.
    """
    # Wrappers check whether torch compiles: that is no call that they pass on.
    asked = getattr(sys.modules.get("torch.compiler"), "__file__", None)
    while frame is not None and frame.f_code.co_filename == asked:
        frame = frame.f_back
    if frame is not None and (is_wrapper(frame.f_code) or any(frame.f_code is code for code in _DROPPING)):
        return True
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OURS) and not is_wrapper(frame.f_code):
            return True
        frame = frame.f_back
    return False


def _waiting(number: int, handler: Any) -> Any:
    """Return the object that replaces a handler; SIG_DFL, SIG_IGN, and ours that looks like one of them, stay."""
    known = isinstance(handler, (int, _Waiting)) or not callable(handler)
    return handler if known or getattr(handler, "__name__", None) == _SILENT else _Waiting(number, handler)


def _shown(handler: Any) -> Any:
    return handler.handler if isinstance(handler, _Waiting) else handler


def watch(put: Callable[..., object], at_uninstall: Callable[[Callable[[], object]], None]) -> None:
    """Keep the handlers that there are, and those that come, by `put` and `at_uninstall` of hooks.py."""
    module: Any = sys.modules["_signal"]
    setting, getting = module.signal, module.getsignal

    def exchange(new: Callable[[int, Any], Any]) -> None:
        """Replace Python's handlers, and leave what the kernel calls unchanged."""
        libc = ctypes.CDLL(None)
        for number in signal.valid_signals():
            handler = getting(number)
            if (other := new(number, handler)) is not handler:
                action = ctypes.create_string_buffer(1024)  # a struct sigaction, and more
                libc.sigaction(int(number), None, action)
                setting(number, other)
                libc.sigaction(int(number), action, None)

    def signal_(number: Any, handler: Any, /) -> Any:
        try:
            if number in _since:  # it came for the handler that there is, which Python calls now
                _since[number] -= _WAITS_NS
                _set_again(number, None)
            return _shown(setting(number, _waiting(number, handler)))
        except BaseException as e:
            passed(e)
            raise

    def getsignal(number: Any, /) -> Any:
        try:
            return _shown(getting(number))
        except BaseException as e:
            passed(e)
            raise

    with contextlib.suppress(ValueError):  # not the main thread, which alone may
        exchange(_waiting)

    def give_back() -> None:
        with contextlib.suppress(ValueError):
            exchange(lambda _, handler: _shown(handler))
        while _since:
            _set_again(_since.popitem()[0], None)

    at_uninstall(give_back)
    for original, wrapper in ((setting, signal_), (getting, getsignal)):
        wrapper.__name__ = wrapper.__qualname__ = original.__name__
        wrapper.__doc__ = original.__doc__
        put(module, original.__name__, wrapper)


# -- SIGTERM

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


class Ending:
    """Ends a recording with its process."""

    def __init__(self, recorder: Recorder) -> None:
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
