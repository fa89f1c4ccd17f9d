"""A signal reaches the watched command as it does without dlprof, and once, whomever else its sender named."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dlprof.record.launch.process import family, running
from tests.fixtures.jobs import children, environment, in_its_own_group, only_child, state, until, words, wrapped

# Says when it is ready, then waits to be signalled, and tells how often it was.
WAITS = """
import os, signal, sys, time
seen = []
for name in sys.argv[1:]:
    signal.signal(getattr(signal, name), lambda number, frame: seen.append(signal.Signals(number).name))
print("ready", flush=True)
deadline = time.monotonic() + 30
while len(seen) < int(os.environ.get("SIGNALS", 1)) and time.monotonic() < deadline:
    time.sleep(0.02)
time.sleep(0.3)
print(",".join(seen), flush=True)
sys.exit(9)
"""


def ready(command: Sequence[str], signals: int = 1, **more: Any) -> subprocess.Popen[str]:
    """Start a command that waits for so many signals, and wait until it says that it is ready."""
    process = subprocess.Popen(
        command, env=environment(SIGNALS=str(signals)), stdout=subprocess.PIPE, text=True, **more
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def started(command: Sequence[str], names: Sequence[str]) -> subprocess.Popen[str]:
    """Start a command; whoever runs the tests may ignore these signals, as nohup does, and that would be inherited."""

    def heed() -> None:
        for name in names:
            signal.signal(getattr(signal, name), signal.SIG_DFL)

    return ready(command, len(names), preexec_fn=heed)


def test_signals_sent_to_dlprof_reach_the_command_once_each(tmp_path: Path) -> None:
    names = ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"]
    process = started(wrapped(tmp_path / "run", [sys.executable, "-c", WAITS, *names]), names)
    for name in names:
        process.send_signal(getattr(signal, name))
        time.sleep(0.01)
    said = process.communicate(timeout=30)[0]
    assert (sorted(said.strip().split(",")), process.returncode) == (sorted(names), 9)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_that_ends_the_command_ends_dlprof_alike(name: str, tmp_path: Path) -> None:
    process = started(wrapped(tmp_path / "run", [sys.executable, "-c", WAITS]), [name])
    process.send_signal(getattr(signal, name))
    process.communicate(timeout=30)
    assert process.returncode == -getattr(signal, name)


@pytest.mark.parametrize(("key", "name"), [(b"\x03", "SIGINT"), (b"\x1c", "SIGQUIT")])
def test_a_key_on_the_terminal_reaches_the_command_once(key: bytes, name: str, tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        command = wrapped(tmp_path / "run", [sys.executable, "-c", WAITS, name], "--quiet")
        os.execve(command[0], command, environment())
    seen = b""
    pressed = False
    while select.select([terminal], [], [], 30)[0]:
        try:
            seen += os.read(terminal, 1000)
        except OSError:  # the terminal's last process has gone
            break
        if b"ready" in seen and not pressed:
            os.write(terminal, key)
            pressed = True
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert seen.count(name.encode()) == 1


def test_stopping_and_continuing_dlprof_stops_and_continues_the_command(tmp_path: Path) -> None:
    command = wrapped(tmp_path / "run", [sys.executable, "-c", WAITS, "SIGUSR1"])
    # A process group of its own, with its parent outside, as a shell gives its jobs: only such a group can be stopped.
    process = ready(command, preexec_fn=lambda: os.setpgid(0, 0))
    child = only_child(process.pid)
    process.send_signal(signal.SIGTSTP)
    assert until(lambda: state(process.pid) == "T" and state(child) == "T")
    process.send_signal(signal.SIGCONT)
    assert until(lambda: state(process.pid) != "T" and state(child) != "T")
    process.send_signal(signal.SIGUSR1)
    assert (process.communicate(timeout=30)[0], process.returncode) == ("SIGUSR1\n", 9)


@pytest.mark.long
def test_signals_to_all_processes_of_a_job_end_none_of_the_recorders(tmp_path: Path) -> None:
    """As `scancel --signal` sends them."""
    names = ["SIGUSR1", "SIGUSR2", "SIGQUIT"]
    process = ready(wrapped(tmp_path / "run", [sys.executable, "-c", WAITS, *names]), len(names))
    recorders = family([process.pid], running())
    assert len(recorders) > 2  # the samplers are there, beside the command
    for name in names:
        for pid in recorders:
            with suppress(ProcessLookupError):  # a witness of the supervisor's may have gone
                os.kill(pid, getattr(signal, name))
    assert {*process.communicate(timeout=30)[0].strip().split(",")} == {*names}
    assert process.returncode == 9
    (only,) = json.loads((tmp_path / "run/run.json").read_text())["warnings"]
    assert "never imported torch" in only


@pytest.mark.long
@pytest.mark.parametrize("alone", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_job_that_a_scheduler_suspends_goes_on_when_it_is_resumed(alone: bool, tmp_path: Path) -> None:
    process = in_its_own_group(wrapped(tmp_path / "run", [sys.executable, "-c", WAITS, "SIGUSR1"]))
    job = [process.pid] if alone else [*children(process.pid), process.pid]
    # Longer than it ever waits at a time for a signal to pass on, and long enough to show by the clock too.
    for stopped_s in (1.2, 4.0):
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in job:
                os.kill(pid, number)
            time.sleep(stopped_s if number == signal.SIGSTOP else 1.2)
    process.send_signal(signal.SIGUSR1)
    said = process.communicate(timeout=30)
    assert (said[0], process.returncode) == ("SIGUSR1\n", 9), said[1]
    # Of a command that ran on there is nothing to tell.
    assert said[1].count("stopped and went on again 2 times") == (0 if alone else 1), said[1]


def test_a_signal_to_the_whole_group_reaches_the_command_once(tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []
    for command in ([sys.executable, "-c", WAITS, "SIGTERM"], [sys.executable, "-c", WAITS, "SIGUSR1", "SIGTERM"]):
        process = in_its_own_group(wrapped(tmp_path / str(len(told)), command))
        os.killpg(process.pid, signal.SIGTERM)
        told.append((process.communicate(timeout=30)[0], process.returncode))
    assert told == [("SIGTERM\n", 9)] * 2


# Says when it has a core for itself, and gives it to nobody for half a second at a time.
KEEPS = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
print(flush=True)
while True:
    pass
"""


