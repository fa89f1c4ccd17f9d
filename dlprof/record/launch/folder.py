"""Creates the folder of a run, and records there what runs and how it ended, for one command or all tasks of a job.

The folder is all that the tasks share: no process knows all of them, and their shared disk may not support locks. Each
writes files of its own. run.json is written twice: when a task creates the folder, and when the last task ends.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from dlprof import redaction, run_folder
from dlprof.errors import DlprofError, reason
from dlprof.files import make_ours, whole, write
from dlprof.marks import __version__
from dlprof.record.launch.local import Local
from dlprof.record.launch.tasks import Task, batch_of, element_of, filled, host_count, task_of
from dlprof.record.ranks import words_here

# The tasks of a job start together. A task that starts this long after a job has ended is of another job with the same
# name.
_OVER_NS = 60_000_000_000

_LOOK_S = 0.5  # between two looks at whether other tasks have ended

# A run contains command lines, paths and code: only its user may read it, unless he shares it.
_PRIVATE = 0o700


class TakenError(DlprofError):
    """A path has another run or is not a folder, as the message says."""


def opened(
    requested: Path | None, name: str, command: Sequence[str], options: Mapping[str, Any], env: Mapping[str, str]
) -> tuple[RunFolder | None, str]:
    """Create the folder to record into. Return it, or None, and why it is not the requested one ("" if it is).

    If `requested` is None, the folder is a new one under ./runs, named after `name`, the element of an array of jobs,
    and the time; else it may have patterns, as `tasks.filled` says. If the path has another run or is not a folder, the
    next number is taken: out, out-2, … If nothing can be written there, the folder is among the temporary files.

    The tasks of a job choose the same folder without communication: they see on the shared disk that the first of them
    has created it. A task that records several times, as in a script with several commands, gets a folder each time.
    """
    task = task_of(env)
    of = "-".join(filter(None, (element_of(env), time.strftime("%Y%m%d-%H%M%S"))))
    # A script's name may have the maximum length of a file name, and more follows it.
    stem = f"{name[:50]}-{task.job if task else of}"
    stem = "".join(c if c.isalnum() or c in "._-" else "_" for c in stem)
    why: list[str] = []
    if requested is not None:
        requested, missing = filled(requested, env)
        why += [f"{', '.join(missing)} in its name is not known here"] if missing else []
    last = _temporary(env) / stem
    for first, is_named in ((requested or Path("runs", stem), requested is not None), (last, False)):
        try:
            if first == last:
                make_ours(last.parent)
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
    """Create the first of these folders that does not exist and return it; None if all exist. Raises OSError."""
    for folder in folders:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    return None


def _temporary(env: Mapping[str, str]) -> Path:
    """Return the last resort for runs of this user: a folder next to which everybody may write."""
    try:
        return Path(env.get("TMPDIR") or tempfile.gettempdir(), f"dlprof-{os.getuid()}").absolute()
    except OSError:  # Python finds no writable folder
        return Path("/tmp", f"dlprof-{os.getuid()}")


class RunFolder:
    """The folder of a run: this process writes its run.json, alone or with the other tasks of its job."""

    def __init__(self, path: Path, command: Sequence[str], options: Mapping[str, Any], env: Mapping[str, str]) -> None:
        """Create the folder, or this task's part of the folder that its job already has.

        Raises TakenError if it has another run, and OSError if it cannot be written; then nothing is changed.
        """
        self.named = path
        self.path = path = path.absolute()
        self.made = False  # whether this task created it
        self.local: Local | None = None
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
            "batch": batch_of(env),
            "resumed_ns": [],
            "warnings": [],
            "tasks": [],
        }
        # Of thousands of tasks, most find the folder already there and create only their own file.
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
        """Create the folder; another task may do so at the same time. Raises TakenError, OSError."""
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
                with contextlib.suppress(OSError):  # not empty: another task uses it
                    folder.rmdir()
            raise

    def _create(self, path: Path, record: Mapping[str, Any]) -> None:
        """Write a file that does not exist yet, completely or not at all. Raises TakenError, OSError."""
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

    def record_at(self, place: str) -> str:
        """Let the ranks of this host record below a place on a disk of their own; return why not, or ""."""
        try:
            self.local = Local(self.path, place, self._record)
        except (OSError, ValueError) as e:
            return f"--local {place}: {reason(e) if isinstance(e, OSError) else e}; the ranks record into {self.named}"
        return ""

    @property
    def records(self) -> Path:
        """Where the ranks of this host record while they run."""
        return self.path if self.local is None else self.local.folder

    @cached_property
    def ranks(self) -> list[Path]:
        """The folders of the ranks of this command, which has ended; for one of several tasks, of those on its host."""
        if self._task is None:
            return list(run_folder.in_ranks(self.records))
        ours = [word.folder for word in words_here(self.records) if word.supervisor == str(os.getpid())]
        return [self.records / "ranks" / folder for folder in ours]

    @property
    def hosts(self) -> list[Path]:
        """The folders of the hosts of this command; for one of several tasks, that of its host."""
        if self._task is None:
            return run_folder.in_hosts(self.records)
        return [run_folder.host_folder(self.records, os.uname().nodename)]

    def end(self, of_all: Callable[[], list[str]], **end: Any) -> list[str] | None:
        """Write how the command ended: end_ns, exit, resumed_ns and warnings, as in run.json.

        Return None if other tasks still run, or if one that ended at the same time reports on all. Otherwise this
        process must report on the run: return the warnings that `of_all` gives. Raises OSError or ValueError if
        run.json cannot be written or read.
        """
        if self._task is not None:
            return _end_task(self.path, self._task, end, of_all)
        more = of_all()
        write(self.path / "run.json", json.dumps(self._record | end | {"warnings": [*end["warnings"], *more]}))
        return more

    def unended(self, within_s: float) -> list[str]:
        """Return the tasks of this job that do not end within some seconds, as those of a node that is lost."""
        until = time.monotonic() + within_s
        while True:
            there = [path for path in run_folder.in_tasks(self.path) if path.suffix == ".json"]
            left = [path.stem for path in there if not path.with_suffix(".ended").exists()]
            if not left or time.monotonic() > until:
                return left
            time.sleep(_LOOK_S)


def compress(ranks: Iterable[Path]) -> None:
    """Compress the trace*.json of ranks to trace*.json.gz; a file that cannot be compressed stays as it is."""
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
    """Return why a task cannot record into a folder, as part of a sentence; "" if it can.

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

    Tasks on several hosts may end at the same time, and their shared disk often does not support locks. So each task
    writes first and then checks: the last writer sees that all have ended. Most check only the few hundred tasks in the
    same folder: if thousands of tasks each checked thousands, a shared disk would be busy for minutes.
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
        ended_record = run_folder.together(_tasks(folder))
        ended_record["warnings"] += [text for text in more if text not in ended_record["warnings"]]
        write(folder / "run.json", json.dumps(record | ended_record))
        written = ended
    return more


def _all_ended(tasks: Path) -> int:
    """Return the number of tasks if all of them have ended, otherwise 0."""
    with os.scandir(tasks) as found:
        groups = [tasks, *(tasks / entry.name for entry in found if entry.is_dir())]
    counts = []
    for group in groups:
        counts.append(_ended(group))
        if counts[-1] is None:
            return 0
    return sum(filter(None, counts))


def _ended(group: Path) -> int | None:
    """Return the number of tasks in a folder if all of them have ended, otherwise None."""
    suffixes = [path.suffix for path in group.iterdir()]
    begun, ended = suffixes.count(".json"), suffixes.count(".ended")
    return begun if ended == begun else None


def _tasks(folder: Path) -> list[dict[str, Any]]:
    """Return what the tasks of a job have written; a task with an incomplete file has not ended."""
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
    except OSError:  # the folder was deleted; the command may run there all the same
        return os.environ.get("PWD", "/")


def _begun(path: Path) -> dict[str, Any]:
    """Return the contents of run.json, which another task may be writing right now; {} if it cannot be read."""
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
