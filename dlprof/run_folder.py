"""Where the ranks, tasks and hosts of a job lie in its run folder, and in which file of theirs each log is.

No folder holds more than some hundred of them, and each has few files: shared disks are slow to make a file.

A rank finds its folder by its number alone, a host by its name: thousands must agree on it without asking each other.
The first 256 ranks lie flat, ranks/00007; further ones by 256, ranks/12288-12543/12345. Hosts lie flat, hosts/HOST,
unless whoever makes the run folder knows that they are many: then it makes the folder many-hosts, and they lie in 64
folders of that, many-hosts/3f/HOST. So do the files of tasks, one a host. Older runs are flat, whatever their size.

A process appends all that it writes line by line to one file. Each line begins with the name of its log, those of a
host's file that are about one rank with that too: {"log":"steps",… and {"log":"gpu","rank":"00007",… A line that holds
nothing else begins its log anew: {"log":"modules"}. Older runs have a file for each log.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

GROUP = 256  # ranks to a folder
MANY_HOSTS = 256  # from more hosts on they do not lie flat
_SPREAD = 64  # folders of many hosts

HOSTS, SPREAD_HOSTS = "hosts", "many-hosts"

# The file of a rank's own process; and those of the process that samples a host: what it reads, and Python stacks.
RECORDS, SAMPLES, STACKS = "records.jsonl", "samples.jsonl", "stacks.jsonl"

# Logs of one object, the last of which counts.
_OBJECTS = ("held", "overrides", "sources")

_RANGE = re.compile(r"[0-9]{5,9}-[0-9]{5,9}")
_DIGEST = re.compile(r"[0-9a-f]{2}")


def rank_name(rank: int, life: str = "") -> str:
    """Return the path of a rank's folder below ranks/; `life` tells a restarted rank's from that of its earlier one."""
    return f"{_range_of(rank)}{rank:05d}{life}"


def task_file(run: Path, host: str, boot: str) -> Path:
    """Return the file to which the tasks on a host append what they are and how they ended; see `tasks_in`."""
    name = f"{host}~{boot[:8]}.jsonl"
    return run / "tasks" / (f"{_digest(host)}/{name}" if is_spread(run) else name)


def tasks_in(path: Path) -> dict[str, dict[str, Any]]:
    """Return what the tasks in a file have written, by name; end_ns is None where one has not ended.

    A line that is cut off is left out. Older runs have a file for each task. Raises OSError.
    """
    text = path.read_text(errors="replace")
    found: dict[str, dict[str, Any]] = {}
    for line in [text] if path.suffix == ".json" else text.splitlines():
        said: Any = {"end_ns": None}
        with contextlib.suppress(ValueError, RecursionError):
            said = json.loads(line)
        if path.suffix == ".json":
            found[path.stem] = said if isinstance(said, dict) else {"end_ns": None}
        elif isinstance(said, dict) and isinstance(name := said.pop("task", None), str):
            said.pop("log", None)
            found[name] = found.get(name, {}) | said
    return found


def is_spread(run: Path) -> bool:
    """Return whether the hosts of a run are many."""
    return (run / SPREAD_HOSTS).is_dir()


def host_folder(run: Path, host: str) -> Path:
    """Return a host's folder, whether or not it is there yet."""
    return run / SPREAD_HOSTS / _digest(host) / host if is_spread(run) else run / HOSTS / host


def in_ranks(run: Path) -> Iterator[Path]:
    """List what lies where the folders of ranks do, in order; nothing where that cannot be listed."""
    return _below(run / "ranks", _RANGE)


def in_tasks(run: Path) -> Iterator[Path]:
    """List the files of tasks, in order, as `in_ranks` does."""
    files = _below(run / "tasks", _RANGE, _DIGEST)
    return (path for path in files if path.suffix in (".json", ".jsonl"))


def in_hosts(run: Path) -> list[Path]:
    """List what lies where the folders of hosts do, by name, as `in_ranks` does."""
    return sorted((*_below(run / HOSTS), *_below(run / SPREAD_HOSTS, _DIGEST)), key=lambda path: path.name)


def begins(log: str, rank: str = "") -> str:
    """Return what the lines of a log begin with; `rank`: the folder below ranks/ that samples are of."""
    return f'{{"log":"{log}",' + (f'"rank":"{rank}",' if rank else "")


def log_of(rank: Path, log: str) -> tuple[Path, str]:
    """Return the file with a log of a rank, given its folder, and what its lines begin with in there."""
    path = rank / RECORDS
    if path.exists():
        return path, begins(log)
    return rank / f"{log}.json{'' if log in _OBJECTS else 'l'}", ""


def lines_of(rank: Path, log: str) -> list[bytes]:
    """Return the lines of a log of a rank, given its folder; none where there is no such file."""
    path, start = log_of(rank, log)
    try:
        return [line for line in path.read_bytes().splitlines() if line.startswith(start.encode())]
    except OSError:
        return []


def notes_name(boot: str) -> str:
    """Return the file, in a host's folder, in which what runs under one kernel says who it is, and what went wrong."""
    return f"notes-{boot[:8]}.jsonl"


def boot_of(host: Path) -> str:
    """Return the boot id of the machine that samples into a host's folder; "" where that is not known."""
    try:
        with (host / SAMPLES).open("rb") as file:
            return str(json.loads(file.readline(256)).get("boot") or "")
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""


def recorded(run: Path) -> bool:
    """Return whether any rank has left its facts; looks no further than to the first."""
    return any(os.path.exists(folder / "facts.json") for folder in in_ranks(run))  # noqa: PTH110 - never raises


def of_ranks(folders: Iterable[Path], pattern: str) -> Iterator[Path]:
    """List the files of ranks' folders whose names match a pattern, in order."""
    return itertools.chain.from_iterable(sorted(folder.glob(pattern)) for folder in folders)


def together(tasks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what run.json holds of a job of several tasks: its exit is that of the first task to fail."""
    ended = sorted((task for task in tasks if task.get("end_ns")), key=lambda task: task["end_ns"])
    all_ended = len(ended) == len(tasks)
    failed = [end for task in ended if (end := task.get("exit") or {}).get("code") != 0]
    return {
        "end_ns": ended[-1]["end_ns"] if all_ended and ended else None,
        "exit": failed[0] if failed else {"code": 0 if all_ended else None, "signal": None},
        "hosts": list(dict.fromkeys(task["host"] for task in tasks if task.get("host"))),
        # A task that is stopped keeps all others waiting.
        "resumed_ns": sorted(at for task in ended for at in task.get("resumed_ns") or ()),
        "warnings": list(dict.fromkeys(text for task in ended for text in task.get("warnings") or ())),
        "tasks": list(tasks),
    }


def _below(folder: Path, *inner: re.Pattern[str]) -> Iterator[Path]:
    """List what lies in a folder, and in the folders in it whose names match, in order."""
    try:
        found = sorted(folder.iterdir())
    except OSError:
        return
    for path in found:
        if any(kind.fullmatch(path.name) for kind in inner):
            yield from _below(path)
        else:
            yield path


def _range_of(number: int) -> str:
    first = number - number % GROUP
    return f"{first:05d}-{first + GROUP - 1:05d}/" if first else ""


def _digest(name: str) -> str:
    # sitecustomize.py does the same, in every interpreter of the job.
    return f"{zlib.crc32(name.encode()) % _SPREAD:02x}"
