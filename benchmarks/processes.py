"""Runs a command as a user would, and tells how long it took and how much memory its processes held at once."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median


def _environment(more: Mapping[str, str] | None) -> dict[str, str]:
    """Return this process's environment and more: with bytecode and compiled templates kept, as an installation has."""
    return {**{k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}, **(more or {})}


def seconds(command: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | None = None) -> float:
    """Run a command to its end and give its wall time; raise CalledProcessError with its output where it fails."""
    begin = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=_environment(env), cwd=cwd)
    return time.perf_counter() - begin


@dataclass(frozen=True)
class Ran:
    """What a command took: wall time, the lines of its standard error and when each came, s, and its memory, bytes.

    `together`: the most that it and its descendants held at once, as proportional set size, so that pages which a
    forked process shares count once. `largest`: the most of any one of them, shared pages and all. Looked at every
    30 ms.
    """

    seconds: float
    lines: tuple[tuple[float, str], ...]
    together: int
    largest: int


def run(command: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Ran:
    """Run a command to its end and measure it; raise CalledProcessError with its output where it fails."""
    together = largest = 0
    begin = time.perf_counter()
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(env),
        cwd=cwd,
    ) as process:
        lines: list[tuple[float, str]] = []
        errors = process.stderr
        assert errors is not None

        def read() -> None:
            lines.extend((time.perf_counter() - begin, line) for line in errors)

        reading = threading.Thread(target=read, daemon=True)
        reading.start()
        while process.poll() is None:
            held = [_held(pid) for pid in _tree(process.pid)]
            together = max(together, sum(pss for pss, _ in held))
            largest = max(largest, *(rss for _, rss in held))
            time.sleep(0.03)
        took = time.perf_counter() - begin
        reading.join()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, list(command), stderr="".join(x for _, x in lines))
    return Ran(took, tuple(lines), together, largest)


def peak_bytes(command: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | None = None) -> int:
    """Run a command and give the most memory that it and its descendants held at once."""
    return run(command, env, cwd).together


def in_turn(rounds: int, *commands: tuple[Sequence[str], Mapping[str, str] | None]) -> list[list[float]]:
    """Time several commands in turn, A B A B …, so that a machine whose speed drifts treats them alike."""
    times: list[list[float]] = [[] for _ in commands]
    for _ in range(rounds):
        for mine, (command, env) in zip(times, commands, strict=True):
            mine.append(seconds(command, env))
    return times


def ratio(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, least and greatest of a ÷ b, pair by pair."""
    pairs = [x / y for x, y in zip(a, b, strict=True)]
    return median(pairs), min(pairs), max(pairs)


def _tree(pid: int) -> list[int]:
    pids, todo = [], [pid]
    while todo:
        one = todo.pop()
        pids.append(one)
        try:
            for task in Path(f"/proc/{one}/task").iterdir():
                todo += [int(c) for c in (task / "children").read_text().split()]
        except OSError:
            continue
    return pids


def _held(pid: int) -> tuple[int, int]:
    """Return the proportional and the resident set size of a process, bytes."""
    found = {"Pss": 0, "Rss": 0}
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in found:
                found[name] = int(rest.split()[0]) << 10
    except (OSError, ValueError):
        pass
    return found["Pss"], found["Rss"]
