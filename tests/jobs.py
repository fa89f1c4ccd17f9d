"""Starts real scripts, plain and under dlprof, for the tests of recording."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

DLPROF = (sys.executable, "-m", "dlprof")


def environment(**changes: str) -> dict[str, str]:
    """Return an environment in which no outer recording or launcher shows, with one thread a process."""
    hidden = ("DLPROF_", "SLURM_", "OMPI_", "PMIX_", "PMI_", "TORCHELASTIC_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(hidden) and k not in ("RANK", "WORLD_SIZE")}
    return env | {"OMP_NUM_THREADS": "1"} | changes


def wrapped(folder: Path, command: Sequence[str | Path], *options: str) -> list[str]:
    """Return the command line that records a command into a folder, without a report."""
    return [*DLPROF, "wrap", "-o", str(folder), "--no-report", *options, "--", *map(str, command)]


def launch(command: Sequence[str | Path], cwd: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with its output captured."""
    options: dict[str, Any] = {"env": environment(), "timeout": 120} | more
    return subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, check=False, **options)


def record(script: Path, *args: str, folder: Path, options: Sequence[str] = (), **more: Any) -> Any:
    """Run a Python script under dlprof; its process must end well."""
    done = launch(wrapped(folder, [sys.executable, script, *args], *options), script.parent, **more)
    assert done.returncode == 0, done.stderr
    return done


def free_port() -> str:
    """Return a port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def until(ready: Callable[[], Any]) -> bool:
    """Wait for something that another process does; False if it never does."""
    deadline = time.monotonic() + 90
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def children(pid: int) -> list[int]:
    """List the processes that a process has started."""
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def words(pid: int) -> str:
    """Return the command line of a process; "" where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def running(script: Path) -> list[int]:
    """List the processes that a script is named to, as that which they run or launch."""
    return [pid for p in Path("/proc").glob("[0-9]*") if str(script) in words(pid := int(p.name))]


def state(pid: int) -> str:
    """Return the kernel's letter for what a process does: S, it waits; T, it is stopped; Z, it has ended."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def only_child(pid: int) -> int:
    """Return process of a recorded command: the supervisor's others are the samplers' and the witness of signals."""
    (child,) = (c for c in children(pid) if "samplers/__main__.py" not in words(c) and "sigwaitinfo" not in words(c))
    return child


def witnessed(pid: int) -> bool:
    """Return whether the witness of signals is up and waits."""
    return any("sigwaitinfo" in words(child) and state(child) == "S" for child in children(pid))


def in_its_own_group(command: Sequence[str]) -> subprocess.Popen[str]:
    """Start a command that dlprof wraps, and wait until it is ready to be signalled, and the witness too."""
    process = subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    # It is up as soon as it waits.
    assert until(partial(witnessed, process.pid))
    return process


def rows(rank: Path) -> list[dict[str, Any]]:
    """Return the lines of a rank's light layer."""
    return [json.loads(line) for line in (rank / "steps.jsonl").read_text().splitlines()]


def facts(rank: Path) -> Any:
    """Return what a rank said about itself."""
    return json.loads((rank / "facts.json").read_text())
