"""dlprof proved on a real GPU: `make gpu`, or python -m benchmarks.gpu --out DIR.

Each check runs in a process of its own, alone, for its time at most; what hangs or breaks costs its own row. After each
check DIR holds all that is known: gpu.json, README.md, log.txt, and recordings-DEVICE-N.tar.gz, which become test data
where there is no GPU. Exits with 0 where every chosen check ran and passed, else with 1.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, TextIO

from benchmarks.gpu import cases, fixtures, jobs, machine, outcome, page
from benchmarks.gpu.bench import Bench, write
from benchmarks.gpu.checks import Check
from benchmarks.gpu.outcome import Row

FORMAT = 1

# Where the checks are listed.
CHECKS = "benchmarks.gpu.checks"

# Of the ten minutes of GPU.md: what starting and packing take is left.
MINUTES = 9.3

# A check that was asked to end has so long to write down what it found before it is ended.
_GRACE_S = 5.0


class Proof:
    """All checks of one call: what became of them so far, and the folder that says so."""

    def __init__(self, out: Path, work: Path, about: Mapping[str, Any], rehearsal: bool, log: TextIO) -> None:
        self.out, self.work, self.about, self.rehearsal = out, work, about, rehearsal
        self.source, self.commit = CHECKS, "not told"
        self.scripts: Sequence[str] = ()
        self.measured: Sequence[str] = ()
        self.rows: list[Row] = []
        self._log = log
        self._secrets = fixtures.secrets(about, work)
        self._began = self._written = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line, with the time since the beginning, and keep it in the log."""
        for line in text.splitlines():
            stamped = f"[{time.monotonic() - self._began:5.0f} s] {line}"
            print(stamped, flush=True)
            self._log.write(fixtures.scrub("log.txt", stamped, self._secrets) + "\n")
        self._log.flush()

    def run(self, check: Check, ends: float) -> Row:
        """Run a check, until `ends` (of time.monotonic()) at the latest, and write down what became of it."""
        limit = min(check.budget_s, ends - time.monotonic())
        if limit < check.least_s:
            row = Row(check.name, "skipped", f"no time left: it needs {check.least_s:.0f} s, and there are {limit:.0f}")
            self.say(f"{check.name}: not run: {row.why}")
            self.rows.append(row)
            self.write()
            return row
        self.say(f"{check.name}: {check.passes} ({limit:.0f} s at most)")
        folder = self.work / check.name
        folder.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        words = jobs.python("-m", "benchmarks.gpu", "--child", check.name, "--work", self.work)
        words += ["--checks", self.source]
        words += ["--ends", f"{began + limit:.3f}", *["--rehearse"] * self.rehearsal]
        words += ["--scripts", *self.scripts] if self.scripts else []
        words += ["--measured", *self.measured] if self.measured else []

        def hear(text: str) -> None:
            self.say(f"  {text}")
            if time.monotonic() > self._written + _GRACE_S:
                self.write(read_row(folder))

        self.rows.append(Row(check.name, "running"))
        self.write()
        ended = jobs.run(words, self.work, limit + _GRACE_S, hear=hear)
        row = judged(check.name, folder, ended)
        self.rows[-1] = outcome.Row(row.check, row.state, row.why, row.parts, time.monotonic() - began, _now())
        if row.state == "failed" and ended.code != 0:
            self.say(jobs.tail(ended))
        self.say(f"{check.name}: {row.state}{f': {row.why}' if row.why else ''}")
        self.write()
        return self.rows[-1]

    def write(self, running: Row | None = None) -> None:
        """Write all that is known so far; `running` is what a check that has not ended has found."""
        rows = [*self.rows[:-1], running] if running is not None else self.rows
        data = {
            "format": FORMAT,
            "rehearsal": self.rehearsal,
            "at": _now(),
            "commit": self.commit,
            "took_s": time.monotonic() - self._began,
            "machine": fixtures.about(self.about),
            "passes": {check.name: check.passes for check in checks_of(self.source)},
            "checks": [outcome.to_json(row) for row in rows],
        }
        # What failed may have said where.
        data = json.loads(fixtures.scrub("gpu.json", json.dumps(data, allow_nan=False), self._secrets))
        write(self.out / self._name("gpu.json"), data)
        archives: list[Path] = []
        if running is None:
            kept = sorted(self.work.glob("*/kept/*"))
            archives, left_out = fixtures.pack(kept, self.out, self._device())
            if left_out:
                self.say(f"not brought home, for want of room: {', '.join(left_out)}")
            page.write(self.out / self._name("README.md"), data, [path.name for path in archives])
        self._written = time.monotonic()

    def end(self) -> int:
        """Say what is left to say, and return the exit code."""
        for text in unchecked(self.rows):
            self.say(text)
        for row in self.rows:
            if row.state not in ("passed", "rehearsed"):
                self.say(f"{row.state.upper()} {row.check}: {row.why}")
        count = sum(row.state in ("passed", "rehearsed") for row in self.rows)
        what = "rehearsed; no figure of it is one of a GPU" if self.rehearsal else "passed"
        self.say(f"{count} of {len(self.rows)} checks {what}; {self.out / self._name('README.md')} tells all")
        return outcome.exit_code(self.rows)

    def _name(self, name: str) -> str:
        """Return a file's name: what was only rehearsed never lies under that of results."""
        return f"rehearsal-{name}" if self.rehearsal else name

    def _device(self) -> str:
        gpus = self.about["torch"]["gpus"]
        return "rehearsal cpu" if self.rehearsal or not gpus else str(gpus[0]["name"])


