"""What the diagnosis is worth: every planted fault recorded in turn with the healthy run of the same workload.

Of each fault: whether its rule found it, what was found beside it, and how near the predicted step without it came to
the measured step without it: that of the healthy runs before and after, for a machine that grows slower meanwhile
would count against the prediction. Of each healthy run: what was found that is not there. What the workloads can plant,
under which options they are healthy too, and which options a fault needs is read from their files (FAULTS, HEALTHY,
SHOWN_WITH); what this machine cannot show is left out with the workload's own word.

Writes accuracy.json and README.md into --out, after every recording. What is there already is kept, that of other
machines too, and only what is missing is recorded: it may be stopped at any time, and go on later. What --keep left can
be diagnosed anew with --kept, as to see what another estimator makes of the same recordings:

    python -m benchmarks.accuracy --rounds 1 --seconds 25 --keep /tmp/runs --out /tmp/before
    python -m benchmarks.accuracy --kept /tmp/runs --out /tmp/after
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks import summary
from benchmarks.summary import NEAR_S, NOTABLE_SHARE, REPORTS, Recorded
from dlprof.commands.run import constant, count_gpus

WORKLOADS = Path(__file__).parent.parent / "workloads"

# A recording takes half a minute. One that takes so long hangs.
LONGEST_S = 600

# With --seconds, no recording has fewer steps: what comes every tenth step is then still seen several times.
LEAST_STEPS = 60

# Beside a run that is kept: what was made of it.
ROW = "accuracy.json"


@dataclass(frozen=True)
class Planted:
    """One thing to record: a workload and its options, healthy (no `rule`) or with a fault that `rule` must find."""

    workload: str
    name: str
    rule: str
    fault: str = ""
    options: tuple[str, ...] = ()


def planted(script: Path) -> tuple[list[Planted], list[Planted]]:
    """List what to record of a workload: its healthy runs, the plain one first, and its faults."""
    name = script.stem
    healthy = [Planted(name, "healthy", "")]
    healthy += [
        Planted(name, f"healthy, {options}", "", options=tuple(shlex.split(options)))
        for options in (constant(script, "HEALTHY") or {}).values()
    ]
    shown = constant(script, "SHOWN_WITH") or {}
    faults = constant(script, "FAULTS") or {}
    return healthy, [Planted(name, f, rule, f, tuple(shlex.split(shown.get(f, "")))) for f, rule in faults.items()]


def without(one: Planted) -> Planted:
    """Return what a faulty run is compared with: same without the fault. With options, nobody calls that healthy."""
    name = f"no fault, {shlex.join(one.options)}" if one.options else "healthy"
    return Planted(one.workload, name, "", options=one.options)


def compared(rows: Sequence[Recorded]) -> list[Recorded]:
    """Return rows, of each faulty one the healthy step at its time: between those of the runs before and after it."""
    partner = {(o.workload, o.name): without(o).name for p in WORKLOADS.glob("*.py") for o in planted(p)[1]}
    steps: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for r in rows:
        if r.at and r.step_ns and not r.rule:
            steps.setdefault((r.machine, r.workload, r.name), []).append((r.at, r.step_ns))
    out = []
    for r in rows:
        same = steps.get((r.machine, r.workload, partner.get((r.workload, r.name), "")), [])
        before = max(((at, ns) for at, ns in same if 0 <= r.at - at < NEAR_S), default=None)
        after = min(((at, ns) for at, ns in same if 0 < at - r.at < NEAR_S), default=None)
        known = [one for one in (before, after) if one]
        if r.rule and r.at and r.step_ns and known:
            r = replace(r, healthy_ns=float(np.interp(r.at, [at for at, _ in known], [ns for _, ns in known])))
        out.append(r)
    return out


def machine() -> str:
    """Name what this machine trains on, as "1 × NVIDIA H200" or "2 CPU cores"."""
    if gpus := count_gpus():
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        said = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True)
        return f"{gpus} × {said.stdout.splitlines()[0].strip()}"
    return f"{len(os.sched_getaffinity(0))} CPU cores"


def run(command: Sequence[str], folder: Path) -> tuple[int, str]:
    """Run a command in a folder; give its exit code and stderr. One that hangs is ended, and that is what it said."""
    # A group of its own: whatever it has started ends with it.
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            _, said = process.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks first
            try:
                process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            return 1, f"error: ended after {LONGEST_S} s\n"
    return process.returncode, said


def record(one: Planted, here: str, number: int, folder: Path, out: Path, steps: int) -> Recorded:
    """Record one of them into `out`, in a folder whose data outlasts it, and give what was diagnosed."""
    now = datetime.datetime.now()
    row = Recorded(one.workload, one.name, one.rule, here, now.date().isoformat(), number, at=now.timestamp())
    script = WORKLOADS / f"{one.workload}.py"
    fault = ["--fault", one.fault] if one.fault else []
    command = [sys.executable, "-m", "dlprof", "run", str(script), "--quiet", "-o", str(out), *fault]
    code, words = run([*command, "--", "--steps", str(steps), *one.options], folder)
    return diagnosed(row, out, code, words)


def reason(words: str, code: int) -> str:
    """Return line of a failed run's stderr that tells most: a wrong use, else what is missing, else an exception."""
    lines = words.splitlines()
    for mark in ("error:", " needs ", "Error: "):
        for line in lines:
            if mark in line:
                return line.split("error:")[-1].strip()
    return lines[0].strip() if lines else f"exit code {code}"


