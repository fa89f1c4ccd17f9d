"""Says of a command that has ended why nothing was recorded of it, and which of its ranks still run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from dlprof.record.launch.folder import RunFolder
from dlprof.record.ranks import words_here
from dlprof.run_folder import recorded

# How long ranks may take to end after the command, as those of a launcher that was signalled together with them.
_LEAVING_S = 1.0
_MOST_NAMED = 16

_NOT_REACHED = "(python -I, -E, -S, a cleaned environment, or no Python)"


def missing(run: RunFolder) -> list[str]:
    """Say, in at most one line, why nothing was recorded."""
    if any((rank / "facts.json").exists() for rank in run.ranks) or recorded(run.path):
        return []
    if run.ranks:
        return ["no report is possible: no rank could write its facts.json"]
    hellos = _hellos(run.hosts)
    last = {line.partition(",")[0]: line for line in hellos}  # by process
    if not hellos:
        why = f"the hook was never reached {_NOT_REACHED}"
    # A process that had been here before; a fork's child that becomes another program has not.
    elif any('"exec": true' in last[line.partition(",")[0]] for line in hellos if '"python": ' in line):
        why = f"the command replaced itself (os.exec) by a program that the hook did not reach {_NOT_REACHED}"
    elif not any('"torch": true' in line for line in hellos):
        why = "the command never imported torch"
    else:
        why = "torch was imported, but no backward(), no optimizer step and no lasting inference was seen"
    return [f"nothing was recorded: {why}"]


def _hellos(hosts: Iterable[Path]) -> list[str]:
    """Return what the interpreters of hosts have said as they started, line by line."""
    files = (host / "hello.jsonl" for host in hosts)
    return [line for file in files if file.is_file() for line in file.read_text(errors="replace").splitlines()]


def left(folder: Path) -> list[str]:
    """Say, in at most one line, which ranks run on after the command: a launcher that dies may leave its own."""
    until = time.monotonic() + _LEAVING_S
    while (ranks := _running(folder)) and time.monotonic() < until:
        time.sleep(0.05)
    if not ranks:
        return []
    named = ", ".join(f"rank {rank} (process {pid})" for rank, pid in ranks[:_MOST_NAMED])
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return [
        f"the command has ended and left some of its job running: {named}{more}; dlprof ends nothing,"
        " and what is recorded from now on is in a report made later"
    ]


def _running(folder: Path) -> list[tuple[int, int]]:
    """List rank and process of what still runs of this supervisor's command, and has trained.

    By what each has said of itself: its environment is gone where a title was written over it (setproctitle).
    """
    return sorted((w.rank, w.pid) for w in words_here(folder) if w.supervisor == str(os.getpid()) and w.runs)
