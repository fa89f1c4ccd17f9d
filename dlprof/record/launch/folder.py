"""Makes the folder of a run, and writes there what runs and how it ended: for one command, or for all tasks of a job.

The tasks have nothing else in common: no process knows them all, and the disk that their hosts share may know no locks.
Each writes files of its own. run.json is written twice: by whoever makes the folder, and by whichever task ends last.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from dlprof import redaction, run_folder
from dlprof.errors import DlprofError
from dlprof.files import whole, write
from dlprof.marks import __version__
from dlprof.record.launch.tasks import Task, host_count, task_of
from dlprof.record.ranks import words_here

# The tasks of a job start together. A task that starts so long after a job has ended is of another job, whose name is
# the same.
_OVER_NS = 60_000_000_000

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
            found = next((folder for folder in folders if not _why_not(folder, task)), None)
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

    def __init__(self, path: Path, command: Sequence[str], options: Mapping[str, Any], env: Mapping[str, str]) -> None:
        """Make the folder ours, or this task's part of a folder that its job has already; raises DlprofError."""
        self.path = path
        self._task = task = task_of(env)
        self._record: dict[str, Any] = {
            "format": 1,
            "dlprof": __version__,
            "command": redaction.words(command, keep=options.get("keep_arguments") == "on"),
            "cwd": str(Path.cwd()),
            "start_ns": time.time_ns(),
            "end_ns": None,
            "hosts": [os.uname().nodename],
            "exit": {"code": None, "signal": None},
            "options": dict(options) | ({"job": task.job} if task else {}),
            "batch": task.batch if task else None,
            "resumed_ns": [],
            "warnings": [],
            "tasks": [],
        }
        try:
            # Of thousands of tasks most find the folder made: each then makes nothing but its own file.
            if task is None or not (path / "run.json").exists():
                self._make(many_hosts=host_count(env, command) > run_folder.MANY_HOSTS)
            if task is not None:
                if why := _why_not(path, task):
                    raise DlprofError(f"{path} {why}; {_ELSEWHERE}")
                ours = _task_file(path, task)
                ours.parent.mkdir(parents=True, exist_ok=True)
                begun = {name: self._record[name] for name in ("command", "start_ns", "end_ns", "exit")}
                with ours.open("x") as file:
                    file.write(json.dumps({"host": task.host, "number": task.number} | begun))
        except FileExistsError:
            raise DlprofError(f"{path} {_HOLDS}; {_ELSEWHERE}") from None
        except OSError as e:
            raise DlprofError(f"cannot record into {path}: {e}; {_ELSEWHERE}") from None

    def _make(self, *, many_hosts: bool) -> None:
        """Make the folder; another task may do so at the same time. Raises OSError."""
        self.path.mkdir(_PRIVATE, parents=True, exist_ok=True)
        (self.path / "ranks").mkdir(exist_ok=True)
        if many_hosts:
            (self.path / run_folder.SPREAD_HOSTS).mkdir(exist_ok=True)
        try:
            with (self.path / "run.json").open("x") as file:
                file.write(json.dumps(self._record))
        except FileExistsError:
            if self._task is None:
                raise

    @cached_property
    def ranks(self) -> list[Path]:
        """The folders of the ranks of this command, which has ended; of one of several tasks those on its host."""
        if self._task is None:
            return list(run_folder.in_ranks(self.path))
        ours = [word.folder for word in words_here(self.path) if word.supervisor == str(os.getpid())]
        return [self.path / "ranks" / folder for folder in ours]

    @property
    def hosts(self) -> list[Path]:
        """The folders of the hosts of this command; of one of several tasks that of its host."""
        if self._task is None:
            return run_folder.in_hosts(self.path)
        return [run_folder.host_folder(self.path, os.uname().nodename)]

    def end(self, of_all: Callable[[], list[str]], **end: Any) -> list[str] | None:
        """Write how the command ended: end_ns, exit, resumed_ns and warnings, as in run.json.

        Return None where other tasks still run, or one that ended at the same time reports on all. Else this process is
        to report on the run: return the warnings that `of_all` then gives of it. Raises OSError or ValueError where
        run.json cannot be written, or not be read.
        """
        if self._task is not None:
            return _end_task(self.path, self._task, end, of_all)
        more = of_all()
        write(self.path / "run.json", json.dumps(self._record | end | {"warnings": [*end["warnings"], *more]}))
        return more


