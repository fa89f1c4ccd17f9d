"""A job that dies, in any way and at any moment, dies as ever and leaves what was recorded until then."""

from __future__ import annotations

import json
import os
import pty
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dlprof.commands.report import write_report
from tests.fixtures.jobs import (
    COMPILES_NOTHING,
    TORCHRUN,
    children,
    environment,
    facts,
    launch,
    rows,
    until,
    words,
    wrapped,
)

pytest.importorskip("torch", reason="recording needs torch")

# Says where it is. The window opens at step 20, records from 30 on for as long as it is told, and is then exported.
TRAINS = f"""
import sys, time
print("started", flush=True)
{COMPILES_NOTHING}print("imported", flush=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for n in range(int(sys.argv[1])):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    time.sleep(0.002)
    print(n, flush=True)
print("trained", flush=True)
"""

# (said by the script before, seconds after that at most, signals)
MOMENTS = {
    "before torch": ("started", 0.0, (signal.SIGKILL, signal.SIGTERM)),
    "importing torch": ("started", 0.8, (signal.SIGKILL, signal.SIGABRT)),
    "before the first step": ("imported", 0.0, (signal.SIGKILL, signal.SIGTERM)),
    "before the window": ("10", 0.01, (signal.SIGKILL, signal.SIGSEGV)),
    "warming up": ("23", 0.01, (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)),
    "in the window": ("60", 0.05, (signal.SIGKILL, signal.SIGABRT)),
    "exporting": ("429", 0.2, (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)),
    "leaving": ("trained", 0.1, (signal.SIGKILL, signal.SIGTERM)),
}
SEED = 20260


def left_over(folder: Path) -> list[int]:
    """List the processes that know a run folder, by their arguments or their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            known = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue
        if int(process.name) != os.getpid() and os.fsencode(folder) in known:
            found.append(int(process.name))
    return found


def reported(folder: Path) -> Any:
    """Report on a run, and give its result."""
    write_report(folder)
    return json.loads((folder / "result.json").read_text())


def start(folder: Path, command: Sequence[str], *options: str) -> subprocess.Popen[str]:
    """Start a recording as the leader of a process group, as a shell does."""
    return subprocess.Popen(
        wrapped(folder, command, *options),
        env=environment(),
        cwd=folder.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def command_of(supervisor: int, script: str) -> int:
    return next(pid for pid in children(supervisor) if script in words(pid))


def wait_for(process: subprocess.Popen[str], word: str) -> str:
    """Read the script's words up to one; give the last number before it."""
    assert process.stdout is not None
    last = "0"
    for line in process.stdout:
        if line.strip() == word:
            return last
        last = line.strip() if line.strip().isdigit() else last
    raise AssertionError(f"the script ended before it said {word}")


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_any_moment(moment: str, tmp_path: Path) -> None:
    said, seconds, numbers = MOMENTS[moment]
    chance = random.Random(f"{SEED} {moment}")
    number = chance.choice(numbers)
    (tmp_path / "trains.py").write_text(TRAINS)
    process = start(tmp_path / "run", [sys.executable, str(tmp_path / "trains.py"), "440"], "--window", "20,10,400")
    wait_for(process, said)
    pid = command_of(process.pid, "trains.py")
    time.sleep(chance.uniform(0, seconds))
    os.kill(pid, number)
    _, errors = process.communicate(timeout=60)
    # Whoever is signalled on the way out may have left by then.
    assert process.returncode in ((-number, 0) if moment == "leaving" else (-number,)), errors
    assert "Traceback" not in errors or number == signal.SIGINT
    assert until(lambda: not left_over(tmp_path / "run")), [words(pid) for pid in left_over(tmp_path / "run")]
    result = reported(tmp_path / "run")
    assert result["run"]["exit"] == (
        {"code": 0, "signal": None} if process.returncode == 0 else {"code": None, "signal": int(number)}
    )
    if said.isdigit():
        # What was not yet written, every quarter of a second.
        assert len(rows(tmp_path / "run/ranks/00000")) >= int(said) - 125
        assert result["run"]["ranks"] == [0]
    elif said != "trained":
        assert result["run"]["warnings"]


