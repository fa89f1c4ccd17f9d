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
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from dlprof import redaction, run_folder
from dlprof.errors import DlprofError, reason
from dlprof.files import whole, write
from dlprof.marks import __version__
from dlprof.record.launch.tasks import Task, host_count, task_of
from dlprof.record.ranks import words_here

# The tasks of a job start together. A task that starts so long after a job has ended is of another job, whose name is
# the same.
_OVER_NS = 60_000_000_000

# A run holds command lines, paths and code: only its user may read it, until he shares it.
_PRIVATE = 0o700


class TakenError(DlprofError):
    """A folder has another run, or is none; the message says so."""


def opened(
    asked: Path | None, name: str, command: Sequence[str], options: Mapping[str, Any], env: Mapping[str, str]
) -> tuple[RunFolder | None, str]:
    """Return the folder to record into, made, and why it is not the one asked for; "": it is. None: there is none.

    `asked`: None stands for a new one under ./runs, by name and time. Where that has another run, or is no folder, the
    next number is taken: out, out-2, … Where nothing can be written there, it is one for temporary files.

    The tasks of a job decide alike without asking each other: by what the disk holds that they share, where their
    first one has made the folder. A task that records several times, as a script of several commands does, has a folder
    for each time.
    """
    task = task_of(env)
    # A script's name may be as long as a file's, and more is to follow.
    stem = f"{name[:50]}-{task.job if task else time.strftime('%Y%m%d-%H%M%S')}"
    stem = "".join(c if c.isalnum() or c in "._-" else "_" for c in stem)
    why: list[str] = []
    for first, is_named in ((asked or Path("runs", stem), asked is not None), (_temporary(env) / stem, False)):
        try:
            if why:
                _make_ours(first.parent)
            for path in numbered(first):
                try:
                    return RunFolder(path, command, options, env), "; ".join(why)
                except TakenError as e:  # noqa: PERF203 - the next one may be free
                    if is_named and path == first:
                        why.append(str(e))
            raise OSError("there are a thousand of that name")
        except OSError as e:  # noqa: PERF203 - there are two
            why.append(f"cannot record into {first}: {reason(e)}")
    return None, "; ".join(why)


def numbered(path: Path) -> Iterator[Path]:
    """List a thousand names to try: path, path-2, path-3, …"""
    stem = path if path.name not in ("", "..") else os.path.realpath(path)
    return (Path(f"{stem}-{n}") if n > 1 else path for n in range(1, 1001))


def make_first(folders: Iterable[Path]) -> Path | None:
    """Make the first of these folders that does not exist, and return it; None: all exist. Raises OSError."""
    for folder in folders:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    return None


def _temporary(env: Mapping[str, str]) -> Path:
    """Return where runs of this user go that can go nowhere else; all may write beside it."""
    try:
        return Path(env.get("TMPDIR") or tempfile.gettempdir(), f"dlprof-{os.getuid()}").absolute()
    except OSError:  # nothing that Python tries can be written
        return Path("/tmp", f"dlprof-{os.getuid()}")


def _make_ours(folder: Path) -> None:
    """Make a folder, or find it, that nobody else can have made or can write to. Raises OSError."""
    folder.mkdir(_PRIVATE, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise OSError(f"{folder} is not this user's own")


class RunFolder:
    """The folder of a run: this process writes its run.json, alone or with the other tasks of its job."""

    def __init__(self, path: Path, command: Sequence[str], options: Mapping[str, Any], env: Mapping[str, str]) -> None:
        """Make the folder ours, or this task's part of a folder that its job has already.

        Raises TakenError where it has another run, and OSError where it cannot be written; it is left as it was.
        """
        self.named = path
        self.path = path = path.absolute()
        self.made = False  # by this task, and not by another one
        self._task = task = task_of(env)
        self._record: dict[str, Any] = {
            "format": 1,
            "dlprof": __version__,
            "command": redaction.words(command, keep=options.get("keep_arguments") == "on"),
            "cwd": _cwd(),
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
        # Of thousands of tasks most find the folder made: each then makes nothing but its own file.
        if task is None or not (path / "run.json").exists():
            self._make(many_hosts=host_count(env, command) > run_folder.MANY_HOSTS)
        if task is not None:
            if why := _why_not(path, task):
                raise TakenError(f"{self.named} {why}")
            ours = _task_file(path, task)
            ours.parent.mkdir(parents=True, exist_ok=True)
            begun = {name: self._record[name] for name in ("command", "start_ns", "end_ns", "exit")}
            self._create(ours, {"host": task.host, "number": task.number} | begun)

    def _make(self, *, many_hosts: bool) -> None:
        """Make the folder; another task may do so at the same time. Raises TakenError, OSError."""
        folders = (self.path, self.path / "ranks", *([self.path / run_folder.SPREAD_HOSTS] if many_hosts else ()))
        new = [folder for folder in folders if not os.path.lexists(folder)]
        try:
            for folder in folders:
                folder.mkdir(_PRIVATE if folder == self.path else 0o777, parents=True, exist_ok=True)
            try:
                self._create(self.path / "run.json", self._record)
                self.made = True
            except TakenError:
                if self._task is None:
                    raise
        except FileExistsError as e:
            raise TakenError(f"{e.filename} is no folder") from None
        except OSError:
            for folder in reversed(new):
                with contextlib.suppress(OSError):  # not empty: another task has begun there
                    folder.rmdir()
            raise

    def _create(self, path: Path, record: Mapping[str, Any]) -> None:
        """Write a file that nobody has, or nothing. Raises TakenError, OSError."""
        try:
            file = path.open("x")
        except FileExistsError:
            raise TakenError(f"{self.named} {_HOLDS}") from None
        try:
            with file:
                file.write(json.dumps(record))
        except OSError:
            path.unlink(missing_ok=True)
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


def _cwd() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it was deleted: the command may well run there
        return os.environ.get("PWD", "/")


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
