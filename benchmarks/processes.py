"""Runs a command as a user would, and tells how long it took and how much memory its processes held at once."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median


def seconds(command: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | None = None) -> float:
    """Run a command to its end and give its wall time; raise CalledProcessError with its output where it fails."""
    begin = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **(env or {})}, cwd=cwd)
    return time.perf_counter() - begin


def peak_bytes(command: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | None = None) -> int:
    """Run a command and give the most memory that it and its descendants held at once.

    Proportional set size, so that pages which a forked process shares count once; looked at every 30 ms.
    """
    peak = 0
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, **(env or {})}, cwd=cwd
    ) as process:
        errors: list[bytes] = []
        assert process.stderr is not None
        reading = threading.Thread(target=lambda: errors.append(process.stderr.read()), daemon=True)  # type: ignore[union-attr]
        reading.start()
        while process.poll() is None:
            peak = max(peak, sum(_pss(pid) for pid in _tree(process.pid)))
            time.sleep(0.03)
        reading.join()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, list(command), stderr=b"".join(errors))
    return peak


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


def _pss(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    return 0
