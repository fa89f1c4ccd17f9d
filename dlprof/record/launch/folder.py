"""Makes the folder of a run, and writes there what runs and how it ended: for one command, or for all tasks of a job.

The tasks have nothing else in common: no process knows them all, and the disk that their hosts share may know no locks.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlprof.errors import DlprofError
from dlprof.files import whole, write
from dlprof.marks import __version__
from dlprof.record import redaction
from dlprof.record.launch.tasks import Task, task_of

# With more tasks than this only the last to end reads what all have written: thousands that each read what thousands
# wrote would keep a shared disk busy for minutes. The reader looks itself where that one never came.
_MOST_READ = 64

# A run holds command lines, paths and code: only its user may read it, until he shares it.
_PRIVATE = 0o700

_ELSEWHERE = "choose another folder: -o PATH, or dlprof.record(PATH)"


def new_folder(name: str, env: Mapping[str, str]) -> Path:
    """Return a folder under ./runs that is not taken: by name and time, or one for all tasks of a job.

    A task that records several times, as a script of several commands does, has a folder for each time.
    """
    task = task_of(env)
    stem = f"{name}-{task.job if task else time.strftime('%Y%m%d-%H%M%S')}"
    stem = "".join(c if c.isalnum() or c in "._-" else "_" for c in stem)
    folders = (Path("runs", f"{stem}-{n}" if n else stem) for n in range(1000))
    try:
        if task is None:
            found = make_first(folders, _PRIVATE)
        else:
            found = next((folder for folder in folders if not _task_file(folder, task).exists()), None)
    except OSError as e:
        raise DlprofError(f"cannot make a run folder: {e}; {_ELSEWHERE}") from None
    if found is None:
        raise DlprofError(f"runs/{stem}: too many runs of that name in one second; {_ELSEWHERE}")
    return found


def make_first(folders: Iterable[Path], mode: int = 0o777) -> Path | None:
    """Make the first of these folders that does not exist, and return it; None: all exist. Raises OSError."""
    for folder in folders:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode, parents=True)
            return folder
    return None


class RunFolder:
    """The folder of a run: this process writes its run.json, alone or with the other tasks of its job."""

    def __init__(self, path: Path, command: Sequence[str], options: Mapping[str, Any], task: Task | None) -> None:
        """Make the folder ours, or this task's part of a folder that its job has already; raises DlprofError."""
        self.path = path
        self._task = task
        self._record: dict[str, Any] = {
            "format": 1,
            "dlprof": __version__,
            "command": redaction.words(command),
            "cwd": str(Path.cwd()),
            "start_ns": time.time_ns(),
            "end_ns": None,
            "hosts": [os.uname().nodename],
            "exit": {"code": None, "signal": None},
            "options": dict(options) | ({"job": task.job} if task else {}),
            "resumed_ns": [],
            "warnings": [],
            "tasks": [],
        }
        try:
            path.mkdir(_PRIVATE, parents=True, exist_ok=True)
            (path / "ranks").mkdir(exist_ok=True)
            try:
                with (path / "run.json").open("x") as file:
                    file.write(json.dumps(self._record))
            except FileExistsError:
                if task is None or _job_of(path / "run.json") != task.job:
                    raise
            if task is not None:
                ours = _task_file(path, task)
                ours.parent.mkdir(exist_ok=True)
                begun = {name: self._record[name] for name in ("command", "start_ns", "end_ns", "exit")}
                with ours.open("x") as file:
                    file.write(json.dumps({"host": task.host, "number": task.number} | begun))
        except FileExistsError:
            raise DlprofError(f"{path} already holds a run; {_ELSEWHERE}") from None
        except OSError as e:
            raise DlprofError(f"cannot record into {path}: {e}; {_ELSEWHERE}") from None

    def end(self, **end: Any) -> bool:
        """Write how the command ended: end_ns, exit, resumed_ns and warnings, as in run.json.

        Return whether this process is to report on the run: of several tasks the one that ended last. Raises OSError or
        ValueError where run.json cannot be written, or not be read.
        """
        if self._task is not None:
            return _end_task(self.path, self._task, end)
        write(self.path / "run.json", json.dumps(self._record | end))
        return True


def compress(folder: Path) -> None:
    """Turn the ranks' trace*.json into trace*.json.gz; one that cannot be compressed stays as it is."""
    for path in sorted(folder.glob("ranks/*/trace*.json")):
        with contextlib.suppress(OSError, EOFError):
            with path.open("rb") as source, whole(path.with_name(path.name + ".gz")) as part, _gzip(part) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            path.unlink(missing_ok=True)


def _task_file(folder: Path, task: Task) -> Path:
    """Return the file in which a task writes how it ended."""
    return folder / "tasks" / f"{task.name}.json"


def _end_task(folder: Path, task: Task, end: Mapping[str, Any]) -> bool:
    """Write how this task ended, and run.json from the files of all tasks; return whether this one reports on all.

    Tasks end at the same time on several hosts, and the disks that these share often know no locks. So each looks again
    once it has written: whoever wrote last has seen all.
    """
    ours = _task_file(folder, task)
    write(ours, json.dumps(json.loads(ours.read_text()) | end))
    ours.with_suffix(".ended").touch()
    suffixes = [path.suffix for path in ours.parent.iterdir()]
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
        (ours.parent / f"{len(tasks)}-ended").open("x").close()
    except FileExistsError:
        return False
    return True


def _tasks(folder: Path) -> list[dict[str, Any]]:
    """Return what the tasks of a job have written; one whose file is half written has not ended."""
    tasks = []
    for path in sorted((folder / "tasks").glob("*.json")):
        try:
            tasks.append(json.loads(path.read_text()))
        except ValueError:  # noqa: PERF203 - each may be half written
            tasks.append({"host": None, "number": None, "end_ns": None})
    return tasks


def _together(tasks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what run.json holds of a job of several tasks: its exit is that of the first task to fail."""
    ended = sorted((task for task in tasks if task.get("end_ns")), key=lambda task: task["end_ns"])
    all_ended = len(ended) == len(tasks)
    failed = [task["exit"] for task in ended if task["exit"]["code"] != 0]
    return {
        "end_ns": ended[-1]["end_ns"] if all_ended else None,
        "exit": failed[0] if failed else {"code": 0 if all_ended else None, "signal": None},
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
    except ImportError:
        return gzip.open(path, "wb", compresslevel=1)
    opener: Any = igzip.open
    return opener(path, "wb")
