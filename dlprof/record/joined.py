"""Records a process that runs already, for some seconds: `enter` is called within it by `dlprof attach --inject`.

It comes as a pending call of the interpreter, so it runs on the main thread, between two bytecodes, as a handler of a
signal does. The recorder leaves the same way when its time is over, whether the command that has put it there still
runs or not. What stays until the process ends: our modules, and the entries in os.register_at_fork.

Ranks are entered one after the other, and must count the same steps: see Together.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dlprof import marks
from dlprof.files import write
from dlprof.plain import words_of
from dlprof.record import collectors, hooks
from dlprof.record.captured import capture_test
from dlprof.record.ranks import process_group

_AGAIN_S = 0.05
_LOOKS_S = 0.5
TOGETHER_S = 20.0  # that ranks may take to begin in one step
_COUNTS_S, _AHEAD_S, _LEAST_AHEAD = 0.3, 1.0, 2
_CALL = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)

_due: list[Any] = []  # pending calls, which must outlive their making


def enter(asked: Mapping[str, Any]) -> None:
    """Install the recorder in this process, or answer why not.

    `asked`: pid, run (the folder), variables (the options, for the environment), answer (a file), until (Unix time, s:
    later than that nobody waits any more), seconds (to record), together (a file that is there once all ranks are
    entered; "": there is one rank), leads (whether this rank says where they begin).
    """
    if os.getpid() != asked["pid"]:
        return  # a fork has inherited the call
    try:
        if time.time() > asked["until"]:
            return
        if why := _never():
            _answer(asked, refused=why)
        elif why := _not_now():
            _later(lambda: enter(asked), _AGAIN_S)
            _answer(asked, waits=why)
        else:
            _join(asked)
    except Exception as e:  # noqa: BLE001 - the job goes on as it was
        hooks.uninstall()
        _answer(asked, refused=words_of(e))


def _never() -> str:
    """Return why this process cannot be recorded at all; "" if it can."""
    if os.environ.get("DLPROF_RUN") or marks.recorder is not None:
        return f"it is recorded already, into {os.environ.get('DLPROF_RUN', 'another folder')}"
    if "torch" not in sys.modules:
        return "it has not imported torch"
    worker: Any = sys.modules.get("torch.utils.data._utils.worker")
    if getattr(worker, "_worker_info", None) is not None:
        return "it is a loader's worker"
    return ""


def _not_now() -> str:
    """Return what the main thread must not be disturbed in; "" for nothing."""
    import torch

    cuda: Any = torch.cuda
    if cuda.is_initialized() and cuda.is_current_stream_capturing():
        return "it captures a CUDA graph"
    return "it traces or compiles a model" if capture_test()() else ""


def _join(asked: Mapping[str, Any]) -> None:
    undo = contextlib.ExitStack()
    # For the collectors, and for workers that are started from here on.
    undo.enter_context(environment(asked["variables"]))

    def leave() -> None:
        try:
            hooks.uninstall()
            undo.close()
            _answer(asked, left=True)
        except Exception as e:  # noqa: BLE001 - the job goes on
            _answer(asked, left=True, problem=words_of(e))

    try:
        hooks.install(asked["run"], collectors.COLLECTORS)
        if asked["together"] and marks.recorder is not None:
            marks.recorder.may_begin = Together(Path(asked["together"]), leads=asked["leads"])
        _later(leave, asked["seconds"], sooner=asked["answer"] + ".stop", since=_has_begun)
    except Exception:
        leave()
        raise
    _answer(asked, entered=True)


@contextlib.contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment, and restore those that were not changed meanwhile."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if os.environ.get(name) != changes[name]:
                continue
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Together:
    """Lets the recordings of several ranks begin in the same step, by the number of collectives that each has issued.

    Ranks that run the same program have issued as many where they come to the same call of a hook. The rank that leads
    names a number that it will come to in about a second, and each begins at the first call after it. Where that does
    not come, as the default group has no collectives, they begin after some seconds, each in a step of its own.
    """

    def __init__(self, all_here: Path, *, leads: bool) -> None:
        self._all_here, self._leads = all_here, leads
        self._named = all_here.with_name("first")
        self._first: int | None = None
        self._from: tuple[float, int] | None = None  # when the leader began to count, and at which number
        self._until = time.monotonic() + TOGETHER_S

    def __call__(self) -> bool:
        """Return whether the recording may begin."""
        issued = _issued()
        if issued is None or time.monotonic() > self._until:
            return True
        if self._first is None:
            with contextlib.suppress(OSError, ValueError):
                if self._leads and self._all_here.exists():
                    self._name(issued)
                elif not self._leads:
                    self._first = int(self._named.read_text())
        return self._first is not None and issued >= self._first

    def _name(self, issued: int) -> None:
        """Name the first number, once it is known how fast they grow. Raises OSError."""
        now = time.monotonic()
        self._from = self._from or (now, issued)
        passed = now - self._from[0]
        if passed >= _COUNTS_S:
            self._first = issued + max(math.ceil((issued - self._from[1]) / passed * _AHEAD_S), _LEAST_AHEAD)
            write(self._named, str(self._first))


def _issued() -> int | None:
    """Return how many collectives of the default process group this rank has issued; None: that is not known."""
    if process_group() is None:
        return None
    try:
        from torch.distributed.distributed_c10d import _get_default_group

        group: Any = _get_default_group()
        return int(group._get_sequence_number_for_group())
    except (RuntimeError, ValueError, AttributeError):  # a backend that does not count them
        return None


def _has_begun() -> bool:
    return marks.recorder is None or marks.recorder.may_begin is None


def _later(
    call: Callable[[], None], seconds: float, sooner: str = "", since: Callable[[], bool] = lambda: True
) -> None:
    """Have the main thread call it so long after `since`, or once a file `sooner` is there, as soon as it runs Python.

    `since` is waited for no longer than ranks wait for each other.
    """

    def run(_: object) -> int:
        with contextlib.suppress(Exception):
            call()
        return 0  # anything else raises an error in the script

    pending, pid = _CALL(run), os.getpid()
    _due.append(pending)

    def wait() -> None:
        given_up = time.monotonic() + TOGETHER_S
        while not since() and time.monotonic() < given_up:
            time.sleep(_LOOKS_S)
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not (sooner and os.path.exists(sooner)):  # noqa: PTH110
            time.sleep(min(left, _LOOKS_S))
        # −1: 32 calls are pending, which the main thread has not come to yet.
        while os.getpid() == pid and ctypes.pythonapi.Py_AddPendingCall(pending, None):
            time.sleep(_AGAIN_S)

    # Not a threading.Thread: a script that joins all threads in threading.enumerate() would wait for it.
    _thread.start_new_thread(wait, ())


def _answer(asked: Mapping[str, Any], **said: Any) -> None:
    with contextlib.suppress(OSError):
        write(Path(asked["answer"]), json.dumps(said))
