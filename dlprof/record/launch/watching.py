"""Watches the steps of a running job: says why it stands still (`--hang`), ends it after so many (`--stop-after`).

Also ends all processes of a job, as a trial does.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlprof import run_folder
from dlprof.plain import tell, words_of
from dlprof.record.failures import LEAST_S, seconds
from dlprof.record.launch.process import family, has_ended, running, start, started_with, stat_of
from dlprof.record.ranks import words_here

_LOOK_S, _SELDOM_S = 2.0, 10.0  # the second one where a job may stand still for a minute anyway
_AT_WORK = 5  # so many times as long may ranks do what takes long, as saving and compiling do
_BEFORE_S = 300.0
_MOST = 5  # reports of one job
_LOOKING_S = 60.0  # that `dlprof hang` may take


class Watch:
    """Watches the step logs of the ranks on this host, of which any that grows shows that the job goes on.

    `asked` as `options.hang` returns it. `here`: the run's other hosts record elsewhere. `reports`: what was found, in
    order.
    """

    def __init__(self, asked: str, run: Path, env: Mapping[str, str], *, here: bool = False) -> None:
        self._here = here
        self._asked, self._run = asked or "auto", run
        self._env = {name: value for name, value in env.items() if not name.startswith("DLPROF_")}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._look_s = _LOOK_S if self._asked not in ("auto", "off") and float(self._asked) < LEAST_S else _SELDOM_S
        self._steps, self._ns = 0, 0
        self._log = StepLog(run)
        self.reports: list[dict[str, Any]] = []

    def start(self) -> None:
        """Begin to watch; it never keeps the job from anything."""
        if self._asked != "off":
            self._thread = threading.Thread(target=self._watch, name="dlprof watch", daemon=True)
            start(self._thread)

    def end(self) -> None:
        """Watch no more."""
        self._over.set()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join(1.0)

    def _watch(self) -> None:
        seen: dict[Path, int] = {}
        looked_s = grew_s = time.monotonic()
        patience = 1.0
        try:
            while not self._over.wait(self._look_s) and len(self.reports) < _MOST:
                sizes, before_s, looked_s = self._sizes(), looked_s, time.monotonic()
                # Where this process slept longer than it wanted to, the job was stopped too, as by Ctrl-Z.
                if sizes != seen or looked_s - before_s > self._look_s + _SELDOM_S:
                    seen, grew_s, patience = sizes, looked_s, 1.0
                    continue
                still_s = looked_s - grew_s
                if still_s < patience * (self._patience_s() if sizes else self._before_s()):
                    continue
                # Once in each standstill; but those at work have a while more, as have those that still import.
                waits = (self._asked == "auto" or not sizes) and patience < _AT_WORK
                told = self._tell(still_s, may_wait=waits, begun=bool(sizes))
                patience = math.inf if told else patience + 1.0
                looked_s = time.monotonic()
        except Exception as e:  # noqa: BLE001 - the job goes on
            tell(f"--hang is off: {words_of(e)}")

    def _sizes(self) -> dict[Path, int]:
        """Return the sizes of the step logs of this host's ranks."""
        found = {}
        for word in words_here(self._run):
            path = run_folder.log_of(self._run / "ranks" / word.folder, "steps")[0]
            with contextlib.suppress(OSError):
                found[path] = path.stat().st_size
        return found

    def _patience_s(self) -> float:
        if self._asked == "auto":
            rows, anew = self._log.follow()
            self._steps = (0 if anew else self._steps) + sum(map(trained, rows))
            self._ns = (0 if anew else self._ns) + sum(row.get("dur_ns", 0) for row in rows if trained(row))
        return max(seconds(self._asked, self._ns / max(self._steps, 1) / 1e9), 3 * _LOOK_S)

    def _before_s(self) -> float:
        """Return how long the ranks may take to their first step: to prepare data may take long."""
        return _BEFORE_S if self._asked == "auto" else max(float(self._asked), 3 * _LOOK_S)

    def _tell(self, still_s: float, *, may_wait: bool, begun: bool) -> bool:
        """Ask why, and say it; return False where the ranks are at work, and may be for a while.

        Before any has `begun` to train they may be at work in any way, but where one waits for another.
        """
        # Of many hosts one asks the ranks of all.
        asks_all = not self._here and any(word.rank == 0 for word in words_here(self._run))
        scope = () if asks_all else ("--here",)
        done = subprocess.run(
            [sys.executable, "-m", "dlprof", "hang", *scope, "--format", "json", str(self._run)],
            env=self._env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=_LOOKING_S,
            start_new_session=True,  # the terminal's Ctrl-C is for the job
        )
        if self._over.is_set():
            return True  # the job has ended meanwhile
        try:
            found = json.loads(done.stdout)
            if (may_wait and found["at_work"]) or not (begun or found["waiting"]):
                return False
            why = [str(found["why"]), *map(str, found["more"])]
        except (ValueError, KeyError, TypeError):
            if not begun:
                return False
            said = done.stderr.decode(errors="replace").strip().splitlines()
            why = [f"why is not known: {said[-1] if said else 'nothing was found'}"]
            found = {"why": why[0], "more": [], "blamed": []}
        self.reports.append(
            {"at_ns": time.time_ns(), "still_s": round(still_s, 1)}
            | {name: found[name] for name in ("why", "more", "blamed")}
        )
        tell(
            f"no rank here has ended a step for {still_s:.0f} s" if begun else f"no rank has begun for {still_s:.0f} s"
        )
        for line in why:
            tell(f"  {line}")
        tell(f"  `dlprof hang {os.path.relpath(self._run)}` asks again")
        return True

    def warnings(self) -> list[str]:
        """Return a line for the report about each standstill."""
        return [
            f"at {time.strftime('%H:%M:%S', time.localtime(one['at_ns'] / 1e9))} no rank of this host had ended a step"
            f" for {one['still_s']:.0f} s: {one['why']}"
            for one in self.reports
        ]


