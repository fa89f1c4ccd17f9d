"""The three ways to read many ranks, with 1, 2 and 4 processes each: from process start to written report.

The traces are those of `benchmarks.scale`. Each way starts with nothing known of any rank, and all must give
the same result. Beside the seconds stands the CPU time of all processes: on a machine that others use it is what
repeats. More processes than cores can only show what they cost.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import scale

RANKS, STEPS = scale.RANKS, scale.STEPS
PROCESSES = (1, 2, 4)


def dlprof(*words: object) -> list[str]:
    """Return the command line of a command of dlprof."""
    return [sys.executable, "-m", "dlprof", *map(str, words)]


def by_processes(traces: Path, n: int, out: Path) -> list[list[str]]:
    """Return the command that reads the ranks in processes of its own."""
    return [dlprof("report", traces, "--jobs", n, "--quiet", "-o", out)]


def by_dask(traces: Path, n: int, out: Path) -> list[list[str]]:
    """Return the command that reads the ranks on workers of Dask."""
    return [dlprof("report", traces, "--dask", f"local:{n}", "--cache", out / "kept", "--quiet", "-o", out)]


def by_shards(traces: Path, n: int, out: Path) -> list[list[str]]:
    """Return the commands that read a share of the ranks each, side by side, and then the one of the report."""
    shards = [dlprof("report", traces, "--shard", f"{k}/{n}", "--cache", out / "kept", "--quiet") for k in range(n)]
    return [*shards, dlprof("report", traces, "--cache", out / "kept", "--quiet", "-o", out)]


WAYS: dict[str, Callable[[Path, int, Path], list[list[str]]]] = {
    "processes": by_processes,
    "dask": by_dask,
    "shards": by_shards,
}


def timed(commands: Sequence[list[str]]) -> tuple[float, float]:
    """Run all commands but the last at once, then the last; return the seconds, and those of CPU time of them all."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    running = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands[:-1]]
    for process in running:
        if process.wait():
            raise subprocess.CalledProcessError(process.returncode, process.args)
    subprocess.run(commands[-1], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, cpu


def measured(traces: Path, ways: Sequence[str], processes: Sequence[int], rounds: int) -> Iterator[dict[str, Any]]:
    """Time the ways in turn, A B A B …; return a row for each way and number of processes."""
    asked = [(way, n) for way in ways for n in processes]
    took: dict[tuple[str, int], list[tuple[float, float]]] = {one: [] for one in asked}
    results = set()
    for _ in range(rounds):
        for way, n in asked:
            with tempfile.TemporaryDirectory() as out:
                took[way, n].append(timed(WAYS[way](traces, n, Path(out))))
                results.add((Path(out) / "result.json").read_text())
    first = median(seconds for seconds, _ in took[asked[0]])
    for (way, n), times in took.items():
        seconds, cpu = (median(one[part] for one in times) for part in (0, 1))
        yield {"way": way, "processes": n, "s": seconds, "to_first": seconds / first, "cpu_s": cpu}
    yield {"same": len(results) == 1}


def main() -> None:
    """Make the traces, time the three ways, and print a table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--ranks", type=int, default=RANKS)
    options.add_argument("--steps", type=int, default=STEPS)
    options.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options.add_argument("--keep", type=Path, help="make the traces here and leave them")
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary) / "traces"
        if not folder.exists():
            folder.mkdir(parents=True)
            scale.make(folder, args.ranks, args.steps)
        size = sum(path.stat().st_size for path in folder.glob("*.gz")) / 1e6
        print(f"{args.ranks} ranks, {size:.0f} MB packed, {len(os.sched_getaffinity(0))} cores", flush=True)
        *rows, last = measured(folder, args.ways, PROCESSES, args.rounds)
        print(f"{'':<10} {'processes':>9} {'seconds':>8} {'÷ first':>8} {'CPU s':>7}")
        for row in rows:
            print(
                f"{row['way']:<10} {row['processes']:>9} {row['s']:>8.1f} {row['to_first']:>8.2f} {row['cpu_s']:>7.1f}"
            )
        print(f"all results {'are the same' if last['same'] else 'DIFFER'}")
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
