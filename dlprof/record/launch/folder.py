"""Makes the folder of a run, and writes there what runs and how it ended: for one command, or for all tasks of a job.

The tasks have nothing else in common: no process knows them all, and the disk that their hosts share may know no locks.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlprof.errors import DlprofError
from dlprof.files import whole, write
from dlprof.record.launch.tasks import Task, task_of

# Of more tasks than this only the last to end reads what all have said: thousands that each read what thousands wrote
# would keep a shared disk busy for minutes. The reader looks itself where that one never came.
_MOST_READ = 64

# A run holds command lines, paths and code: it is its user's own until he shares it.
_PRIVATE = 0o700


def new_folder(name: str, env: Mapping[str, str]) -> Path:
    """Return a folder under ./runs that is not taken: by name and time, or one for all tasks of a job.

    A task that records several times, as a script of several commands does, has a folder for each time.
    """
    runs = Path("runs")
    task = task_of(env)
    stem = f"{name}-{task.job if task else time.strftime('%Y%m%d-%H%M%S')}"
    folders = (runs / (f"{stem}-{n}" if n else stem) for n in range(1000))
    if task is not None:
        found = next((folder for folder in folders if not _word_of(folder, task).exists()), None)
    else:
        try:
            found = make_first(folders, _PRIVATE)
        except OSError as e:
            raise DlprofError(f"cannot make a run folder: {e}; choose another place with -o") from None
    if found is None:
        raise DlprofError(f"{runs / stem}: too many runs of that name in one second; choose a folder with -o")
    return found


def make_first(folders: Iterable[Path], mode: int = 0o777) -> Path | None:
    """Make the first of these folders that is not there, and return it; None: all are there. Raises OSError."""
    for folder in folders:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode, parents=True)
            return folder
    return None


def claim(folder: Path, record: Mapping[str, Any], task: Task | None) -> None:
    """Make the folder ours, or this task's part of a folder that its job has already."""
    path = folder / "run.json"
    try:
        folder.mkdir(_PRIVATE, parents=True, exist_ok=True)
        (folder / "ranks").mkdir(exist_ok=True)
        try:
            with path.open("x") as file:
                file.write(json.dumps(record))
        except FileExistsError:
            if task is None or _job_of(path) != task.job:
                raise
        if task is not None:
            word = _word_of(folder, task)
            word.parent.mkdir(exist_ok=True)
            said = {name: record[name] for name in ("command", "start_ns", "end_ns", "exit")}
            with word.open("x") as file:
                file.write(json.dumps({"host": task.host, "number": task.number} | said))
    except FileExistsError:
        raise DlprofError(f"{folder} already holds a run; choose another folder with -o") from None
    except OSError as e:
        raise DlprofError(f"cannot record into {folder}: {e}; choose another folder with -o") from None


def tell_end(folder: Path, record: Mapping[str, Any], task: Task | None, end: Mapping[str, Any]) -> bool:
    """Write how the command ended; tell whether this supervisor, of all that record into the folder, is to report.

    Raises OSError or ValueError where run.json cannot be written, or not be read.
    """
    if task is not None:
        return _end_task(folder, task, end)
    write(folder / "run.json", json.dumps({**record, **end}))
    return True


def compress(folder: Path) -> None:
    """Turn the ranks' trace*.json into trace*.json.gz; one that cannot be compressed stays as it is."""
    for path in sorted(folder.glob("ranks/*/trace*.json")):
        with contextlib.suppress(OSError, EOFError):
            with path.open("rb") as source, whole(path.with_name(path.name + ".gz")) as part, _gzip(part) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            path.unlink(missing_ok=True)


def _word_of(folder: Path, task: Task) -> Path:
    """Return the file in which a task says how it ended."""
    return folder / "tasks" / f"{task.name}.json"


def _end_task(folder: Path, task: Task, end: Mapping[str, Any]) -> bool:
    """Write how this task ended, and run.json from what all tasks said; tell whether this one is to report on all.

    Tasks end at the same time on several hosts, and the disks that these share often know no locks. So each looks again
    once it has written: whoever wrote last has seen all. Raises OSError or ValueError where run.json cannot be read.
    """
    word = _word_of(folder, task)
    write(word, json.dumps(json.loads(word.read_text()) | end))
    word.with_suffix(".ended").touch()
    suffixes = [path.suffix for path in word.parent.iterdir()]
    begun, ended = suffixes.count(".json"), suffixes.count(".ended")
    if ended < begun and begun > _MOST_READ:
        return False
    written: list[dict[str, Any]] | None = None
    while (tasks := _tasks(folder)) != written:
        record = json.loads((folder / "run.json").read_text())
        write(folder / "run.json", json.dumps(record | _together(tasks)))
        written = tasks
    if not all(one.get("end_ns") for one in tasks):
        return False
    try:
        (word.parent / f"{len(tasks)}-ended").open("x").close()
    except FileExistsError:
        return False
    return True


def _tasks(folder: Path) -> list[dict[str, Any]]:
    """Return what the tasks of a job have said of themselves; one that is about to has not ended."""
    said = []
    for path in sorted((folder / "tasks").glob("*.json")):
        try:
            said.append(json.loads(path.read_text()))
        except ValueError:  # noqa: PERF203 - each may be half written
            said.append({"host": None, "number": None, "end_ns": None})
    return said


def _together(tasks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what run.json says of a job of several tasks: its exit is that of the first task to fail."""
    ended = sorted((task for task in tasks if task.get("end_ns")), key=lambda task: task["end_ns"])
    all_ended = len(ended) == len(tasks)
    failed = [task["exit"] for task in ended if task["exit"]["code"] != 0]
    good = {"code": 0 if all_ended else None, "signal": None}
    return {
        "end_ns": ended[-1]["end_ns"] if all_ended else None,
        "exit": failed[0] if failed else good,
        "hosts": list(dict.fromkeys(task["host"] for task in tasks if task["host"])),
        # A task that is stopped keeps all others waiting.
        "resumed_ns": sorted(at for task in ended for at in task.get("resumed_ns", ())),
        "warnings": list(dict.fromkeys(text for task in ended for text in task["warnings"])),
        "tasks": list(tasks),
    }


def _job_of(path: Path) -> str | None:
    """Return the job that a run belongs to; another task may be writing run.json at this moment."""
    for _ in range(20):
        try:
            return str(json.loads(path.read_text())["options"].get("job"))
        except (OSError, ValueError, KeyError, AttributeError):  # noqa: PERF203 - that is what the loop is for
            time.sleep(0.05)
    return None


def _gzip(path: Path) -> Any:
    try:
        from isal import igzip

        opener: Any = igzip.open
    except ImportError:
        return gzip.open(path, "wb", compresslevel=1)
    return opener(path, "wb")