# -- ending a job

_POLL_S = 0.2

# How long the processes of a run may take to end by themselves. The step log is written every half second anyway.
GRACE_S = 5.0

# How often to look again for processes that others have started in the meantime.
_ATTEMPTS = 20
_PAUSE_S = 0.05


# A job whose time of training is limited may set itself up for so many times as long.
_SETTING_UP = 5


class StopAfter:
    """Asks a job to end as by SIGTERM once it has done what is `asked`, in the form of `options.stop_after`.

    That is steps of training of rank 0, after which the trace windows must have closed too, or seconds: from the start,
    or "of training", from its first step on; a job that makes none is ended after _SETTING_UP times as long. `stopped`:
    in words, that it has asked; "": it has not. Where something fails, the job goes on to its own end.
    """

    def __init__(self, asked: str, run: Path) -> None:
        self.asked = asked
        number, _, unit = asked.partition(" ")
        self._most, self._seconds, self._trains = int(number or 0), unit[:1] == "s" and unit != "steps", " of " in unit
        self._run, self._steps, self._log = run, 0, StepLog(run)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.stopped = ""

    def start(self, child: int) -> None:
        """Watch the job of this process, which has just been started."""
        if self._most:
            self._thread = threading.Thread(target=self._watch, args=(child,), name="dlprof stop", daemon=True)
            start(self._thread)

    def end(self) -> None:
        """Watch no more; on return no process is left of a job that was asked to end."""
        self._over.set()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()

    def _watch(self, child: int) -> None:
        until = time.monotonic() + self._most * (_SETTING_UP if self._trains else 1)
        try:
            while not self._over.wait(_POLL_S):
                if self._trains and self._log.follow()[0]:
                    until, self._trains = min(until, time.monotonic() + self._most), False
                if (time.monotonic() >= until) if self._seconds else self._has_steps():
                    if not has_ended(stat_of(child)):
                        self.stopped = f"stopped after {self.asked}, as asked (--stop-after)"
                        # torchrun, for one, prints a traceback.
                        tell(f"{self.stopped}: what the job prints while it ends is no failure")
                        end(child, self._run, os.getpid())
                    return
        except Exception as e:  # noqa: BLE001 - the job goes on
            tell(f"--stop-after is off: {words_of(e)}")

    def _has_steps(self) -> bool:
        """Return whether rank 0 has made the steps, and no rank is at its trace window, or has yet to come to it.

        Nor may one be ending by itself, which is known a moment after its last steps.
        """
        enough = self._steps >= self._most
        rows, anew = self._log.follow()
        self._steps = (0 if anew else self._steps) + sum(map(trained, rows))
        if not enough or anew or self._log.path is None:
            return False
        life = self._log.path.parent.name.partition(".")[2]
        ranks = (folder for folder in run_folder.in_ranks(self._run) if folder.name.partition(".")[2] == life)
        return not any(map(_goes_on, run_folder.of_ranks(ranks, "facts.json")))


