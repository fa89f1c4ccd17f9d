"""Has the script's signal handlers wait while the main thread is in our code.

Python calls a handler between two instructions of whatever the main thread is at. In a hook of ours, what the handler
raises would be taken for our own failure, or leave the hook half done; in a callback of the garbage collector Python
drops it. So each handler of the script's is kept in an object that looks where the main thread is: in our code, the
signal is set again, and Python asks again a few instructions later; else the handler is called. This is done where
handlers reach the C module `_signal`, which shows them as they were: `signal.signal` and `signal.getsignal` stay
Python's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import weakref
from collections.abc import Callable
from time import perf_counter_ns
from types import FrameType
from typing import Any

from dlprof.record.calls.attribution import is_wrapper, passed

# Where ours takes longer, as in a system call that hangs, Ctrl-C must get through.
_WAITS_NS = 1_000_000_000

_OURS = os.path.dirname(__file__) + os.sep  # noqa: PTH120 - as co_filename is written

# Python calls these where an object dies, our own ones' too, and drops what they raise.
_DROPPING: tuple[Any, ...] = (weakref.WeakSet(), weakref.WeakKeyDictionary(), weakref.WeakValueDictionary())
_DROPPING = tuple(one._remove.__code__ for one in _DROPPING)

# asyncio's and uvloop's handler that does nothing: they hear of a signal by set_wakeup_fd, and would hear of it twice.
_SILENT = "_sighandler_noop"

# Takes the signal and, as every handler, a frame, which the C function does not look at. It has no frame of its own.
_set_again = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.py_object)(("PyErr_SetInterruptEx", ctypes.pythonapi))

_runs = 0  # of handlers so far


def runs() -> int:
    """Return how many handlers of the script's have been called so far: one of them may have raised what comes by."""
    return _runs


class _Waiting:
    """A handler of the script's. Python calls what `__call__` returns: no frame of ours is in a traceback."""

    __slots__ = ("_since_ns", "handler")

    def __init__(self, handler: Callable[..., Any]) -> None:
        self.handler = handler
        self._since_ns = 0  # when it began to wait

    def _due(self) -> Callable[..., Any]:
        global _runs
        now = perf_counter_ns()
        if _is_ours(sys._getframe(1)) and now - (self._since_ns or now) < _WAITS_NS:
            self._since_ns = self._since_ns or now
            return _set_again
        self._since_ns = 0
        _runs += 1
        return self.handler

    __call__ = property(_due)


def _is_ours(frame: FrameType | None) -> bool:
    """Return whether a frame runs code of ours, or was called by it: not where a wrapper has passed a call on."""
    # Wrappers ask torch whether it compiles: that is no call that they pass on.
    asked = getattr(sys.modules.get("torch.compiler"), "__file__", None)
    while frame is not None and frame.f_code.co_filename == asked:
        frame = frame.f_back
    if frame is not None and (is_wrapper(frame.f_code) or any(frame.f_code is code for code in _DROPPING)):
        return True
    while frame is not None and not is_wrapper(frame.f_code):
        if frame.f_code.co_filename.startswith(_OURS):
            return True
        frame = frame.f_back
    return False


def _waiting(handler: Any) -> Any:
    """Return what stands for a handler; SIG_DFL, SIG_IGN, and ours that is shown as one of them, for themselves."""
    known = isinstance(handler, (int, _Waiting)) or not callable(handler)
    return handler if known or getattr(handler, "__name__", None) == _SILENT else _Waiting(handler)


def _shown(handler: Any) -> Any:
    return handler.handler if isinstance(handler, _Waiting) else handler


def watch(put: Callable[..., object], at_uninstall: Callable[[Callable[[], object]], None]) -> None:
    """Keep the handlers that there are, and those that come, by `put` and `at_uninstall` of hooks.py."""
    module: Any = sys.modules["_signal"]
    setting, getting = module.signal, module.getsignal

    def exchange(new: Callable[[Any], Any]) -> None:
        """Put what stands for a handler in its place in Python, and leave what the kernel calls as it is."""
        libc = ctypes.CDLL(None)
        for number in signal.valid_signals():
            handler = getting(number)
            if (other := new(handler)) is not handler:
                action = ctypes.create_string_buffer(1024)  # a struct sigaction, and more
                libc.sigaction(int(number), None, action)
                setting(number, other)
                libc.sigaction(int(number), action, None)

    def signal_(number: Any, handler: Any, /) -> Any:
        try:
            return _shown(setting(number, _waiting(handler)))
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
            exchange(_shown)

    at_uninstall(give_back)
    for original, wrapper in ((setting, signal_), (getting, getsignal)):
        wrapper.__name__ = wrapper.__qualname__ = original.__name__
        wrapper.__doc__ = original.__doc__
        put(module, original.__name__, wrapper)
