"""The first line of a report, on scripts with one mistake each: plain and fixed, by their own clock, and recorded.

Importing torch and its libraries, and a first step, take longer than training these scripts. So the runs begin at once,
while nothing is timed; each then waits until it is its turn, and trains alone: the plain ones come so far as their
clock's first step before, those that are recorded, or need much of the GPU's memory, up to training. A run's end, which
writes what was recorded, may fall into the first steps of the next.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.gpu import judges, timing
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.cases import CASES, FOLDER, Case
from benchmarks.gpu.jobs import Ended, JobFailedError, how, python, tail
from benchmarks.gpu.judges import Recording
from benchmarks.gpu.outcome import Part, holds, named, skipped

# Runs that begin at once: 30 of them took 29 s to import on 16 cores.
_AT_ONCE = 34

# What a script takes at least: three runs, its share of importing, and its report. Where the time that is left allows
# so much for each script that is left, it runs twice each way, and its fixed variant is recorded, too.
_LEAST_S, _ALL_S = 14.0, 30.0

# With less than this left no run begins, and with less than that no report.
_RUN_S, _REPORT_S = 20.0, 10.0

# So long all of them may import.
_IMPORT_S = 90.0

_KEEPERS = 3  # processes that scrub recordings while others are made


@dataclass(frozen=True)
class _Run:
    """One run of a script: its ways, and the file by whose siblings it is told to go on."""

    case: Case
    fixed: bool
    recorded: bool
    start: Path

    @property
    def folder(self) -> Path:
        """The run's folder, where it is recorded."""
        return self.start.with_suffix("")


