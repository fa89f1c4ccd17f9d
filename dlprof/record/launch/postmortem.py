"""Tells of a command that has ended why nothing was recorded of it, and which of its ranks still run."""

from __future__ import annotations

import os
import time
from pathlib import Path

from dlprof.record.launch.process import started

# How long ranks may take to end after the command, as those of a launcher that was signalled together with them.
_LEAVING_S = 1.0
_MOST_TOLD = 16


def missing(folder: Path) -> list[str]:
    """Tell, in at most one line, why nothing was recorded."""
    if any(folder.glob("ranks/*/facts.json")):
        return []
    hellos = [path.read_text(errors="replace") for path in folder.glob("hosts/*/hello.jsonl")]
    if not hellos:
        return [
            "nothing was recorded: the hook was never reached (python -I, -E, -S, a cleaned environment, or no Python)"
        ]
    words = [line for text in hellos for line in text.splitlines()]
    # The last word of a process that had been here before; a fork's child that becomes another program has not.
    last = {line.partition(",")[0]: line for line in words}
    been = {line.partition(",")[0] for line in words if '"python": ' in line}
    if any('"exec": true' in line for pid, line in last.items() if pid in been):
        return [
            "nothing was recorded: the command replaced itself (os.exec) by a program that the hook did not reach"
            " (python -I, -E, -S, a cleaned environment, or no Python)"
        ]
    if not any('"torch": true' in line for line in words):
        return ["nothing was recorded: the command never imported torch"]
    return ["nothing was recorded: torch was imported, but no backward() and no optimizer step was seen"]


def left(folder: Path) -> list[str]:
    """Tell, in at most one line, which ranks run on after the command: a launcher that dies may leave its own."""
    until = time.monotonic() + _LEAVING_S
    while (ranks := _running(folder)) and time.monotonic() < until:
        time.sleep(0.05)
    if not ranks:
        return []
    told = ", ".join(f"rank {rank} (process {pid})" for rank, pid in ranks[:_MOST_TOLD])
    more = f" and {len(ranks) - _MOST_TOLD} more" if len(ranks) > _MOST_TOLD else ""
    return [
        f"the command has ended and left some of its job running: {told}{more}; dlprof ends nothing,"
        " and what is recorded from now on is in a report made later"
    ]


def _running(folder: Path) -> list[tuple[int, int]]:
    """List rank and process of what still runs of this supervisor's command, and has trained.

    By what each has said of itself: its environment is gone where a title was written over it (setproctitle).
    """
    found = []
    for word in (folder / "hosts" / os.uname().nodename).glob("rank-*"):
        try:
            pid = int(word.name.removeprefix("rank-"))
            name, supervisor, since = word.read_text().split()
            if supervisor == str(os.getpid()) and since == str(started(pid)):
                found.append((int(name.partition(".")[0]), pid))
        except (OSError, ValueError):  # noqa: PERF203 - each may be half written, or just now deleted
            continue
    return sorted(found)