@pytest.mark.long
@pytest.mark.parametrize("presses", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_ctrl_c_once_and_twice(presses: int, tmp_path: Path) -> None:
    (tmp_path / "trains.py").write_text(TRAINS)
    command = wrapped(
        tmp_path / "run", [sys.executable, str(tmp_path / "trains.py"), "100000"], "--window", "5,1,10000"
    )
    command.remove("--no-report")
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(command[0], command, environment())
    seen = b""
    pressed: list[float] = []
    while select.select([terminal], [], [], 60)[0]:
        try:
            seen += os.read(terminal, 4096)
        except OSError:  # the terminal's last process has gone
            break
        if b"\r\n40\r\n" in seen and len(pressed) < presses:
            for _ in range(presses):
                os.write(terminal, b"\x03")
                pressed.append(time.monotonic())
                time.sleep(0.1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGINT
    assert until(lambda: not left_over(tmp_path / "run"))
    # The script's own traceback, and where the second press finds the interpreter leaving, Python's; none of our end.
    assert b"KeyboardInterrupt" in seen
    assert b"Recorder.stop" not in seen
    assert b"Aborted" not in seen
    rank = tmp_path / "run/ranks/00000"
    assert len(rows(rank)) >= 6
    assert json.loads((tmp_path / "run/run.json").read_text())["exit"] == {"code": None, "signal": 2}
    assert reported(tmp_path / "run")["run"]["exit"]["signal"] == 2


# What programs that show their state as a title do to the memory in which the kernel sees arguments and environment.
TITLED = """
import ctypes
with open("/proc/self/stat") as stat:
    words = stat.read().rpartition(")")[2].split()
begin, end = int(words[45]), int(words[48])
ctypes.memset(begin, 0, end - begin)
ctypes.memmove(begin, b"training: rank 0", 16)
print("imported", flush=True)
"""

# Starts a rank and is killed, as a launcher by a scheduler that knows of nobody else.
ORPHANS = """
import os, signal, subprocess, sys, time
with open("said", "w") as said:
    command = [sys.executable, "trains.py", "1000000"]
    rank = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
print(rank.pid, flush=True)
while "\\n40\\n" not in open("said").read():
    time.sleep(0.02)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
def test_ranks_that_a_killed_launcher_leaves_are_told_of_and_train_on(tmp_path: Path) -> None:
    (tmp_path / "trains.py").write_text(TRAINS.replace('print("imported", flush=True)', TITLED))
    (tmp_path / "launches.py").write_text(ORPHANS)
    done = launch(wrapped(tmp_path / "run", [sys.executable, "launches.py"], "--window", "5,1,3"), tmp_path)
    pid = int(done.stdout)
    try:
        assert done.returncode == -signal.SIGKILL
        (told,) = [
            line for line in done.stderr.splitlines() if line.startswith("dlprof: the command has ended and left")
        ]
        assert f"rank 0 (process {pid});" in told
        assert words(pid).startswith("training: rank 0")
        assert b"DLPROF" not in Path(f"/proc/{pid}/environ").read_bytes()
        result = reported(tmp_path / "run")["run"]
        assert result["exit"] == {"code": None, "signal": int(signal.SIGKILL)}
        assert result["ranks"] == [0]
        assert told.removeprefix("dlprof: ") in result["warnings"]
        # It trains on, is recorded on, and ends as it would have.
        before = len(rows(tmp_path / "run/ranks/00000"))
        assert until(lambda: len(rows(tmp_path / "run/ranks/00000")) > before)
    finally:
        os.kill(pid, signal.SIGTERM)
    assert until(lambda: not words(pid))
    assert facts(tmp_path / "run/ranks/00000")["ended"] == f"signal {signal.SIGTERM.value}"


RANKS = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for n in range(100000 if "long" in sys.argv else 20):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if n == 10:
        os.write(1, b"ready\\n")  # at once: print writes a word and its end, and the other rank's may come between
    if "dies" in sys.argv and n == 12 and dist.get_rank() == 1 and life == 0:
        os.abort()
    time.sleep(0.002)
del model  # before its group: PyTorch and gloo may wait for each other else
dist.destroy_process_group()
"""


@pytest.mark.long
def test_a_scheduler_ends_a_whole_job(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(COMPILES_NOTHING + RANKS)
    command = [sys.executable, *TORCHRUN, str(tmp_path / "ranks.py"), "long"]
    process = start(tmp_path / "run", command, "--window", "5,1,100000")
    wait_for(process, "ready")
    os.killpg(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    # torchrun's own end by SIGTERM: it says so in an exception, once, and ends its ranks.
    assert process.returncode == 1, errors
    assert errors.count("SignalException: Process") == 1
    assert "left some of its job" not in errors
    assert until(lambda: not left_over(tmp_path / "run"))
    for number in (0, 1):
        rank = tmp_path / f"run/ranks/{number:05d}"
        assert facts(rank)["ended"] == f"signal {signal.SIGTERM.value}"
        assert facts(rank)["window"]["state"] == "partial"
        assert len(rows(rank)) >= 10
    assert reported(tmp_path / "run")["run"]["ranks"] == [0, 1]


# Slow where gloo fails to meet again after a restart, as it does without dlprof.
@pytest.mark.slow
def test_what_was_before_an_elastic_restart_is_kept_apart(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(COMPILES_NOTHING + RANKS)
    # One in five restarts fails without dlprof too: gloo asks for the address of a rank's earlier life.
    command = [sys.executable, *TORCHRUN, "--max-restarts", "9", str(tmp_path / "ranks.py"), "dies"]
    done = launch(wrapped(tmp_path / "run", command, "--no-trace"), tmp_path)
    assert done.returncode == 0, done.stderr
    lives = sorted(path.name for path in (tmp_path / "run/ranks").iterdir())
    assert len(lives) == 4
    assert lives[0::2] == ["00000", "00001"]
    last = lives[1].partition(".r")[2]
    assert lives[1::2] == [f"00000.r{last}", f"00001.r{last}"]
    for life in lives[1::2]:
        assert len(rows(tmp_path / "run/ranks" / life)) == 20
    result = reported(tmp_path / "run")["run"]
    assert result["ranks"] == [0, 1]
    assert [text for text in result["warnings"] if f"restarted {last}" in text]


# Half a gigabyte more than it has.
TAKES_ALL = """
import resource
with open("/proc/self/statm") as size:
    most = int(size.read().split()[0]) * resource.getpagesize() + (1 << 29)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
block = []
while True:
    block.append(bytearray(1 << 26))
"""


@pytest.mark.long
def test_a_job_out_of_memory_leaves_its_recording(tmp_path: Path) -> None:
    # As where a container's limit is reached, but for the signal's sender: no memory, then the kernel.
    (tmp_path / "trains.py").write_text(TRAINS.replace('print("trained", flush=True)', TAKES_ALL))
    done = launch(wrapped(tmp_path / "run", [sys.executable, tmp_path / "trains.py", "60"], "--no-trace"), tmp_path)
    assert done.returncode == 1
    assert "MemoryError" in done.stderr
    assert "dlprof: rank" not in done.stderr
    assert len(rows(tmp_path / "run/ranks/00000")) == 60
    assert reported(tmp_path / "run")["run"]["exit"] == {"code": 1, "signal": None}