def diagnosed(row: Recorded, out: Path, code: int, words: str) -> Recorded:
    """Return a row with what the diagnosis of a run says, or what was said where there is none."""
    if code or not (out / "result.json").exists():
        return replace(row, said=reason(words, code))
    result = json.loads((out / "result.json").read_text())
    if result["window"] is None:
        return replace(row, said="no steady step was recorded")
    step = result["window"]["step_ns"]
    outcomes = result["outcomes"]
    ours = next((o for o in outcomes if o["id"] == row.rule), None)
    return replace(
        row,
        step_ns=step,
        found=tuple(
            (o["id"], o["share"], step - o["saving_ns"] if o["scope"] == "step" else None)
            for o in outcomes
            if o["state"] == "found" and (o["id"] == row.rule or not _other_numbers(o))
        ),
        said="" if ours is None or ours["state"] == "found" else ours["why"] or ours["summary"],
        torch=result["run"]["torch"],
        together=result.get("together"),
    )


def _other_numbers(outcome: Mapping[str, Any]) -> bool:
    """Return whether all that a finding advises makes the job compute other numbers, as bf16 does.

    The workloads compute in fp32 on purpose: on a CPU with units for bf16 that is true of every run, and no false
    alarm.
    """
    return bool(outcome["changes"]) and all(change["numerics"] for change in outcome["changes"])


def again(folder: Path) -> list[Recorded]:
    """Diagnose anew every run that is kept in a folder."""
    rows = []
    for file in sorted(folder.absolute().glob(f"*/{ROW}"), key=lambda f: f.parent.name.rpartition("-")[2]):
        was = msgspec.json.decode(file.read_bytes(), type=Recorded)
        code, words = run([sys.executable, "-m", "dlprof", "report", str(file.parent), "--quiet"], folder)
        at = int(file.parent.name.rpartition("-")[2]) / 1e9
        new = replace(was, at=at, step_ns=0.0, healthy_ns=0.0, found=(), said="", together=None)
        rows.append(diagnosed(new, file.parent, code, words))
        print(_line(rows[-1]), flush=True)
    return compared(rows)


