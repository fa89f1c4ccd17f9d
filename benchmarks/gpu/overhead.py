"""What recording adds to the step of a job that keeps its GPU busy, and whether it waits for the GPU by itself."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.gpu import timing
from benchmarks.gpu.bench import SCRIPTS, WORKLOADS, Bench, Changes
from benchmarks.gpu.jobs import Ended, environment, must, python
from benchmarks.gpu.outcome import Part, above, below, holds, same, skipped

SCRIPT = WORKLOADS / "amp_transformer.py"
SHIM = Path(__file__).parent / "syncs.c"

LIGHT = ("--no-trace", "--no-sample", "--stacks", "off", "--flops", "off")
WAYS: Mapping[str, tuple[str, ...] | None] = {"plain": None, "light": LIGHT, "all": ()}
LIMITS = {"light": 0.01, "all": 0.02}

# The window is over by then, and the FLOPs are counted: what those steps cost is told in every report, and is no part
# of what all other steps pay.
AFTER_STEP = 40
MOST_ROUNDS = 4

# Whose calls are counted: what they do is the same in a small model.
_SMALL = ("--layers", "4", "--width", "256", "--heads", "4", "--length", "128", "--batch-size", "8")
_REHEARSED = ("--layers", "2", "--width", "64", "--length", "32", "--batch-size", "4")

# Of the calls that are seen, those that must be as many with dlprof as without.
_WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")
_COMPARED = (*_WAITS, "cudaMemcpy", "cudaMemcpyAsync")
_CALL = re.compile(r"^(\d+\.\d+) (\w+)$")


def step(bench: Bench) -> None:
    """Run the job plain, with the step log alone, and with all sources, in turn; at least two rounds.

    All of them begin at once and import, while nothing is timed; each then waits for its turn.
    """
    args: Sequence[str] = ("--device", bench.device, "--steps", "160", "--log-every", "10", *bench.pick((), _REHEARSED))
    ways, rounds = list(WAYS), bench.pick(MOST_ROUNDS, 1)
    runs = [(way, f"{way}-{n}") for n in range(rounds) for way in ways[n % len(ways) :] + ways[: n % len(ways)]]
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    longest = 0.0
    with ThreadPoolExecutor(len(runs)) as pool:
        ends = [pool.submit(run, bench, way, name, args, turn=bench.work / f"{name}.turn") for way, name in runs]
        try:
            while not all(
                (bench.work / f"{name}.turn.ready").exists() or end.done()
                for end, (_, name) in zip(ends, runs, strict=True)
            ):
                time.sleep(0.05)
            for n, (end, (way, name)) in enumerate(zip(ends, runs, strict=True)):
                if n >= 2 * len(ways) and n % len(ways) == 0 and bench.left_s < 1.2 * len(ways) * longest:
                    break
                began = time.monotonic()
                (bench.work / f"{name}.turn.go").touch()
                times[way].append(timing.step_ms_of_lines(end.result().lines, AFTER_STEP))
                print(f"  {name}: {times[way][-1]:.3f} ms", flush=True)
                longest = max(longest, time.monotonic() - began)
        finally:
            for _, name in runs:
                if not (go := bench.work / f"{name}.turn.go").exists():
                    go.write_text("no time left")
    bench.add(*of_times(times))
    places = f"{Path(sys.executable).parent}{os.pathsep}{environment(os.environ)['PATH']}"  # as dlprof looks for it
    if shutil.which("py-spy", path=places) is None:
        bench.add(skipped("with Python's stacks", "py-spy is not installed: all sources are all but the stacks"))


def of_times(times: Mapping[str, Sequence[float]]) -> list[Part]:
    """Judge what recording adds, from the mean steps of runs made in turn; the plain runs tell how far two differ."""
    plain = times["plain"]
    spread = max(plain) / min(plain) - 1 if len(plain) > 1 else float("nan")
    parts = []
    for way, limit in LIMITS.items():
        added, least, most = timing.ratio(list(zip(times[way], plain, strict=False)))
        how = (
            f"by the lines that the job prints; {least - 1:+.2%} to {most - 1:+.2%} in {len(plain)} rounds, between"
            f" whose plain runs lie {spread:.2%}"
        )
        parts.append(below(f"{way} adds", added - 1, limit, unit="share", how=how))
    return parts


def calls(bench: Bench) -> None:
    """Count the calls that wait for the GPU, or copy, in the same steps of the three jobs."""
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if compiler is None:
        bench.add(skipped("synchronising calls", "no C compiler here to build what counts them"))
        return
    shim = build(bench, compiler)
    small = bench.pick(
        ("--layers", "4", "--width", "256", "--heads", "4", "--length", "128", "--batch-size", "8"), _REHEARSED
    )
    args = ("--device", bench.device, "--steps", "100", "--log-every", "20", *small)
    counts: dict[str, Counter[str]] = {}
    for way in WAYS:
        log = bench.work / f"{way}.calls"
        ended = run(bench, way, f"calls-{way}", args, {"LD_PRELOAD": str(shim), "SYNCS_FILE": str(log)})
        counts[way] = between_lines(log.read_text() if log.exists() else "", ended, AFTER_STEP, 80)
        print(f"  {way}: {dict(counts[way])}", flush=True)
    if bench.rehearsal:
        bench.add(holds("what counts the calls is built, and the job runs with it", True, ""))
    # The loss is read at the steps 60 and 80 in between.
    bench.add(*of_calls(counts, reads=2))


def build(bench: Bench, compiler: str) -> Path:
    """Compile what counts the calls."""
    shim = bench.work / "syncs.so"
    must("the compiler", bench.run([compiler, "-shared", "-fPIC", "-O2", "-o", shim, SHIM, "-ldl", "-lpthread"]))
    return shim


def between_lines(log: str, ended: Ended, first: int, last: int) -> Counter[str]:
    """Count the calls between the reads of the loss whose lines a job printed for the steps `first` and `last`.

    Such a read is the last wait before its line came; both times are CLOCK_MONOTONIC. By the line's own time, calls of
    the next step would fall on either side. The first read is not counted, the last one is. Raises ValueError where the
    job did not print both lines, or did not wait before them.
    """
    calls = [(float(m.group(1)), m.group(2)) for text in log.splitlines() if (m := _CALL.match(text))]
    at = dict(timing.step_times(ended.lines))
    bounds = []
    for number in (first, last):
        if number not in at:
            raise ValueError(f"the job printed no line of step {number}")
        waits = [when for when, name in calls if name in _WAITS and when <= at[number]]
        if not waits and calls:
            raise ValueError(f"the job did not wait for its GPU before its line of step {number}")
        bounds.append(max(waits, default=0.0))
    return Counter(name for when, name in calls if bounds[0] < when <= bounds[1])


def of_calls(counts: Mapping[str, Counter[str]], reads: int) -> list[Part]:
    """Judge the calls: as many of each with dlprof as without. The plain job must show its own reads at least."""
    plain = counts["plain"]
    waits = sum(plain[name] for name in _WAITS)
    if not waits:
        return [
            skipped("synchronising calls", "this torch does not call a shared libcudart: none of its calls is seen")
        ]
    parts = [above("calls that are seen", waits, reads - 1, unit="", how=f"the job reads its loss {reads} times")]
    for way in LIMITS:
        said = {name: counts[way][name] for name in _COMPARED}
        true = {name: plain[name] for name in _COMPARED}
        parts.append(same(f"{way}: calls", _told(said), _told(true), how="counted below PyTorch, without dlprof"))
    asked = {way: counts[way]["cudaMalloc"] + counts[way]["cudaFree"] for way in counts}
    more = [way for way in LIMITS if asked[way] > asked["plain"]]
    parts.append(holds("no memory taken from the GPU or given back", not more, f"cudaMalloc and cudaFree: {asked}"))
    return parts


def run(
    bench: Bench, way: str, name: str, args: Sequence[str], changes: Changes = None, turn: Path | None = None
) -> Ended:
    """Run the job one way, and return how it ended; with `turn` it waits for the file of this name and .go."""
    words = python(SCRIPT, *args) if turn is None else python(SCRIPTS / "waits.py", turn, SCRIPT, *args)
    limit_s = 60.0 if turn is None else 3600.0
    options = WAYS[way]
    if options is None:
        return must(f"{name}: the plain job", bench.run(words, limit_s, changes))
    folder, ended = bench.record(name, words, *options, limit_s=limit_s, changes=changes)
    must(f"{name}: the job under dlprof", ended)
    shutil.rmtree(folder, ignore_errors=True)
    return ended


def _told(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in counts.items())
