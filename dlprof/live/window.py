"""Asks the ranks of a running job for another trace window, by a file in its run folder, and waits for their answer."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlprof import run_folder
from dlprof.errors import DlprofError
from dlprof.files import write, writing
from dlprof.read import facts
from dlprof.record.further import ASK, MOST
from dlprof.record.ranks import words_here

# Ranks look once a second, at the end of a step; those without a process group every five seconds.
_ANSWER_S, _POLL_S = 10.0, 0.1


def ask(run: Path, steps: int, *, answer_s: float = _ANSWER_S) -> Mapping[str, Any] | None:
    """Ask for a window of so many steps; return its entry of the ranks' facts, or None if no rank has answered yet.

    Raises DlprofError where no rank will answer: no run, none that runs, or no window that it may still open.
    """
    had = len(_facts(run).get("windows") or ())
    with writing(str(run / ASK)):
        write(run / ASK, json.dumps({"steps": steps}))
    until = time.monotonic() + answer_s
    while len(windows := list(_known(run).get("windows") or ())) <= had:
        if time.monotonic() >= until:
            return None
        time.sleep(_POLL_S)
    return windows[-1]  # type: ignore[no-any-return]


def _facts(run: Path) -> Mapping[str, Any]:
    """Return rank 0's facts where it can be asked; raises DlprofError, which says why it cannot."""
    if not (run / "run.json").is_file():
        raise DlprofError(f"{run}: no run folder of dlprof" if run.exists() else f"{run}: no such file or folder")
    of_run, known = facts.read(run / "run.json", facts.RUN).facts, _known(run)
    if of_run.get("end_ns") is not None or known.get("ended"):
        raise DlprofError(f"{run}: the job has ended: only a job that runs can be traced again")
    if not known:
        raise DlprofError(f"{run}: no rank of the job trains yet")
    words = list(words_here(run))
    if words and not any(word.runs for word in words) and len(run_folder.in_hosts(run)) == 1:
        raise DlprofError(f"{run}: no rank of the job runs any more")
    first, windows = known.get("window") or {}, known.get("windows") or ()
    if first.get("state") == "nsys":
        raise DlprofError(f"{run}: the job runs under nsys, and only one of the two can record a device")
    if windows and windows[-1].get("state") in ("waiting", "yielded"):
        raise DlprofError(f"{run}: a window is due already: {steps_of(windows[-1])}")
    if len(windows) + 1 >= MOST:
        raise DlprofError(f"{run}: the job has had its {MOST} trace windows, the most that it may have")
    return known


def steps_of(window: Mapping[str, Any]) -> str:
    """Name a window's steps: "steps 4,010 to 4,014"."""
    first, last = window.get("first_step"), window.get("last_step")
    return "its steps are not known" if first is None or last is None else f"steps {first:,} to {last:,}"


def _known(run: Path) -> Mapping[str, Any]:
    """Return the facts of the job's first rank, from its last start; {} if there are none."""
    folders = sorted(run.glob("ranks/00000*"), reverse=True) or run_folder.in_ranks(run)
    path = next((folder / "facts.json" for folder in folders), None)
    return facts.read(path).facts if path is not None and path.is_file() else {}