def _goes_on(facts: Path) -> bool:
    """Return whether a rank's trace window has not closed, or its recording has ended."""
    try:
        known = json.loads(facts.read_bytes())
        return bool(known["window"]["state"] == "waiting" or known["ended"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


class StepLog:
    """Reads the step log of a run's rank 0 while it is written."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._read = 0
        self.path: Path | None = None  # None: there is none yet

    def follow(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the rows that are new, and whether these are the first since the launcher has (re)started the job."""
        logs = [run_folder.log_of(rank, "steps") for rank in sorted(self._run.glob("ranks/00000*"))]
        path, start = next((log for log in reversed(logs) if log[0].exists()), (None, ""))
        if path is None:
            return [], False
        anew = path != self.path
        if anew:
            self.path, self._read = path, 0
        with path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._read += whole
        rows = []
        for line in data[:whole].splitlines():
            with contextlib.suppress(ValueError):  # a broken line
                rows += [json.loads(line)] if line.startswith(start.encode()) else []
        return [row for row in rows if isinstance(row, dict)], anew


def trained(row: Mapping[str, Any]) -> int:
    """Return how many steps of training a row of the step log stands for."""
    return row.get("steps", 1) if row.get("kind") == "train" and not row.get("outstanding") else 0


def processes_of(root: int, folder: Path, supervisor: int | None = None) -> set[int]:
    """Return the running processes that `root` has started, directly or not, and those that record into the folder.

    A process whose parent has ended is no longer a descendant, but its environment still names the folder; and its
    supervisor, where others may record into the same folder.
    """
    marks = {b"DLPROF_RUN=" + os.fsencode(folder)} | ({b"DLPROF_SUPERVISOR=%d" % supervisor} if supervisor else set())
    known = running()
    # The process itself, its session (setsid), and processes whose environment names the folder. Only a child of ours
    # cannot have been reaped, and its number given to another, without our doing.
    roots = [
        pid
        for pid, stat in known.items()
        if (pid == root and os.getpid() in (root, int(stat[1]))) or int(stat[3]) == root or started_with(pid, marks)
    ]
    return set(family(roots, known)) - {os.getpid()}


def end(root: int, folder: Path, supervisor: int | None = None) -> None:
    """End a run's processes: SIGTERM, and kill those that remain.

    Without `supervisor`, that is `root`, which gets no SIGTERM and ends with its command. On return all have ended,
    except for a process that even the kernel cannot end.
    """
    for pid in processes_of(root, folder, supervisor) - {supervisor or root}:
        _send(pid, signal.SIGTERM)
        _send(pid, signal.SIGCONT)  # a stopped process would not receive the SIGTERM
    until = time.monotonic() + GRACE_S
    while not has_ended(stat_of(root)) and time.monotonic() < until:
        time.sleep(_PAUSE_S)
    kill(root, folder, supervisor)


def kill(root: int, folder: Path, supervisor: int | None = None) -> None:
    """Kill a run's processes, including `root` unless that is this process, until none is left."""
    for _ in range(_ATTEMPTS):
        left = processes_of(root, folder, supervisor)
        if not left:
            return
        for pid in left:
            _send(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
