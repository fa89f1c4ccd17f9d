"""Creates the folder of a run, and records there what runs and how it ended, for one command or all tasks of a job.

The folder is all that the tasks share: no process knows all of them, and their shared disk may not support locks. Each
writes files of its own. run.json is written twice: when a task creates the folder, and when the last task ends. Which
task of which job a command is, its environment says.

Ranks may record on a disk of their node, and what is there goes into the folder when the command has ended: shared
disks are slow to make files, and a trace is written while the ranks wait for each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import json
import os
import re
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from dlprof import redaction, run_folder
from dlprof.errors import DlprofError, reason
from dlprof.files import boot, longer, make_ours, whole, write
from dlprof.marks import __version__
from dlprof.record.launch.process import started
from dlprof.record.log import Log
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
    and the time; else it may have patterns, as `filled` says. If the path has another run or is not a folder, the
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
        # Of thousands of tasks, most find the folder already there.
        if task is None or not (path / "run.json").exists():
            self._make(many_hosts=host_count(env, command) > run_folder.MANY_HOSTS)
        if task is not None:
            if why := _why_not(path, task):
                raise TakenError(f"{self.named} {why}")
            begun = {name: self._record[name] for name in ("command", "start_ns", "end_ns", "exit")}
            _append(path, task, "begun", {"host": task.host, "number": task.number} | begun)

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
            left = [name for name, one in _tasks(self.path).items() if one.get("end_ns") is None]
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
    """Return the file in which the tasks of this one's host write how they ended."""
    return run_folder.task_file(folder, task.host, boot())


def _append(folder: Path, task: Task, log: str, said: Mapping[str, Any]) -> None:
    """Append a line to the file of this host's tasks, which several processes write. Raises OSError."""
    path = _task_file(folder, task)
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(Log(path)) as file:
        file.write(f"{run_folder.begins(log)}{json.dumps({'task': task.name, **said})[1:]}\n")


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
    with contextlib.suppress(FileNotFoundError):
        if task.name in run_folder.tasks_in(_task_file(folder, task)):
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
    writes first and then checks: the last writer sees that all have ended.
    """
    _append(folder, task, "ended", end)
    more: list[str] | None = None
    written = 0
    while (ended := _all_ended(folder, task)) > written:
        try:
            (folder / "tasks" / f"{ended}-ended").open("x").close()
        except FileExistsError:
            break
        more = of_all()
        record = json.loads((folder / "run.json").read_text())
        ended_record = run_folder.together([*_tasks(folder).values()])
        ended_record["warnings"] += [text for text in more if text not in ended_record["warnings"]]
        write(folder / "run.json", json.dumps(record | ended_record))
        written = ended
    return more


def _all_ended(folder: Path, task: Task) -> int:
    """Return the number of tasks if all of them have ended, otherwise 0.

    It reads the file of its own host first, then those that follow: of thousands of hosts that end one after the other,
    most find one soon that has not, instead of reading all.
    """
    ours = _task_file(folder, task)
    count = _ended(ours)
    files = sorted(run_folder.in_tasks(folder)) if count else []
    at = files.index(ours) if ours in files else 0
    for path in files[at + 1 :] + files[:at]:
        if not (more := _ended(path)):
            return 0
        count += more
    return count


def _ended(path: Path) -> int:
    """Return the number of tasks in a file if all of them have ended, otherwise 0."""
    tasks = run_folder.tasks_in(path)
    return len(tasks) if all(one.get("end_ns") is not None for one in tasks.values()) else 0


def _tasks(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what the tasks of a job have written, by their names and in order of these."""
    found = {name: one for path in run_folder.in_tasks(folder) for name, one in run_folder.tasks_in(path).items()}
    return dict(sorted(found.items()))


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


# -- on a disk of the node

_HERE = "supervisors"  # a file for each that records here