def unchecked(rows: Sequence[Row]) -> list[str]:
    """List what checks left out, a line for each reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for part in row.parts:
            if part.state == "skipped":
                found.setdefault((row.check, part.why), []).append(part.name)
    return [f"not checked: {check}: {', '.join(names)}: {why}" for (check, why), names in found.items()]


def read_row(folder: Path) -> Row | None:
    """Read what a check has written down so far; None where that is nothing."""
    try:
        return outcome.from_json(json.loads((folder / "row.json").read_text()))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def judged(check: str, folder: Path, ended: jobs.Ended) -> Row:
    """Return the row of a check whose process has ended: what it wrote, or why it did not come so far."""
    row = read_row(folder)
    if row is not None and row.state != "running" and ended.code == 0:
        return row
    parts = row.parts if row is not None else ()
    return outcome.row_of(check, parts, jobs.how(ended))


def child(
    check: Check,
    work: Path,
    ends: float,
    rehearsal: bool,
    scripts: Sequence[str] = (),
    measured: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> None:
    """Run one check in this process and write down what became of it."""
    name = check.name
    about = json.loads((work / "machine.json").read_text())
    bench = Bench(name, work / name, "cpu" if rehearsal else "cuda", ends, about, scripts, measured)
    broken = ""
    try:
        check.run(bench)
    except jobs.JobFailedError as e:
        broken = str(e)
        print(e.tail, flush=True)
    except Exception as e:  # noqa: BLE001 - whatever breaks a check is its row, and no other's
        broken = f"{type(e).__name__}: {e}"
        print(traceback.format_exc(), flush=True)
    write(bench.work / "row.json", outcome.to_json(outcome.row_of(name, bench.parts, broken, rehearsal)))


def prove(checks: Sequence[Check], proof: Proof, seconds: float) -> int:
    """Run checks until the time is over, and return the exit code; what is interrupted leaves what it has."""
    ends = time.monotonic() + seconds
    try:
        for n, check in enumerate(checks):
            proof.run(check, ends - sum(later.reserved_s for later in checks[n + 1 :]))
    except KeyboardInterrupt:
        if proof.rows and proof.rows[-1].state == "running":
            name = proof.rows[-1].check
            found = read_row(proof.work / name)
            proof.rows[-1] = outcome.row_of(name, found.parts if found else (), "interrupted")
        proof.write()
    return proof.end() if len(proof.rows) == len(checks) else max(1, proof.end())


def commit() -> str:
    """Return which commit this is; "not told" where there is no repository."""
    words = ["git", "-C", str(jobs.ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "not told"
    return done.stdout.strip() if done.returncode == 0 else "not told"


def checks_of(source: str) -> Sequence[Check]:
    """Return the checks that a module lists."""
    listed: Sequence[Check] = importlib.import_module(source).CHECKS
    return listed


def chosen(checks: Sequence[Check], only: Sequence[str] | None, skip: Sequence[str] = ()) -> list[Check]:
    """Return the checks of these names, in the order of `only`; raise ValueError where there is none of a name."""
    known = {check.name: check for check in checks}
    if wrong := [name for name in (*(only or ()), *skip) if name not in known]:
        raise ValueError(f"no check {', '.join(wrong)}; there are: {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(known if only is None else only) if name not in skip]


def scripts_left(asked: Sequence[str], earlier: Path | None) -> list[str]:
    """Return the scripts of the check `advice` that are asked for (none: all) and not judged in an earlier call.

    Raises ValueError where there is no script of a name, and OSError or ValueError where the call cannot be read.
    """
    known = [case.script for case in cases.CASES]
    if wrong := [name for name in asked if name not in known]:
        raise ValueError(f"no script {', '.join(wrong)}; there are: {', '.join(known)}")
    done: set[str] = set()
    if earlier is not None:
        rows = [outcome.from_json(row) for row in json.loads((earlier / "gpu.json").read_text())["checks"]]
        done = {name for row in rows if row.check == "advice" for name in outcome.subjects(row.parts)}
    return [name for name in asked or known if name not in done]


def _measured(text: str) -> tuple[str, tuple[float, ...]]:
    """Read NAME=PLAIN,FIXED; raise ValueError where it is none."""
    name, _, steps = text.partition("=")
    plain, fixed = map(float, steps.split(","))
    return name, (plain, fixed)


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for, and return the exit code."""
    options = argparse.ArgumentParser(
        description=__doc__, prog="python -m benchmarks.gpu", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--out", type=Path, default=Path("reports/gpu"), help="default: reports/gpu")
    options.add_argument("--only", nargs="+", metavar="NAME", help="only these checks, in this order")
    options.add_argument("--skip", nargs="+", metavar="NAME", default=[], help="not these checks")
    options.add_argument("--scripts", nargs="+", metavar="NAME", default=[], help="of the check advice only these")
    options.add_argument(
        "--measured",
        nargs="+",
        metavar="NAME=PLAIN,FIXED",
        default=[],
        help="the ms a step of scripts that an earlier call has timed on such a machine: they are only recorded",
    )
    options.add_argument("--resume", type=Path, metavar="DIR", help="without the scripts that a call into DIR judged")
    options.add_argument("--minutes", type=float, default=MINUTES, help=f"for all of them (default: {MINUTES:g})")
    options.add_argument("--commit", help="which commit this is, where no repository tells")
    options.add_argument("--list", action="store_true", help="list the checks and what passes each")
    options.add_argument("--rehearse", action="store_true", help="run all of it on the CPU, to see that it runs")
    options.add_argument("--child", help=argparse.SUPPRESS)
    options.add_argument("--checks", default=CHECKS, help=argparse.SUPPRESS)  # a module that lists them
    options.add_argument("--work", type=Path, help="keep what the checks make in this folder")
    options.add_argument("--ends", type=float, default=0.0, help=argparse.SUPPRESS)
    args = options.parse_args(argv)
    listed = checks_of(args.checks)
    if args.child:
        measured = dict(map(_measured, args.measured))
        child(chosen(listed, [args.child])[0], args.work, args.ends, args.rehearse, args.scripts, measured)
        return 0
    if args.list:
        for check in listed:
            print(f"{check.name:12}{check.passes}")
        return 0
    try:
        checks = chosen(listed, args.only, args.skip)
        scripts = scripts_left(args.scripts, args.resume)
        dict(map(_measured, args.measured))
    except (OSError, ValueError) as e:
        options.error(str(e))
    if not scripts:
        checks = [check for check in checks if check.name != "advice"]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    began = time.monotonic()
    work = args.work.absolute() if args.work else Path(tempfile.mkdtemp(prefix="dlprof-gpu-"))
    work.mkdir(parents=True, exist_ok=True)
    try:
        torch, driver = machine.ask_torch(work), machine.ask_driver(work)
        why = machine.no_gpu(torch, driver)
        if why and (not args.rehearse or isinstance(torch, str)):
            print(why, file=sys.stderr)
            return 1
        about = {"torch": torch, "driver": driver}
        write(work / "machine.json", about)
        args.out.mkdir(parents=True, exist_ok=True)
        with (args.out / ("rehearsal-log.txt" if args.rehearse else "log.txt")).open("w") as log:
            proof = Proof(args.out.absolute(), work, about, args.rehearse, log)
            proof.source, proof.commit = args.checks, args.commit or commit()
            proof.scripts, proof.measured = scripts, args.measured
            proof.say(f"{fixtures.about(about)}")
            return prove(checks, proof, 60 * args.minutes - (time.monotonic() - began))
    finally:
        if not args.work:
            shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
