"""A handler of the script's runs in the script's code, and what it raises arrives there."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from dlprof.record import signals
from dlprof.record.attribution import passed, passed_over
from tests.fixtures.jobs import (
    COMPILES_NOTHING,
    environment,
    facts,
    free_port,
    launch,
    only_child,
    record,
    rows,
    until,
    words,
    wrapped,
)

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
    signals.watch(put, undo.append)
    yield lambda handler: (signal.signal(NUMBER, handler), None)[1]
    signal.signal(NUMBER, before)
    while undo:
        undo.pop()()


@pytest.fixture
def hooks() -> Any:
    space: dict[str, Any] = {"done": [], "passed": passed}
    exec(compile(HOOKS, signals._OURS + "hooks_of_a_test.py", "exec"), space)
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


def in_wrapper(hooks: Any) -> None:
    passed_over(hooks.wrapping(str))(1)
    str(1)


# What the main thread does when the signal comes, and what our code has done by when the exception arrives.
PLACES: dict[str, tuple[Callable[[Any], object], list[str]]] = {
    "a guard": (lambda hooks: (hooks.guard(), str(1)), ["1"]),
    "a wrapper": (in_wrapper, ["1", "2"]),
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
    monkeypatch.setattr(signals, "_WAITS_NS", 100_000_000)
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
    assert not isinstance(signal.getsignal(signal.SIGINT), signals._Waiting)  # whoever has set it
    with pytest.raises(TypeError, match="callable"):
        kept("no handler")


def test_what_a_script_has_set_before_is_kept_and_given_back() -> None:
    undo: list[Callable[[], object]] = []
    before = signal.signal(NUMBER, handler)
    signal.siginterrupt(NUMBER, False)
    try:
        entry = kernels_entry()
        signals.watch(lambda *_: None, undo.append)
        assert signal.getsignal(NUMBER) is not handler  # as the module has it
        assert kernels_entry() == entry
        undo.pop()()
        assert signal.getsignal(NUMBER) is handler
        assert kernels_entry() == entry
    finally:
        signal.signal(NUMBER, before)
    assert kernels_entry() != entry


pytest.importorskip("torch", reason="recording needs torch")

SETUP = """
import ctypes, os, pathlib, signal, sys, threading, time
import torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps):
    for _ in range(steps):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        time.sleep(0.002)
def hang():
    # In C and without the interpreter's lock, as a collective is that another rank never comes to.
    mutex = ctypes.create_string_buffer(64)
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    print("hangs", flush=True)
    lock(mutex)