def main() -> None:
    """Record what is missing, round after round, and write what came of it so far."""
    options = argparse.ArgumentParser(
        description=__doc__, prog="python -m benchmarks.accuracy", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--rounds", type=int, default=3, help="recordings of each fault (default: 3)")
    options.add_argument("--steps", type=int, default=120, help="of each recording (default: 120)")
    most = f"of training at most, by what steps took last: fewer of them, but {LEAST_STEPS} at least"
    options.add_argument("--seconds", type=float, help=most)
    options.add_argument("--workloads", nargs="*", help="only these, by name")
    options.add_argument("--only", nargs="*", metavar="FAULT", help="only these faults, beside the healthy runs")
    often = "also record the plain healthy run of each workload until it was recorded N times"
    options.add_argument("--healthy", type=int, default=0, metavar="N", help=often)
    options.add_argument("--again", action="store_true", help="drop what this machine has of these, and record it anew")
    options.add_argument("--minutes", type=float, help="start nothing after so long")
    options.add_argument("--keep", type=Path, metavar="DIR", help="keep the run folders in DIR")
    options.add_argument("--kept", type=Path, metavar="DIR", help="record nothing: diagnose anew what is kept in DIR")
    options.add_argument("--out", type=Path, default=REPORTS, help="default: reports")
    args = options.parse_args()
    scripts = [p for p in sorted(WORKLOADS.glob("*.py")) if not args.workloads or p.stem in args.workloads]
    known = {p.stem for p in WORKLOADS.glob("*.py")}
    if wrong := set(args.workloads or ()) - known:
        options.error(f"no workload {', '.join(sorted(wrong))}; there are: {', '.join(sorted(known))}")
    ends = time.monotonic() + 60 * args.minutes if args.minutes else float("inf")
    here = machine()
    args.out.mkdir(exist_ok=True)
    if args.kept is not None:
        rows = again(args.kept)
        anew = {(r.machine, r.workload, r.name, r.round) for r in rows}
        old = summary.recorded(args.out)
        summary.write(args.out, [*(r for r in old if (r.machine, r.workload, r.name, r.round) not in anew), *rows])
        return
    took = {
        (r.workload, r.name): r.step_ns
        for r in (*summary.recorded(REPORTS), *summary.recorded(args.out))
        if r.machine == here and r.step_ns
    }
    # Faults that no workload plants any more are forgotten.
    names = {(one.workload, one.name) for p in WORKLOADS.glob("*.py") for kind in planted(p) for one in kind}
    rows = [r for r in summary.recorded(args.out) if not r.rule or (r.workload, r.name) in names]
    if args.again:
        chosen = {p.stem for p in scripts}
        rows = [
            r
            for r in rows
            if r.machine != here or r.workload not in chosen or (args.only is not None and r.name not in args.only)
        ]

    def missing(one: Planted, number: int) -> bool:
        """Say whether this machine has not recorded it in this round, nor found in another that it cannot."""
        same = [r for r in rows if (r.machine, r.workload, r.name) == (here, one.workload, one.name)]
        return time.monotonic() < ends and not any(r.round == number or not r.step_ns for r in same)

    def steps(one: Planted) -> int:
        """Return how many steps to record: fewer of those that are known to take long."""
        step = took.get((one.workload, one.name))
        many = int(args.seconds * 1e9 / step) if args.seconds and step else args.steps
        return int(min(args.steps, max(LEAST_STEPS, many)))

    def made(one: Planted, number: int) -> Recorded:
        """Record one, and keep its run where that is asked for."""
        out = (args.keep or folder) / f"{one.workload}-{one.fault or 'healthy'}-{time.time_ns()}"
        row = record(one, here, number, folder, out.absolute(), steps(one))
        if args.keep and row.step_ns:
            (out / ROW).write_bytes(msgspec.json.encode(row))
        else:
            shutil.rmtree(out, ignore_errors=True)
        return row

    def add(row: Recorded) -> Recorded:
        rows.append(row)
        print(_line(row), flush=True)
        rows[:] = compared(rows)
        summary.write(args.out, rows)
        return row

    def wanted(one: Planted, number: int) -> bool:
        return (args.only is None or one.name in args.only) and missing(one, number)

    def in_turn(beside: Planted, faults: Sequence[Planted], number: int) -> None:
        """Record faults with a healthy run before every two of them, and after the last."""
        healthy, served = None, 0
        for one in faults:
            if not wanted(one, number):
                continue
            if healthy is None or served == 2:
                healthy, served = add(made(beside, number)), 0
            # Where a library is missing, say, there is nothing to try.
            row = made(one, number) if healthy.step_ns else replace(healthy, name=one.name, rule=one.rule)
            add(row)
            served += row.step_ns > 0
        if served and time.monotonic() < ends:
            add(made(beside, number))

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for number in range(args.rounds):
            for script in scripts:
                healthy, faults = planted(script)
                for beside in dict.fromkeys(map(without, faults)):
                    in_turn(beside, [one for one in faults if without(one) == beside], number)
                for one in healthy if args.only is None else []:
                    if missing(one, number):
                        add(made(one, number))
        for script in scripts:
            plain = planted(script)[0][0]
            while time.monotonic() < ends:
                same = [r for r in rows if (r.machine, r.workload, r.name) == (here, plain.workload, plain.name)]
                if len(same) >= args.healthy or not all(r.step_ns for r in same):
                    break
                add(made(plain, max(args.rounds, 1) - 1))
    summary.write(args.out, rows)
    mine = [r for r in rows if r.machine == here]
    false = sum(r.healthy and any(share >= NOTABLE_SHARE for _, share, _ in r.found) for r in mine)
    missed = sum(bool(r.rule and r.step_ns) and all(f[0] != r.rule for f in r.found) for r in mine)
    print(f"{len(mine)} recordings on {here}; {false} healthy with a finding of {NOTABLE_SHARE:.0%}, {missed} missed")


def _line(row: Recorded) -> str:
    if not row.step_ns:
        return f"{row.workload} {row.name}: not run: {row.said}"
    found = ", ".join(f"{i} {share:.1%}" for i, share, _ in row.found) or "nothing found"
    return f"{row.workload} {row.name}: {row.step_ns / 1e6:.1f} ms, {found}{f' ({row.said})' if row.said else ''}"


if __name__ == "__main__":
    main()
