"""`dlprof report` on one trace of a gigabyte, plain and packed: on all cores against one, in the same run.

The trace is made from a real one by repeating its events, as in report.py. What one core takes is measured with
`--jobs 1`; `--old` names a checkout of an earlier dlprof, which then takes its turn too. The machine should be quiet.
"""

from __future__ import annotations

import argparse
import gzip
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.processes import peak_bytes, ratio
from benchmarks.report import TRACE, write

MEGABYTES = 970  # 1.0 GB and 4.2 million events, of which 2.8 million become rows

Run = tuple[Sequence[str], Mapping[str, str]]


def timed(command: Sequence[str], env: Mapping[str, str]) -> tuple[float, float]:
    """Run a command; give its wall time, and the CPU time of all its processes, in seconds."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **env})
    wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compared(rounds: int, runs: Mapping[str, Run]) -> None:
    """Take each run in turn, and print the first one's times and how they stand to the others'."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(timed(*run))
    first = next(iter(runs))
    for name, of in times.items():
        wall, cpu = [w for w, _ in of], [c for _, c in of]
        share, least, most = ratio([w for w, _ in times[first]], wall)
        memory = peak_bytes(*runs[name]) / 1e6
        against = "" if name == first else f"   {first} takes {share:.2f} of it ({least:.2f} to {most:.2f})"
        print(f"{name:22}{median(wall):6.2f} s, {median(cpu):6.2f} s of CPU, {memory:5.0f} MB{against}", flush=True)


def main() -> None:
    """Make the trace, time what reads it, and print the ratios."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--trace", type=Path, default=TRACE, help="a real torch-profiler trace to repeat")
    options.add_argument("--megabytes", type=int, default=MEGABYTES)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--old", type=Path, help="a checkout of an earlier dlprof to compare with")
    args = options.parse_args()
    if not args.trace.exists():
        print(f"big_trace: left out, needs {args.trace} (--trace)")
        return
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "rank0.json"
        events = write(args.trace, path, args.megabytes)
        packed = path.with_suffix(".json.gz")
        with path.open("rb") as plain, gzip.open(packed, "wb", compresslevel=6) as file:
            shutil.copyfileobj(plain, file, 1 << 20)
        size, cores = path.stat().st_size / 1e9, len(os.sched_getaffinity(0))
        print(
            f"{size:.2f} GB, {packed.stat().st_size / 1e6:.0f} MB packed, {events:,} events, {cores} cores", flush=True
        )
        for kind, trace in (("plain", path), ("packed", packed)):
            command = [sys.executable, "-P", "-m", "dlprof", "report", str(trace), "--quiet", "-o", f"{temporary}/out"]
            runs: dict[str, Run] = {kind: (command, {}), f"{kind}, --jobs 1": ([*command, "--jobs", "1"], {})}
            if args.old:
                runs[f"{kind}, earlier"] = (command, {"PYTHONPATH": str(args.old)})
            compared(args.rounds, runs)


if __name__ == "__main__":
    main()
