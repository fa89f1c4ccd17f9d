"""Notices that a job stands still, and asks `dlprof hang` why: once each time, on stderr and for the report."""

from __future__ import annotations

import contextlib
import json
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

_LOOK_S = 2.0
_MOST = 5  # times that one job is told of
_LOOKING_S = 60.0  # that `dlprof hang` may take


class Watch:
    """Watches the step logs of the ranks on this host, of which any that grows shows that the job goes on.

    `asked` as `options.hang` returns it. `told`: what was found, in order.
    """

    def __init__(self, asked: str, run: Path, env: Mapping[str, str]) -> None:
        self._asked, self._run = asked or "auto", run
        self._env = {name: value for name, value in env.items() if not name.startswith("DLPROF_")}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._steps, self._ns = 0, 0
        self._log = StepLog(run)
        self.told: list[dict[str, Any]] = []

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
            self._thread.join(_LOOK_S)

    def _watch(self) -> None:
        seen: dict[Path, int] = {}
        grew_s, told = time.monotonic(), False
        try:
            while not self._over.wait(_LOOK_S):
                sizes = self._sizes()
                if sizes != seen or not sizes:
                    seen, grew_s, told = sizes, time.monotonic(), False
                    continue
                still_s = time.monotonic() - grew_s
                if told or len(self.told) >= _MOST or still_s < self._patience_s():
                    continue
                told = True
                self._tell(still_s)
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
        return max(seconds(self._asked, self._ns / max(self._steps, 1) / 1e9), min(LEAST_S, 3 * _LOOK_S))

    def _tell(self, still_s: float) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "dlprof", "hang", "--format", "json", str(self._run)],
            env=self._env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=_LOOKING_S,
            start_new_session=True,  # the terminal's Ctrl-C is for the job
        )
        if self._over.is_set():
            return  # the job has ended meanwhile
        try:
            found = json.loads(done.stdout)
            why = [str(found["why"]), *map(str, found["more"])]
        except (ValueError, KeyError, TypeError):
            said = done.stderr.decode(errors="replace").strip().splitlines()
            why = [f"why is not known: {said[-1] if said else 'nothing was found'}"]
            found = {"why": why[0], "more": [], "blamed": []}
        self.told.append(
            {"at_ns": time.time_ns(), "still_s": round(still_s, 1)}
            | {name: found[name] for name in ("why", "more", "blamed")}
        )
        tell(f"no rank here has ended a step for {still_s:.0f} s")
        for line in why:
            tell(f"  {line}")
        tell(f"  `dlprof hang {os.path.relpath(self._run)}` asks again")

    def warnings(self) -> list[str]:
        """Return a line for the report about each standstill."""
        return [
            f"at {time.strftime('%H:%M:%S', time.localtime(one['at_ns'] / 1e9))} no rank of this host had ended a step"
            f" for {one['still_s']:.0f} s: {one['why']}"
            for one in self.told
        ]
