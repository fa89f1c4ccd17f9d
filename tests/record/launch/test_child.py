"""The watched command must not be able to tell: it starts, reads, writes and ends as it does without dlprof."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from dlprof.record.launch.folder import RunFolder
from dlprof.record.launch.supervisor import supervise
from tests.fixtures.jobs import environment, launch, only_child, state, until, wrapped

ENDINGS = {
    "zero": "pass",
    "three": "import sys; sys.exit(3)",
    "message": "import sys; sys.exit('no')",
    "uncaught": "raise RuntimeError('boom')",
    "abort": "import os; os.abort()",
    "kill": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "os_exit": "import os; os._exit(77)",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_command_ends_as_it_does_without_dlprof(ending: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDINGS[ending]]
    plain = launch(command, tmp_path)
    recorded_ = launch(wrapped(tmp_path / "run", command), tmp_path)
    assert recorded_.returncode == plain.returncode
    assert recorded_.stdout == plain.stdout
    end = json.loads((tmp_path / "run/run.json").read_text())["exit"]
    code, number = (None, -plain.returncode) if plain.returncode < 0 else (plain.returncode, None)
    assert end == {"code": code, "signal": number}


def test_a_killed_dlprof_leaves_no_command_behind(tmp_path: Path) -> None:
    waits = "import time; print('ready', flush=True); time.sleep(60)"
    command = wrapped(tmp_path / "run", [sys.executable, "-c", waits])
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    child = only_child(process.pid)
    process.kill()
    process.wait(30)
    assert until(lambda: not Path(f"/proc/{child}").exists() or state(child) == "Z")
    run = json.loads((tmp_path / "run/run.json").read_text())
    assert run["end_ns"] is None


def test_the_command_keeps_its_stdin_arguments_descriptors_and_signal_mask(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, signal, sys\n"
        "print(json.dumps([sys.stdin.read(), sys.argv, __name__, os.read(int(sys.argv[1]), 99).decode(),\n"
        "    sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), str(signal.getsignal(signal.SIGINT)),\n"
        "    str(signal.getsignal(signal.SIGCHLD)), os.getcwd()]))\n"
    )
    told: list[Any] = []
    for prefix in (
        [sys.executable],
        [sys.executable, "-m", "dlprof", "wrap", "--no-report", "-o", str(tmp_path / "r")],
    ):
        reading, writing = os.pipe()
        os.write(writing, b"inherited")
        os.close(writing)
        done = launch(
            [*prefix, script, str(reading), "-o", "--no-trace", "--", "-x", ""],
            tmp_path,
            input="typed",
            pass_fds=[reading],
        )
        os.close(reading)
        told.append(json.loads(done.stdout) if done.stdout else done.stderr)
        told[-1][1][1] = "FD"
    assert told[0] == told[1]
    assert told[0][0] == "typed"
    assert told[0][3] == "inherited"


@pytest.mark.parametrize(("mode", "status"), [(None, 127), (0o644, 126)])
def test_a_command_that_cannot_start_ends_as_in_a_shell(mode: int | None, status: int, tmp_path: Path) -> None:
    command = tmp_path / "command"
    if mode is not None:
        command.write_text("#!/bin/sh\n")
        command.chmod(mode)
    done = launch(wrapped(tmp_path / "run", [command]), tmp_path)
    assert done.returncode == status
    assert len(done.stderr.splitlines()) == 2  # where it records, and what went wrong
    assert str(command) in done.stderr


@pytest.mark.parametrize(
    ("name", "there", "hints"), [("train.py", True, True), ("train.py", False, False), ("train", True, False)]
)
def test_a_script_in_a_commands_place_is_told_how_it_runs(name: str, there: bool, hints: bool, tmp_path: Path) -> None:
    if there:
        (tmp_path / name).write_text("pass\n")
    done = launch(wrapped(tmp_path / "run", [name]), tmp_path)
    assert done.returncode == 127
    assert ("leave out the --" in done.stderr) == hints


def test_a_process_with_other_threads_still_sees_the_end(tmp_path: Path) -> None:
    idle = threading.Event()
    others = [threading.Thread(target=idle.wait) for _ in range(8)]
    for thread in others:
        thread.start()
    try:
        # The kernel may hand the SIGCHLD to any of them, which has it not blocked and ignores it.
        for n in range(4):
            run = RunFolder(tmp_path / str(n), ["true"], {}, environment())
            assert supervise(["true"], run, environment()).code == 0
    finally:
        idle.set()
        for thread in others:
            thread.join()