@dataclass
class _Seen:
    """What the runs of a script gave."""

    plain_ms: list[float] = field(default_factory=list)
    fixed_ms: list[float] = field(default_factory=list)
    recorded: list[_Run] = field(default_factory=list)
    broken: list[Part] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether both variants were timed."""
        return bool(self.plain_ms and self.fixed_ms)


def first_lines(bench: Bench) -> None:
    """Time each script plain and fixed, record it, and judge the first cure that the report names."""
    known = {case.script: case for case in CASES}
    left = [known[script] for script in bench.scripts or known]
    for case in left:
        if missing := [name for name in case.needs if importlib.util.find_spec(name) is None]:
            bench.add(skipped(f"{case.script}: gain", f"needs {', '.join(missing)}, which is not here"))
    left = [case for case in left if all(importlib.util.find_spec(name) for name in case.needs)]
    while left:
        if bench.left_s < _LEAST_S + _RUN_S:
            bench.add(*(skipped(f"{case.script}: gain", "no time left") for case in left))
            return
        whole = bench.rehearsal or bench.left_s / len(left) >= _ALL_S
        rounds = bench.pick(2, 1) if whole else 1
        runs: list[_Run] = []
        while left and (not runs or len(runs) + 2 * rounds + 1 + whole <= bench.pick(_AT_ONCE, 1)):
            runs += _runs(bench, left.pop(0), rounds, whole)
        _judge(bench, _made(bench, runs))


def _runs(bench: Bench, case: Case, rounds: int, whole: bool) -> list[_Run]:
    """List the runs of a script: plain and fixed ones in turn, unless an earlier call has timed it, and recorded."""
    ways = [] if case.script in bench.measured else [(False, False), (True, False)] * rounds
    runs = []
    for n, (fixed, recorded) in enumerate([*ways, (False, True), *[(True, True)] * whole]):
        name = f"{case.script}{'-fixed' if fixed else ''}{'' if recorded else f'-{n}'}"
        runs.append(_Run(case, fixed, recorded, bench.work / f"{name}.start"))
    return runs


def _made(bench: Bench, runs: Sequence[_Run]) -> dict[Case, _Seen]:
    """Make these runs, keep what was recorded, and return what each script gave."""
    seen = {run.case: _Seen() for run in runs}
    for case, one in seen.items():
        for ms, known in zip(bench.measured.get(case.script, ()), (one.plain_ms, one.fixed_ms), strict=False):
            known.append(ms)
    kept: dict[str, Future[None]] = {}

    def note(run: _Run, ended: Ended) -> None:
        one = seen[run.case]
        _note(run, ended, one)
        if run in one.recorded and one.complete:
            name, oracle = f"advice-{run.folder.name}", oracle_of(run.case, one.plain_ms, one.fixed_ms)
            kept[name] = bench.keep_beside(keepers, name, run.folder, _judge_of(run), oracle)

    left = sorted(runs, key=lambda run: run.recorded)
    with ProcessPoolExecutor(_KEEPERS, multiprocessing.get_context("spawn")) as keepers, _begun(bench, runs) as ends:
        for run in tuple(left):
            run.start.with_suffix(".start.go").write_text("" if bench.left_s > _RUN_S else "no time left")
            while not (ends[run].done() or run.start.with_suffix(".start.done").exists()):
                time.sleep(0.02)
            while left and ends[left[0]].done():
                note(left[0], ends[left.pop(0)].result())
        for run in left:
            note(run, ends[run].result())
    for name, future in kept.items():
        if error := future.exception():
            print(f"  not kept: {name}: {error}", flush=True)
    return seen


@contextmanager
def _begun(bench: Bench, runs: Sequence[_Run]) -> Iterator[dict[_Run, Future[Ended]]]:
    """Begin all runs, wait until each has come to where it waits, or has ended, and yield how each will end."""
    with ThreadPoolExecutor(len(runs)) as pool:
        ends = {run: pool.submit(_start, bench, run) for run in runs}
        until = time.monotonic() + min(_IMPORT_S, bench.left_s)
        while time.monotonic() < until:
            if all(end.done() or run.start.with_suffix(".start.ready").exists() for run, end in ends.items()):
                break
            time.sleep(0.05)
        try:
            yield ends
        finally:
            for run in runs:
                if not (go := run.start.with_suffix(".start.go")).exists():
                    go.write_text("no time left")


def _start(bench: Bench, run: _Run) -> Ended:
    words = python(FOLDER / f"{run.case.script}.py", "--device", bench.device)
    words += ["--fixed"] * run.fixed + bench.pick([], ["--tiny", "--steps", "40"])
    changes = {"START": str(run.start)}
    if not run.recorded:
        warm = {} if run.case.large else {"START_WARM": "1"}
        return bench.run(words, limit_s=3600.0, changes=changes | warm)
    return bench.record(run.folder.name, words, limit_s=3600.0, changes=changes)[1]


def _note(run: _Run, ended: Ended, seen: _Seen) -> None:
    """Keep what a run gave."""
    name = f"{run.start.stem}{' recorded' if run.recorded else ''}"
    step = timing.step_ms_said(ended.lines)
    print(f"  {name}: exit code {ended.code}, a step of {step} ms", flush=True)
    if ended.code != 0 or step is None:
        why = how(ended) if ended.code != 0 else "it printed no step"
        seen.broken.append(holds(f"{run.case.script}: gain", False, f"{name}: {why}"))
        print(tail(ended), flush=True)
    elif run.recorded:
        seen.recorded.append(run)
    else:
        (seen.fixed_ms if run.fixed else seen.plain_ms).append(step)


def _judge(bench: Bench, seen: dict[Case, _Seen]) -> None:
    """Report on each recording and judge it, as far as there is time for that."""
    runs = [run for one in seen.values() if one.complete for run in one.recorded]
    in_time = bench.left_s > _REPORT_S
    reports = dict(zip(runs, bench.tried_reports([run.folder for run in runs]) if in_time else [], strict=False))
    for case, one in seen.items():
        bench.add(*one.broken, anywhere=True)
        for run in one.recorded if one.complete else ():
            said, oracle = reports.get(run), oracle_of(case, one.plain_ms, one.fixed_ms)
            if said is None:
                bench.add(skipped(f"{case.script}: report", "no time left: the recording is judged where it comes to"))
            elif isinstance(said, JobFailedError):
                bench.add(holds(f"{case.script}: report", False, str(said)), anywhere=True)
                print(said.tail, flush=True)
            else:
                judge = judges.JUDGES[_judge_of(run)]
                bench.add(*named(case.script, judge(Recording(run.folder, said, oracle))))


def _judge_of(run: _Run) -> str:
    return "remedied" if run.fixed else "advice"


def oracle_of(case: Case, plain_ms: Sequence[float], fixed_ms: Sequence[float]) -> dict[str, Any]:
    """Return what a report is judged by: the steps that both variants took, and what it must say of the first."""
    return {
        "plain_ms": fmean(plain_ms),
        "fixed_ms": fmean(fixed_ms),
        "runs": len(plain_ms),
        "change": case.change,
        "rules": list(case.rules),
        "lines": case.lines,
        "remedy": list(case.remedy),
        "promised": case.promised,
        **({"together": True} if case.together else {}),
    }