def compress(ranks: Iterable[Path]) -> None:
    """Turn the trace*.json of ranks into trace*.json.gz; one that cannot be compressed stays as it is."""
    for path in run_folder.of_ranks(ranks, "trace*.json"):
        with contextlib.suppress(OSError, EOFError):
            with path.open("rb") as source, whole(path.with_name(path.name + ".gz")) as part, _gzip(part) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            path.unlink(missing_ok=True)


def _task_file(folder: Path, task: Task) -> Path:
    """Return the file in which a task writes how it ended."""
    name = run_folder.task_name(task.name, task.number, spread=run_folder.is_spread(folder))
    return folder / "tasks" / f"{name}.json"


_HOLDS = "already holds a run"


def _why_not(folder: Path, task: Task) -> str:
    """Return why a task cannot record into a folder, for a sentence; "": it can.

    Raises OSError.
    """
    if not (folder / "run.json").exists():
        return ""
    theirs = _begun(folder / "run.json")
    job, batch, ended = (theirs.get("options") or {}).get("job"), theirs.get("batch"), theirs.get("end_ns")
    if job != task.job:
        return f"{_HOLDS} of job {job}, and this is {task.job}" if job else _HOLDS
    if _task_file(folder, task).exists():
        return _HOLDS
    if batch and task.batch and batch != task.batch:
        return f"{_HOLDS} of {batch} under the name {job}, and this is {task.batch}"
    if ended and time.time_ns() - ended > _OVER_NS:
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(ended / 1e9))
        return f"{_HOLDS} of another job under the name {job}, which ended at {at}"
    return ""


def _end_task(folder: Path, task: Task, end: Mapping[str, Any], of_all: Callable[[], list[str]]) -> list[str] | None:
    """Write how this task ended; the last one to end writes run.json, from the files of all tasks. See RunFolder.end.

    Tasks end at the same time on several hosts, and the disks that these share often know no locks. So each looks once
    it has written: whoever wrote last sees that all have ended. Most look at no more than the few hundred tasks that
    lie together with theirs: that thousands each look at thousands would keep a shared disk busy for minutes.
    """
    ours = _task_file(folder, task)
    write(ours, json.dumps(json.loads(ours.read_text()) | end))
    ours.with_suffix(".ended").touch()
    if not _ended(ours.parent):
        return None
    more: list[str] | None = None
    written = 0
    while (ended := _all_ended(folder / "tasks")) > written:
        try:
            (folder / "tasks" / f"{ended}-ended").open("x").close()
        except FileExistsError:
            break
        more = of_all()
        record = json.loads((folder / "run.json").read_text())
        told = run_folder.together(_tasks(folder))
        told["warnings"] += [text for text in more if text not in told["warnings"]]
        write(folder / "run.json", json.dumps(record | told))
        written = ended
    return more


def _all_ended(tasks: Path) -> int:
    """Return how many tasks there are, if all of them have ended; else 0."""
    with os.scandir(tasks) as found:
        groups = [tasks, *(tasks / entry.name for entry in found if entry.is_dir())]
    counts = []
    for group in groups:
        counts.append(_ended(group))
        if counts[-1] is None:
            return 0
    return sum(filter(None, counts))


def _ended(group: Path) -> int | None:
    """Return how many tasks lie in a folder, if all of them have ended; None: one has not."""
    suffixes = [path.suffix for path in group.iterdir()]
    begun, ended = suffixes.count(".json"), suffixes.count(".ended")
    return begun if ended == begun else None


def _tasks(folder: Path) -> list[dict[str, Any]]:
    """Return what the tasks of a job have written; one whose file is half written has not ended."""
    tasks = []
    for path in run_folder.in_tasks(folder):
        if path.suffix != ".json":
            continue
        try:
            tasks.append(json.loads(path.read_text()))
        except ValueError:
            tasks.append({"host": None, "number": None, "end_ns": None})
    return tasks


def _begun(path: Path) -> dict[str, Any]:
    """Return what run.json holds; another task may be writing it at this moment. {}: it cannot be read."""
    for _ in range(20):
        try:
            found = json.loads(path.read_text())
            if isinstance(found, dict):
                return found
        except (OSError, ValueError):
            pass
        time.sleep(0.05)
    return {}


def _gzip(path: Path) -> Any:
    try:
        from isal import igzip
    except ImportError:
        return gzip.open(path, "wb", compresslevel=1)
    opener: Any = igzip.open
    return opener(path, "wb")
