"""Makes the script's signal handlers wait while the main thread is in our code.

Python calls a handler between two instructions of whatever the main thread is at. In a hook of ours, what the handler
raises would be taken for our own failure, or leave the hook half done; in a callback of the garbage collector Python
drops it. So each handler of the script's is replaced by an object that checks where the main thread is: in our code,
the signal is set again, and Python calls again a few instructions later; else the handler is called. After many such
calls, which slow our code down, a thread checks instead; it sends the signal again when the main thread has left our
code. This is done where handlers reach the C module `_signal`, which shows them as they were: `signal.signal` and
`signal.getsignal` stay Python's own.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import operator
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from time import perf_counter_ns, sleep
from types import FrameType
from typing import Any

from dlprof.record.attribution import is_wrapper, passed

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


def runs() -> int:
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
