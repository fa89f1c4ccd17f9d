"""What dlprof says of a job while it runs: as it trains, started without dlprof, and while it waits for its device."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu import jobs, machine, reading
from benchmarks.gpu.bench import SCRIPTS, Bench
from benchmarks.gpu.jobs import Beside, JobFailedError, how, python
from benchmarks.gpu.live_judges import (
    UTILIZATION,
    Found,
    of_attach,
    of_blind,
    of_hang,
    of_injected,
    of_losses,
    of_ps,
    of_ps_gpu,
    of_refusal,
    of_top,
)
from benchmarks.gpu.outcome import above, holds, same, skipped
from benchmarks.gpu.rates import watched

SCRIPT = SCRIPTS / "live_job.py"
SETTLED, STUCK = 260, 60  # steps: the first window is over and the GPU sampled; the one that stands still
STUCK_S, STILL_S = 20.0, 11.0  # it does so for so long; dlprof calls that standing still from 10 s on
TRACED_S = 25.0  # that a second window may take from when it was agreed on
WINDOW = 5  # steps of the second trace
EVERY = 20  # steps, after which the job prints
LOOKS = 5  # at a process that waits for its device most of the time, until one finds it there


def looked_at(bench: Bench) -> None:
    """Look at a recorded job alone, as its step is timed; then also at a plain one and one that will stand still."""
    begin, stop, run, stuck = (bench.work / name for name in ("begin", "stop", "recorded", "stuck"))
    words = python(SCRIPT, "--device", bench.device, "--stop", stop)
    later = [*words, "--begin", str(begin)]
    stands = [*later, "--stuck", str(STUCK), "--stuck-s", str(STUCK_S)]
    started = {"recorded": _wrap(run, words), "plain": later, "stands still": _wrap(stuck, stands, "--hang", "6")}
    ours = {name: bench.beside(words) for name, words in started.items()}
    try:
        _add(bench, _safely("top", partial(_trains, bench, ours["recorded"], run)))
        # The window is agreed on before other jobs slow this one down: then it would open one by itself.
        asked = bench.dlprof("window", run, "--steps", str(WINDOW))
        bench.add(holds("window: the job answers", "as window 2." in asked.out, asked.out or how(asked)), anywhere=True)
        begin.touch()
        looks = {
            "window": partial(_traced, bench, run),
            "plain": partial(_plain, bench, ours["plain"]),
            "hang": partial(_stands, bench, ours["stands still"], stuck),
        }
        for found in bench.together(*(partial(_safely, name, look) for name, look in looks.items())):
            _add(bench, found)
    finally:
        begin.touch()
        stop.touch()
    for name, job in ours.items():
        bench.add(same(f"{name}: exit code", job.end().code, 0, how="told to stop by a file"), anywhere=True)
        if name != "plain":
            bench.add(of_losses(name, job.rows, ours["plain"].rows), anywhere=True)
    hangs = json.loads((stuck / "run.json").read_text()).get("hangs") or []
    bench.add(of_hang("wrap --hang", hangs[0] if hangs else {}, line_of_wait(), 5.0, 2 * STUCK_S), anywhere=True)


def _trains(bench: Bench, job: Beside, run: Path) -> Found:
    with watched(bench, (UTILIZATION,)) as used:
        job.until("step", SETTLED)
        text = bench.dlprof("top", run, "--once")
        told = bench.told("top", run)
    percents = [n for row in used[-8:] if (n := machine.number(row[UTILIZATION])) is not None]
    return of_top(text, told, median(row["step_s"] for row in job.rows[-4:]), percents)


def _traced(bench: Bench, run: Path) -> Found:
    window: Mapping[str, Any] = {}
    until = time.monotonic() + TRACED_S
    while window.get("state") != "exported" and time.monotonic() < until:
        time.sleep(0.2)
        window = next((w for w in reading.facts(run).get("windows") or () if w["number"] == 2), {})
    traces = sorted((run / "ranks" / "00000").glob("trace-2.json*"))
    kernels = reading.device_events(traces[0])["kernel"] if traces else None
    warnings = bench.report(run)["run"]["warnings"]
    again = bench.dlprof("report", run, "--window", "2", "--quiet")
    return [
        holds("window: its trace is written", bool(traces), str(window)),
        holds("report: says that it is so far", any("still runs" in text for text in warnings), str(warnings)),
        holds("report --window 2", again.code == 0, how(again)),
    ], [above("window: kernels", kernels, WINDOW, unit="", how="the job launches several a step")]


def _plain(bench: Bench, job: Beside) -> Found:
    pid = str(job.until("pid")["pid"])
    job.until("step", 2 * EVERY)
    attached = bench.dlprof("attach", pid, "--seconds", "5", "--format", "json")
    if why := of_blind(attached):
        return [skipped("ps, attach, inject", why)], []
    sure, figures = of_attach(attached, line_of_wait(), median([r["waits"] for r in job.rows if "waits" in r][-4:]))
    looks = [bench.told("ps")]
    while len(looks) < LOOKS and of_ps(looks, int(pid))[1].state != "passed":
        looks.append(bench.told("ps"))
    parts = [*sure, *of_ps(looks, int(pid))]
    figures = [*figures, of_ps_gpu(looks, int(pid))]
    inject = ("attach", pid, "--inject", "--seconds", "4", "-o", bench.work / "injected")
    itself = hasattr(sys, "remote_exec")  # PEP 768: without gdb
    if not itself:
        places = jobs.environment(os.environ)["PATH"].split(os.pathsep)
        without = os.pathsep.join(place for place in places if not Path(place, "gdb").exists())
        parts += of_refusal(bench.dlprof(*inject, changes={"PATH": without}), job.goes_on(2 * EVERY))
    if not itself and shutil.which("gdb") is None:
        return [*parts, skipped("inject", "neither gdb nor Python 3.14 is here")], figures
    ended = bench.dlprof(*inject)
    steps = reading.steps_counted(bench.work / "injected")
    parts += of_injected(ended, steps, job.goes_on(2 * EVERY))
    return parts, figures


def _stands(bench: Bench, job: Beside, run: Path) -> Found:
    job.until("stuck")
    time.sleep(STILL_S)
    said, told = bench.together(partial(bench.told, "hang", run), partial(bench.told, "top", run))
    top = same("top: it stands still", told["state"], "still", how="its last line")
    return [of_hang("hang", said, line_of_wait(), STILL_S - 2, 2 * STUCK_S), top], []


def line_of_wait() -> int:
    """Return the line of the script that waits for the device."""
    return next(n for n, text in enumerate(SCRIPT.read_text().splitlines(), 1) if text.endswith("# the wait"))


def _wrap(run: Path, words: Sequence[str], *options: str) -> list[str]:
    return python("-m", "dlprof", "wrap", "-o", run, "--quiet", "--no-report", *options, "--", *words)


def _add(bench: Bench, found: Found) -> None:
    bench.add(*found[0], anywhere=True)
    bench.add(*found[1])


def _safely(name: str, look: Callable[[], Found]) -> Found:
    """Return what a look found; where it failed, that: the others' findings stay."""
    try:
        return look()
    except (JobFailedError, OSError, ValueError, LookupError) as e:
        print(getattr(e, "tail", ""), flush=True)
        return [holds(name, False, f"{type(e).__name__}: {e}")], []