@pytest.mark.long
def test_a_signal_to_the_process_and_then_to_its_group_reaches_the_command_once(tmp_path: Path) -> None:
    if shutil.which("timeout") is None:
        pytest.skip("timeout, of GNU coreutils, is not here")
    command = wrapped(tmp_path / "run", [sys.executable, "-c", WAITS, "SIGTERM"], "--quiet")
    process = ready(["timeout", "-s", "TERM", "4", *command], preexec_fn=os.setpgrp)
    assert process.communicate(timeout=30)[0] == "SIGTERM\n"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the rest of the job needs a core as well")
def test_a_signal_to_the_whole_group_reaches_the_command_once_where_the_witness_has_no_core(tmp_path: Path) -> None:
    process = in_its_own_group(wrapped(tmp_path / "run", [sys.executable, "-c", WAITS, "SIGTERM"]))
    (witness,) = (child for child in children(process.pid) if "sigwaitinfo" in words(child))
    core, *others = sorted(os.sched_getaffinity(0))
    for pid in (process.pid, *children(process.pid)):
        os.sched_setaffinity(pid, {core} if pid == witness else others)
    keeps = subprocess.Popen(
        [sys.executable, "-c", KEEPS, str(core)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with keeps:
        assert keeps.stdout is not None
        may = keeps.stdout.readline() == "\n"
        os.killpg(process.pid, signal.SIGTERM)
        told = process.communicate(timeout=30)[0], process.returncode
        keeps.kill()
    if not may:
        pytest.skip("no process of this user may keep a core to itself")
    assert told == ("SIGTERM\n", 9)


def test_a_signal_is_passed_on_where_the_witness_has_died(tmp_path: Path) -> None:
    process = ready(wrapped(tmp_path / "run", [sys.executable, "-c", WAITS, "SIGTERM"]))
    assert until(lambda: any("sigwaitinfo" in words(c) for c in children(process.pid)))
    for pid in children(process.pid):
        if "sigwaitinfo" in words(pid):
            os.kill(pid, signal.SIGKILL)
    process.send_signal(signal.SIGTERM)
    assert (process.communicate(timeout=30)[0], process.returncode) == ("SIGTERM\n", 9)


@pytest.mark.slow
def test_a_parent_that_waits_for_its_children_is_waited_for_and_named(tmp_path: Path) -> None:
    """As without dlprof: a signal to the parent alone lets multiprocessing wait for the children at its end."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import multiprocessing, time\n"
        "def child():\n    time.sleep(22)\n"
        "if __name__ == '__main__':\n"
        "    one = multiprocessing.Process(target=child)\n    one.start()\n"
        "    print('ready', flush=True)\n    one.join()\n"
    )
    process = ready(wrapped(tmp_path / "run", [sys.executable, script], "--no-sample"), stderr=subprocess.PIPE)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=90)[1]
    assert process.returncode == -signal.SIGINT
    assert said.count("told to end 15 s ago and still runs") == 1