class Local:
    """The folder on this node's disk that the ranks of a run record into, below a place such as $TMPDIR."""

    def __init__(self, run: Path, place: str, record: Mapping[str, Any]) -> None:
        """Make it, with the run.json that commands need that watch the job. Raises OSError, ValueError."""
        base = os.path.expandvars(place)
        if "$" in base:
            raise ValueError(f"{place} is not set")
        self.run, name = run, f"{run.name}-{zlib.crc32(os.fsencode(run)):08x}"
        self.folder = Path(base).absolute() / name
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        make_ours(self.folder)
        with self._alone():
            for folder in ("ranks", _HERE):
                (self.folder / folder).mkdir(exist_ok=True)
            self._sign = self.folder / _HERE / str(os.getpid())
            self._sign.touch()
            if not (self.folder / "run.json").exists():
                write(self.folder / "run.json", json.dumps(record))

    def end(self, ranks: Iterable[Path]) -> list[str]:
        """Put these ranks' folders and this host's into the run folder; return a line where that cannot be done."""
        host = os.uname().nodename
        try:
            with self._alone():
                for rank in ranks:
                    _copy(rank, self.run / "ranks" / rank.relative_to(self.folder / "ranks"))
                    shutil.rmtree(rank, ignore_errors=True)
                _copy(run_folder.host_folder(self.folder, host), _host_of(self.run, host))
                self._sign.unlink(missing_ok=True)
                if not any((self.folder / _HERE).iterdir()) and not any(run_folder.in_ranks(self.folder)):
                    shutil.rmtree(self.folder, ignore_errors=True)
        except OSError as e:
            why = reason(e) if e.errno else "some files cannot be copied"  # a list of them, of shutil
            left = f"what {host} recorded could not be copied ({why}): it is still there, in {self.folder}"
            return [f"{left}; copy its folders `ranks` and `hosts` into the run folder"]
        return []

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep the other supervisors of this node from their folder: its disk is no network's, and has locks."""
        with (self.folder / ".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _host_of(run: Path, host: str) -> Path:
    """Return this host's folder of a run; another one may have its name."""
    folder = run_folder.host_folder(run, host)
    theirs = run_folder.boot_of(folder)
    return folder.with_name(longer(folder.name, boot())) if theirs and theirs != boot() else folder


def _copy(source: Path, target: Path) -> None:
    """Copy what is in a folder; nothing where there is none. Raises OSError."""
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True, copy_function=shutil.copyfile)


# -- tasks: which of which job a command is

# Variables with the number of a task among those that one launcher has started.
_NUMBERS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")

# Variables in which torchrun names the job to its ranks; ranks that it restarts after a failure are another job.
_ELASTIC = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")

# Variables with the number of hosts of a job; torchrun may give a range.
_HOSTS = ("SLURM_STEP_NUM_NODES", "PET_NNODES", "SLURM_NNODES")
# Variables with the number of ranks, and of those on this host.
_SIZES = (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))

