"""Notices that a job stands still, and asks `dlprof hang` why: once each time, on stderr and for the report."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlprof.plain import tell, words_of
from dlprof.record.launch.stopping import StepLog, trained
from dlprof.record.ranks import words_here
from dlprof.record.still import LEAST_S, seconds

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
            with contextlib.suppress(RuntimeError):  # no more threads are allowed here
                self._thread.start()

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
            path = self._run / "ranks" / word.folder / "steps.jsonl"
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