"""


def script(folder: Path, body: str) -> Path:
    path = folder / "train.py"
    path.write_text(COMPILES_NOTHING + SETUP + dedent(body))
    return path


def begun(folder: Path, body: str, word: str = "hangs\n") -> subprocess.Popen[str]:
    """Start a script under dlprof, and wait until it says a word."""
    command = wrapped(folder / "run", [sys.executable, script(folder, body)], "--window", "1000,1,1")
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == word
    return process


@pytest.mark.long
def test_a_rank_that_hangs_in_c_saves_its_steps_and_ends_by_sigterm(tmp_path: Path) -> None:
    process = begun(tmp_path, "train(25)\nhang()")
    rank = tmp_path / "run/ranks/00000"
    saved = until(lambda: len(rows(rank)) == 25)  # while it hangs
    process.terminate()
    assert process.wait(20) == -signal.SIGTERM
    assert saved
    assert facts(rank)["ended"] == f"signal {int(signal.SIGTERM)}"
    assert [row["step"] for row in rows(rank)][:25] == list(range(25))


@pytest.mark.long
def test_ranks_that_wait_for_each_other_end_with_their_launcher(tmp_path: Path) -> None:
    # Without our thread, torchrun waited 30 s for the rank that was in the barrier, and killed it.
    deadlock = script(
        tmp_path,
        """
        import torch.distributed as distributed
        distributed.init_process_group("gloo")
        train(25)
        print("hangs", flush=True)
        distributed.barrier() if distributed.get_rank() == 0 else time.sleep(1000)
        """,
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    command = wrapped(tmp_path / "run", [*torchrun, deadlock])
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["hangs\n"] * 2
    process.terminate()
    process.wait(20)
    for rank in ("00000", "00001"):
        assert facts(tmp_path / "run/ranks" / rank)["ended"] == f"signal {int(signal.SIGTERM)}"
        assert len(rows(tmp_path / "run/ranks" / rank)) >= 25


@pytest.mark.long
def test_a_rank_that_hangs_does_not_hold_up_an_elastic_restart(tmp_path: Path) -> None:
    # torchrun sends SIGTERM to what is left of a failed life, and waits up to 30 s before it kills.
    restarts = script(
        tmp_path,
        """
        train(25)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if os.environ["RANK"] == "0":
                pathlib.Path("hangs").touch()
                hang()
            while not pathlib.Path("hangs").exists():
                time.sleep(0.01)
            sys.exit(3)
        """,
    )
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = launch(wrapped(tmp_path / "run", [sys.executable, *torchrun, restarts], "--no-trace"), tmp_path)
    assert done.returncode == 0, done.stderr
    ranks = tmp_path / "run/ranks"
    assert sorted(path.name for path in ranks.iterdir()) == ["00000", "00000.r1", "00001", "00001.r1"]
    assert facts(ranks / "00000")["ended"] == f"signal {int(signal.SIGTERM)}"
    assert [len(rows(path)) for path in sorted(ranks.iterdir())] == [25] * 4


@pytest.mark.long
def test_a_script_and_a_forks_child_find_the_handlers_that_they_find_without_us(tmp_path: Path) -> None:
    chains = script(
        tmp_path,
        """
        import _signal
        train(5)
        child = os.fork()
        if not child:
            told = signal.set_wakeup_fd(-1), type(_signal.getsignal(signal.SIGTERM)) in (int, signal.Handlers)
            print(*told, flush=True)
            time.sleep(1000)
        time.sleep(0.5)
        os.kill(child, signal.SIGTERM)
        print(os.WTERMSIG(os.waitpid(child, 0)[1]))
        train(5)
        print(signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
        def theirs(number, frame):
            print("theirs")
            if callable(before):
                before(number, frame)
        before = signal.signal(signal.SIGTERM, theirs)
        print(before, callable(before))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        print(signal.signal(signal.SIGTERM, before) is theirs)
        """,
    )
    done = record(chains, folder=tmp_path / "run", options=["--no-trace"])
    child = f"-1 True\n{int(signal.SIGTERM)}\n"
    assert done.stdout.replace("Handlers.SIG_DFL", "0") == f"{child}0 True\n0 False\ntheirs\nTrue\n"
    assert facts(tmp_path / "run/ranks/00000")["ended"] == "exit"


@pytest.mark.long
def test_whoever_listens_to_signals_already_goes_on_to(tmp_path: Path) -> None:
    listens = script(
        tmp_path,
        """
        mine, theirs = os.pipe()
        os.set_blocking(theirs, False)
        signal.set_wakeup_fd(theirs)
        signal.signal(signal.SIGUSR1, lambda number, frame: None)
        train(5)
        os.kill(os.getpid(), signal.SIGUSR1)
        print(os.read(mine, 1)[0] == signal.SIGUSR1, signal.set_wakeup_fd(-1) == theirs)
        """,
    )
    assert record(listens, folder=tmp_path / "run", options=["--no-trace"]).stdout == "True True\n"


@pytest.mark.long
def test_whoever_kills_what_he_started_kills_the_job(tmp_path: Path) -> None:
    # As without us: a job that ran on would hold its GPUs, and nobody would see it.
    process = begun(tmp_path, "train(25)\nprint('hangs', flush=True)\ntrain(10**9)")
    rank = only_child(process.pid)
    process.kill()
    process.wait()
    assert until(lambda: not words(rank))
    assert facts(tmp_path / "run/ranks/00000")["ended"] == f"signal {int(signal.SIGTERM)}"
    assert len(rows(tmp_path / "run/ranks/00000")) >= 25
    assert json.loads((tmp_path / "run/run.json").read_text())["end_ns"] is None


@pytest.mark.long
def test_a_sigterm_waits_for_the_files_that_the_end_of_the_script_leaves(tmp_path: Path) -> None:
    # The export of a large trace is in C: the thread must not take it for a collective that hangs.
    ends = script(
        tmp_path,
        """
        def late():
            while not pathlib.Path("run/ranks/00000/trace.json.tmp").exists():
                time.sleep(0.0005)
            os.kill(os.getpid(), signal.SIGTERM)
        threading.Thread(target=late, daemon=True).start()
        train(1200)
        """,
    )
    done = launch(wrapped(tmp_path / "run", [sys.executable, ends], "--window", "2,1,1000000"), tmp_path)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert facts(tmp_path / "run/ranks/00000")["window"]["state"] == "partial"
    assert (tmp_path / "run/ranks/00000/trace.json.gz").exists()
