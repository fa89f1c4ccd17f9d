"""A handler of the script's runs in the script's code, and what it raises arrives there."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dlprof.record import handlers
from dlprof.record.attribution import passed, passed_over

NUMBER = signal.SIGUSR1

# Stands for a hook of ours, as its file says: a guard that would take an exception for our own failure, a wrapper with
# a hook before and behind what it passes on, and what the interpreter calls and drops exceptions of.
HOOKS = f"""
import os, signal, sys, time, weakref
def guard():
    try:
        signal.raise_signal({NUMBER:d})
        done.append(str(1))
    except Exception as e:
        done.append(e)
def callback(*_):
    signal.raise_signal({NUMBER:d})
    done.append(str(1))
def long():
    until = time.monotonic() + 19
    signal.raise_signal({NUMBER:d})
    while time.monotonic() < until:
        str(1)
    done.append("long")
def loops():
    signal.raise_signal({NUMBER:d})
    for _ in range(20_000):
        str(1)
    done.append("loops")
def hangs(end):
    signal.raise_signal({NUMBER:d})
    done.append(os.read(end, 1))
def wrapping(original):
    def wrapper(*args):
        signal.raise_signal({NUMBER:d})
        done.append(str(1))
        try:
            return original(*args)
        except BaseException as e:
            passed(e)
            raise
        finally:
            done.append(str(2))
    return wrapper
"""


class StopError(OSError):
    """What a guard that knows only OSError would catch too."""


def handler(_number: int, _frame: types.FrameType | None) -> None:
    raise StopError


def kernels_entry() -> bytes:
    """Return what the kernel does when the signal comes: a struct sigaction."""
    entry = ctypes.create_string_buffer(1024)
    assert ctypes.CDLL(None).sigaction(int(NUMBER), None, entry) == 0
    return entry.raw[:16] + entry.raw[136:140]  # handler and mask, and the flags: the rest is not written


@pytest.fixture
def kept() -> Iterator[Callable[[Callable[..., Any]], None]]:
    """Yield what sets a handler; handlers wait for hooks until the test has ended."""
    undo: list[Callable[[], object]] = []

    def put(owner: Any, name: str, wrapper: Any) -> None:
        original = getattr(owner, name)
        undo.append(lambda: setattr(owner, name, original))
        setattr(owner, name, passed_over(wrapper))

    before = signal.getsignal(NUMBER)
    handlers.watch(put, undo.append)
    yield lambda handler: (signal.signal(NUMBER, handler), None)[1]
    signal.signal(NUMBER, before)
    while undo:
        undo.pop()()


@pytest.fixture
def hooks() -> Any:
    space: dict[str, Any] = {"done": [], "passed": passed}
    exec(compile(HOOKS, handlers._OURS + "hooks_of_a_test.py", "exec"), space)
    return types.SimpleNamespace(**space)


def collected(hooks: Any) -> None:
    gc.callbacks.append(hooks.callback)
    try:
        gc.collect()
        str(1)
    finally:
        gc.callbacks.remove(hooks.callback)


def referred(hooks: Any) -> None:
    class Thing:
        pass

    thing = Thing()
    hooks.reference = weakref.ref(thing, hooks.callback)
    del thing
    str(1)


def wrapped(hooks: Any) -> None:
    passed_over(hooks.wrapping(str))(1)
    str(1)


# What the main thread does when the signal comes, and what our code has done by when the exception arrives.
PLACES: dict[str, tuple[Callable[[Any], object], list[str]]] = {
    "a guard": (lambda hooks: (hooks.guard(), str(1)), ["1"]),
    "a wrapper": (wrapped, ["1", "2"]),
    "the garbage collector": (collected, ["1"]),
    "a weak reference": (referred, ["1"]),
}


@pytest.mark.parametrize("place", PLACES)
def test_what_a_handler_raises_in_our_code_arrives_behind_it(place: str, kept: Any, hooks: Any) -> None:
    run, done = PLACES[place]
    kept(handler)
    with pytest.raises(StopError) as raised:
        run(hooks)
    assert hooks.done[: len(done)] == done
    assert not any(isinstance(one, BaseException) for one in hooks.done)
    if sys.version_info >= (3, 11):
        shown = traceback.extract_tb(raised.value.__traceback__)
        assert not [at for at in shown if "/dlprof/" in at.filename], shown


def test_it_runs_at_once_in_what_a_wrapper_has_passed_on(kept: Any, hooks: Any) -> None:
    seen: list[str] = []
    kept(lambda _number, frame: seen.append(frame.f_code.co_name))

    def original() -> None:
        signal.raise_signal(NUMBER)
        str(1)
        assert seen == ["original"] * 2  # that of the wrapper, which has waited, and its own

    passed_over(hooks.wrapping(original))()


@pytest.mark.parametrize("what", ["long", "hangs"])
def test_it_waits_for_a_second_and_no_longer_also_in_a_system_call(
    what: str, kept: Any, hooks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "_WAITS_NS", 100_000_000)
    kept(handler)
    reads, writes = os.pipe()
    rescue = threading.Timer(20, os.write, (writes, b"1"))
    rescue.start()
    began = time.monotonic()
    try:
        with pytest.raises(StopError):
            getattr(hooks, what)(*([reads] if what == "hangs" else []))
        assert 0.1 <= time.monotonic() - began < 20
        assert hooks.done == []
    finally:
        rescue.cancel()
        rescue.join()
        os.close(reads)
        os.close(writes)


def test_it_runs_before_the_script_takes_it_away(kept: Any, hooks: Any) -> None:
    kept(handler)
    with pytest.raises(StopError) as raised:
        (hooks.loops(), signal.signal(NUMBER, signal.SIG_IGN))
    assert signal.getsignal(NUMBER) is handler
    if sys.version_info >= (3, 11):
        assert not [at for at in traceback.extract_tb(raised.value.__traceback__) if "/dlprof/" in at.filename]


def test_handlers_look_as_the_script_has_set_them(kept: Any) -> None:
    kept(handler)
    assert signal.getsignal(NUMBER) is handler
    assert signal.signal(NUMBER, signal.SIG_IGN) is handler
    assert signal.getsignal(NUMBER) is signal.SIG_IGN
    assert not isinstance(signal.getsignal(signal.SIGINT), handlers._Waiting)  # whoever has set it
    with pytest.raises(TypeError, match="callable"):
        kept("no handler")


def test_what_a_script_has_set_before_is_kept_and_given_back() -> None:
    undo: list[Callable[[], object]] = []
    before = signal.signal(NUMBER, handler)
    signal.siginterrupt(NUMBER, False)
    try:
        entry = kernels_entry()
        handlers.watch(lambda *_: None, undo.append)
        assert signal.getsignal(NUMBER) is not handler  # as the module has it
        assert kernels_entry() == entry
        undo.pop()()
        assert signal.getsignal(NUMBER) is handler
        assert kernels_entry() == entry
    finally:
        signal.signal(NUMBER, before)
    assert kernels_entry() != entry