# Variables with a scheduler's job, and how often the scheduler has restarted it.
_BATCH = (
    ("SLURM", "SLURM_HET_JOB_ID", "SLURM_RESTART_COUNT"),  # of several allocations
    ("SLURM", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
    ("PBS", "PBS_JOBID", ""),
    ("LSF", "LSB_JOBID", ""),
)
# The array that a scheduler's job is an element of, and its index there.
_ARRAY = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")

# What may stand in the name of a run folder, as in the file names of srun, and the variables with its value.
_PATTERNS = {
    "j": ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"),
    "A": ("SLURM_ARRAY_JOB_ID", "SLURM_JOB_ID"),
    "a": ("SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX", "LSB_JOBINDEX"),
    "s": ("SLURM_STEP_ID",),
    "t": _NUMBERS,
    "n": ("SLURM_NODEID",),
    "x": ("SLURM_JOB_NAME", "PBS_JOBNAME", "LSB_JOBNAME"),
}
_PATTERN = re.compile(r"%([0-9]?)([jAastnhx%])")


class Task(NamedTuple):
    """One of several supervisors that record parts of one job into one folder."""

    job: str
    host: str
    number: str | None  # among the launcher's tasks; None if the job was started host by host
    batch: str | None  # the scheduler's job, if any

    @property
    def name(self) -> str:
        """Its name among the tasks of its job; several hosts may have the same name."""
        return longer(self.host, boot()) if self.number is None else f"{self.host}-{self.number}"


def task_of(env: Mapping[str, str]) -> Task | None:
    """Return which task of which job this is, if each starts its own supervisor (mpirun, srun, torchrun, --job).

    Return None if there is only this one.
    """
    job = _job(env)
    return None if job is None else Task(job, os.uname().nodename, number_of(env), batch_of(env))


def number_of(env: Mapping[str, str]) -> str | None:
    """Return the number that the launcher gave this task; None if it gave none."""
    names = ("RANK", *_NUMBERS) if _of_torchrun(env) else _NUMBERS
    return next((env[name] for name in names if env.get(name)), None)


def batch_of(env: Mapping[str, str]) -> str | None:
    """Return the name of the scheduler's job of a process; None if it has none. A requeued job is another one."""
    for scheduler, name, restarts in _BATCH:
        if env.get(name):
            again = env.get(restarts, "0")
            number = element_of(env) or env[name]
            return f"{scheduler} job {number}" + (f" (restart {again})" if again not in ("", "0") else "")
    return None


def element_of(env: Mapping[str, str]) -> str:
    """Return which element of a scheduler's array of jobs this is, as SLURM names it (12_3); "" if it is of none."""
    found = [env.get(name, "") for name in _ARRAY]
    return "_".join(found) if all(found) else ""


def filled(path: Path, env: Mapping[str, str]) -> tuple[Path, list[str]]:
    """Put the job's own names into a path as srun does into its file names: %j, %A, %a, %s, %t, %n, %h, %x, %%.

    A digit is a width: %4t is 0007. Return the path, and the patterns of which nothing is known here; these stay.
    """
    missing: list[str] = []

    def value(found: re.Match[str]) -> str:
        width, letter = found.groups()
        if letter == "%":
            return "%"
        host = os.uname().nodename.partition(".")[0] if letter == "h" else ""
        text = host or next((env[name] for name in _PATTERNS.get(letter, ()) if env.get(name)), "")
        if not text:
            missing.append(found[0])
            return found[0]
        return "".join(c if c.isalnum() or c in "._-" else "_" for c in text.rjust(int(width or 0), "0"))

    return Path(_PATTERN.sub(value, str(path))), missing


def host_count(env: Mapping[str, str], command: Sequence[str]) -> int:
    """Return the number of hosts of a job according to its launcher; 1 if that is unknown.

    `command` may start a launcher itself: torchrun --nnodes 2048.
    """
    parts = [word.partition("=") for word in command]
    after = [*(word for word, _, _ in parts[1:]), ""]
    given = [value or word for (name, _, value), word in zip(parts, after, strict=False) if name == "--nnodes"]
    named = [text.rpartition(":")[2] for text in (*(env.get(name, "") for name in _HOSTS), *given)]
    sizes = [(env.get(every, ""), env.get(here, "")) for every, here in _SIZES]
    counted = [int(every) // max(int(here), 1) for every, here in sizes if every.isdigit() and here.isdigit()]
    return max([1, *(int(text) for text in named if text.isdigit()), *counted])


def _job(env: Mapping[str, str]) -> str | None:
    """Return the name of the job that this is a task of, given by launcher or user; None if there is one task."""
    if env.get("DLPROF_JOB"):
        return env["DLPROF_JOB"]
    if _of_torchrun(env):
        return "-".join(env[name] for name in _ELASTIC if name in env)
    if env.get("OMPI_COMM_WORLD_SIZE", "1") != "1":
        return env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")
    # The number of this step: SLURM_NTASKS is that of the allocation, even for one process in a script or a shell.
    if env.get("SLURM_STEP_ID") and env.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        again = env.get("SLURM_RESTART_COUNT", "0")  # a requeued job has the same number
        return f"{element_of(env) or env.get('SLURM_JOB_ID')}.{env['SLURM_STEP_ID']}" + (
            f"-r{again}" if again not in ("", "0") else ""
        )
    if env.get("PMI_SIZE", "1") != "1":
        # MPICH and Intel MPI give the job no name: the parent of all its tasks on this host has one for it.
        parent = os.getppid()
        since = started(parent)
        return None if since is None else f"{os.uname().nodename}-{parent}-{since}"
    return None


def _of_torchrun(env: Mapping[str, str]) -> bool:
    """Return whether this is one of several ranks that torchrun has started."""
    return bool(env.get("TORCHELASTIC_RUN_ID")) and env.get("WORLD_SIZE", "1") != "1"
