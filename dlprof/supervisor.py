"""Starts the user's command unchanged, with the recorder's hook on PYTHONPATH, and ends as the command ended.

The command is a child in the same process group, on the same terminal, with the same stdin, stdout and stderr. This
process sits beside it, passes on the signals that reached nobody else, and waits. Beside both, where DLPROF_SAMPLE asks
for it, a process of ours reads what the host and its GPUs do (sampling.py). Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import gzip
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dlprof import __version__
from dlprof.errors import DlprofError

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
# How long the end of the command may wait for the samplers; what they measured is on disk by then.
_SAMPLERS_END_S = 1.0
_SAMPLERS_NICE = 10
# Sooner after their start than this they have nothing to tell, and are not waited for.
_SAMPLERS_SOONEST_S = 1.0

_SI_KERNEL = 0x80  # <asm-generic/siginfo.h>: sent by the kernel, as the terminal's Ctrl-C is, to the whole group

_PASSED_ON = {
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
    signal.SIGTSTP,
    *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
}

# What the witness runs: it tells which signals reach it, and from whom.
_WITNESS = """
import os, signal, sys
while True:
    seen = signal.sigwaitinfo([int(number) for number in sys.argv[1:]])
    os.write(1, b"%d %d\\n" % (seen.si_signo, seen.si_pid))
"""
# How long a signal may take to reach all whom its sender named; so long one to this process alone is held back.
_TOGETHER_S = 0.1

# How long ranks may take to end after the command, as those of a launcher that was signalled together with them.
_LEAVING_S = 1.0
_MOST_TOLD = 16

# Of more tasks than this only the last to end reads what all have said: thousands that each read what thousands wrote
# would keep a shared disk busy for minutes. The reader looks itself where that one never came.
_MOST_READ = 64

# What tells a task its number among those that one launcher has started.
TASK_NUMBERS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


class Task(NamedTuple):
    """One of several supervisors that record parts of one job into one folder."""

    job: str
    host: str
    number: str | None  # among the launcher's tasks; None: the job was started host by host

    @property
    def name(self) -> str:
        """Name it among the tasks of its job."""
        return self.host if self.number is None else f"{self.host}-{self.number}"


@dataclass(frozen=True)
class Ended:
    """How the command ended, and where its recording is."""

    folder: Path
    code: int | None
    signal: int | None
    warnings: tuple[str, ...]
    # False: other tasks of the same job still run, or one that ended at the same time reports on all.
    last: bool


def supervise(
    command: Sequence[str],
    folder: Path,
    env: Mapping[str, str],
    options: Mapping[str, Any],
    launcher: Sequence[str] = (),
) -> Ended:
    """Run the command with that environment, record it into the folder, and tell how it ended.

    `launcher` are words to start it with, in which "{}" stands for the folder of what is recorded on this host.
    Raises DlprofError if the folder cannot be made or already holds a run. A command that cannot be started ends with
    127 (not found) or 126 (not executable), as in a shell.
    """
    if not hasattr(signal, "sigwaitinfo") or not sys.platform.startswith("linux"):
        raise DlprofError("recording needs Linux; reports can be made anywhere")
    folder = folder.absolute()
    task = task_of(env)
    record: dict[str, Any] = {
        "format": 1,
        "dlprof": __version__,
        "command": list(command),
        "cwd": str(Path.cwd()),
        "start_ns": time.time_ns(),
        "end_ns": None,
        "hosts": [os.uname().nodename],
        "exit": {"code": None, "signal": None},
        "options": dict(options) | ({"job": task.job} if task else {}),
        "warnings": [],
        "tasks": [],
    }
    _claim(folder, record, task)
    here = folder / "hosts" / os.uname().nodename
    if launcher:
        with contextlib.suppress(OSError):
            here.mkdir(parents=True, exist_ok=True)
    samplers = _Samplers(folder, env)
    status = _run([*(word.replace("{}", str(here)) for word in launcher), *command], recorded(env, folder), samplers)
    end_ns = time.time_ns()
    samplers.end()
    code, number = (None, os.WTERMSIG(status)) if os.WIFSIGNALED(status) else (os.WEXITSTATUS(status), None)
    warnings = [] if code in (126, 127) else missing(folder)
    warnings += _left(folder)
    _compress(folder)
    warnings += samplers.wait()
    end = {"end_ns": end_ns, "exit": {"code": code, "signal": number}, "warnings": warnings}
    last = True
    try:
        if task is None:
            _write(folder / "run.json", record | end)
        else:
            last = _end_task(folder, task, end)
    except (OSError, ValueError) as e:
        warnings.append(f"run.json has no end: {e}")
    return Ended(folder, code, number, tuple(warnings), last)


def new_folder(name: str, env: Mapping[str, str]) -> Path:
    """Give a folder under ./runs that is not taken: by name and time, or one for all tasks of a job.

    A task that records several times, as a script of several commands does, has a folder for each time.
    """
    runs = Path("runs")
    task = task_of(env)
    stem = f"{name}-{task.job if task else time.strftime('%Y%m%d-%H%M%S')}"
    for n in range(1000):
        folder = runs / (f"{stem}-{n}" if n else stem)
        if task is not None:
            if not _word_of(folder, task).exists():
                return folder
            continue
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as e:
            raise DlprofError(f"cannot make a run folder: {e}; choose another place with -o") from None
        return folder
    raise DlprofError(f"{runs / stem}: too many runs of that name in one second; choose a folder with -o")


def task_of(env: Mapping[str, str]) -> Task | None:
    """Tell which task of which job this is where each starts a supervisor of its own (mpirun, srun, --job).

    None: there is only this one.
    """
    job = _job(env)
    number = next((env[name] for name in TASK_NUMBERS if env.get(name)), None)
    return None if job is None else Task(job, os.uname().nodename, number)


def recorded(env: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Give the environment with the hook first on PYTHONPATH and the run folder named."""
    inject = str(Path(__file__).parent / "inject")
    # An empty entry would put the current directory on the path: only add what there is.
    path = os.pathsep.join(p for p in (inject, env.get("PYTHONPATH", "")) if p)
    return {**env, "PYTHONPATH": path, "DLPROF_RUN": str(folder), "DLPROF_SUPERVISOR": str(os.getpid())}


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


def end_like(ended: Ended) -> None:
    """End this process with the command's exit code, or by the signal that ended the command."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    if ended.signal is not None:
        import resource

        # The command has left its core, if any; ours would be about the wrong program.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if ended.signal not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(ended.signal, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {ended.signal})
        os.kill(os.getpid(), ended.signal)
        sys.exit(128 + ended.signal)  # a signal whose default is not to end: as a shell says
    sys.exit(ended.code)


def _claim(folder: Path, record: Mapping[str, Any], task: Task | None) -> None:
    """Make the folder ours, or this task's part of a folder that its job has already."""
    path = folder / "run.json"
    try:
        (folder / "ranks").mkdir(parents=True, exist_ok=True)
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


def _word_of(folder: Path, task: Task) -> Path:
    """Give the file in which a task says how it ended."""
    return folder / "tasks" / f"{task.name}.json"


def _end_task(folder: Path, task: Task, end: Mapping[str, Any]) -> bool:
    """Write how this task ended, and run.json from what all tasks said; tell whether this one is to report on all.

    Tasks end at the same time on several hosts, and the disks that these share often know no locks. So each looks again
    once it has written: whoever wrote last has seen all. Raises OSError or ValueError where run.json cannot be read.
    """
    word = _word_of(folder, task)
    _write(word, json.loads(word.read_text()) | end)
    word.with_suffix(".ended").touch()
    suffixes = [path.suffix for path in word.parent.iterdir()]
    begun, ended = suffixes.count(".json"), suffixes.count(".ended")
    if ended < begun and begun > _MOST_READ:
        return False
    written: list[dict[str, Any]] | None = None
    while (tasks := _tasks(folder)) != written:
        record = json.loads((folder / "run.json").read_text())
        _write(folder / "run.json", record | _together(tasks))
        written = tasks
    if not all(one.get("end_ns") for one in tasks):
        return False
    try:
        (word.parent / f"{len(tasks)}-ended").open("x").close()
    except FileExistsError:
        return False
    return True


def _tasks(folder: Path) -> list[dict[str, Any]]:
    """Give what the tasks of a job have said of themselves; one that is about to has not ended."""
    said = []
    for path in sorted((folder / "tasks").glob("*.json")):
        try:
            said.append(json.loads(path.read_text()))
        except ValueError:  # noqa: PERF203 - each may be half written
            said.append({"host": None, "number": None, "end_ns": None})
    return said


def _together(tasks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Give what run.json says of a job of several tasks: its exit is that of the first task to fail."""
    ended = sorted((task for task in tasks if task.get("end_ns")), key=lambda task: task["end_ns"])
    all_ended = len(ended) == len(tasks)
    failed = [task["exit"] for task in ended if task["exit"]["code"] != 0]
    good = {"code": 0 if all_ended else None, "signal": None}
    return {
        "end_ns": ended[-1]["end_ns"] if all_ended else None,
        "exit": failed[0] if failed else good,
        "hosts": list(dict.fromkeys(task["host"] for task in tasks if task["host"])),
        "warnings": list(dict.fromkeys(text for task in ended for text in task["warnings"])),
        "tasks": list(tasks),
    }


def _left(folder: Path) -> list[str]:
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
    """List rank and process of what still runs of this supervisor's command, and has trained."""
    ours = f"DLPROF_SUPERVISOR={os.getpid()}".encode()
    found = []
    for word in (folder / "hosts" / os.uname().nodename).glob("rank-*"):
        pid = word.name.removeprefix("rank-")
        try:
            if pid.isdigit() and ours in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append((int(word.read_text().partition(".")[0]), int(pid)))
        except (OSError, ValueError):
            continue
    return sorted(found)


def _job(env: Mapping[str, str]) -> str | None:
    """Name the job that this is a task of, as its launcher or the user does; None: it has one task."""
    if env.get("DLPROF_JOB"):
        return env["DLPROF_JOB"]
    if env.get("OMPI_COMM_WORLD_SIZE", "1") != "1":
        return env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")
    # Of this step: SLURM_NTASKS is the allocation's, where one process in a batch script or a shell is its own job.
    if env.get("SLURM_STEP_ID") and env.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return f"{env.get('SLURM_JOB_ID')}.{env['SLURM_STEP_ID']}"
    if env.get("PMI_SIZE", "1") != "1":
        return _process_manager()
    return None


def _process_manager() -> str | None:
    """Name what has started this host's tasks of an MPI job (MPICH's and Intel's tell no name): the one parent of all.

    The tasks of another host have another.
    """
    parent = os.getppid()
    try:
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
    return f"{os.uname().nodename}-{parent}-{started}"


def _job_of(path: Path) -> str | None:
    """Give the job that a run belongs to; another task may be writing run.json at this moment."""
    for _ in range(20):
        try:
            return str(json.loads(path.read_text())["options"].get("job"))
        except (OSError, ValueError, KeyError, AttributeError):  # noqa: PERF203 - that is what the loop is for
            time.sleep(0.05)
    return None


def _write(path: Path, record: Mapping[str, Any]) -> None:
    unfinished = _unfinished(path)
    unfinished.write_text(json.dumps(record))
    unfinished.replace(path)


def _unfinished(path: Path) -> Path:
    """Name a file until it is whole: other supervisors, here and on other hosts, may be writing the same one."""
    return path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")


class _Samplers:
    """The process that samples this host beside the command; there is none where nobody asked for it."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self._folder = folder
        # Not the recorded environment: this process is none of the job's.
        self._env = {name: value for name, value in env.items() if name != "DLPROF_RUN"}
        self._process: subprocess.Popen[bytes] | None = None
        self._failed: str | None = None
        self._started_s = time.monotonic()

    def start(self, mask: Any) -> None:
        """Start it; the command runs already, and has this process's signal mask from before."""
        if self._env.get("DLPROF_SAMPLE", "off") == "off":
            return
        supervisor = os.getpid()
        libc = ctypes.CDLL(None)

        def before_exec() -> None:
            # Nothing of ours outlives this process, however it ends. What was measured is on disk.
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != supervisor:
                os._exit(0)
            os.nice(_SAMPLERS_NICE)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

        try:
            self._process = subprocess.Popen(
                [sys.executable, Path(__file__).parent / "samplers" / "__main__.py", self._folder],
                env=self._env,
                cwd="/",
                # Its end is how they know that the job is over.
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                # Out of the reach of the terminal: its Ctrl-C is for the job.
                start_new_session=True,
                preexec_fn=before_exec,
            )
        except (OSError, subprocess.SubprocessError) as e:
            self._failed = f"nothing is sampled: {e}"

    def end(self) -> None:
        """Tell it that the command has ended."""
        if self._process is None or self._process.stdin is None:
            return
        if self._process.poll() is not None:
            self._failed = f"the samplers ended before the job (status {self._process.returncode})"
        self._process.stdin.close()
        if time.monotonic() - self._started_s < _SAMPLERS_SOONEST_S:
            self._process.kill()

    def wait(self) -> list[str]:
        """See it gone, and tell in at most one line what went wrong."""
        if self._process is not None:
            try:
                self._process.wait(_SAMPLERS_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        return [self._failed] if self._failed else []


class _Witness:
    """A process that does nothing but sit in the command's process group, to tell who a signal was for.

    A scheduler may signal the whole group, or every process of the job. Then the command has had the signal, and would
    have it twice if it were passed on: many a script takes the second for "at once, and without a checkpoint".
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._seen: list[tuple[float, list[bytes]]] = []

    def start(self) -> None:
        """Start it; without it every signal to this process is passed on."""
        supervisor = os.getpid()
        libc = ctypes.CDLL(None)

        def before_exec() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != supervisor:
                os._exit(0)
            signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)

        with contextlib.suppress(OSError, subprocess.SubprocessError):
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _WITNESS, *(str(int(number)) for number in sorted(_PASSED_ON))],
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                preexec_fn=before_exec,
            )

    def saw(self, info: signal.struct_siginfo) -> bool:
        """Tell whether the same signal, of the same sender, has reached the witness too."""
        if self._process is None or self._process.stdout is None:
            return False
        same = b"%d %d" % (info.si_signo, info.si_pid)
        fd = self._process.stdout.fileno()
        until = time.monotonic() + _TOGETHER_S
        while True:
            now = time.monotonic()
            # What reached it alone has nothing to do with what comes later.
            self._seen = [(at, lines) for at, lines in self._seen if lines and now - at < 10 * _TOGETHER_S]
            for _, lines in self._seen:
                if same in lines:
                    lines.remove(same)
                    return True
            if now >= until or not select.select([fd], [], [], until - now)[0]:
                return False
            told = os.read(fd, 4096)
            if not told:
                return False
            self._seen.append((time.monotonic(), told.splitlines()))

    def end(self) -> None:
        """End it."""
        if self._process is not None and self._process.stdout is not None:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()


def _run(command: Sequence[str], env: Mapping[str, str], samplers: _Samplers) -> int:
    """Run the command to its end and give its wait status."""
    watched = {signal.SIGCHLD, *_PASSED_ON}
    # A parent may have left SIGCHLD ignored, and the kernel would then reap the child before we ask.
    chld = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    witness = _Witness()
    try:
        try:
            child = _start(command, env, mask, chld)
            witness.start()
            samplers.start(mask)
        except FileNotFoundError:
            sys.stderr.write(f"dlprof: {command[0]}: command not found\n")
            return 127 << 8
        except OSError as e:
            sys.stderr.write(f"dlprof: {command[0]}: {e.strerror}\n")
            return 126 << 8
        while True:
            # Another thread of this process, if there is one, may have been given the SIGCHLD: look once a second.
            info = signal.sigtimedwait(watched, 1.0)
            if info is None or info.si_signo == signal.SIGCHLD:
                pid, status = os.waitpid(child.pid, os.WNOHANG)
                if pid:
                    child.returncode = os.waitstatus_to_exitcode(status)
                    return status
            else:
                _pass_on(child.pid, info, witness)
    finally:
        witness.end()
        # What arrived for the command while it ended is not meant for the report.
        while signal.sigtimedwait(watched, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGCHLD, chld if chld is not None else signal.SIG_DFL)


def _pass_on(child: int, info: signal.struct_siginfo, witness: _Witness) -> None:
    """Give the child a signal that reached only this process; stop with it where it is told to stop."""
    number = info.si_signo
    if info.si_code != _SI_KERNEL and not witness.saw(info):
        try:
            os.kill(child, number)
        except ProcessLookupError:
            return
    if number == signal.SIGTSTP:
        # Stop as anybody would, and go on here when continued.
        os.kill(os.getpid(), signal.SIGTSTP)
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _start(command: Sequence[str], env: Mapping[str, str], mask: Any, chld: Any) -> subprocess.Popen[bytes]:
    supervisor = os.getpid()
    libc = ctypes.CDLL(None)

    def before_exec() -> None:
        # Should this process be killed, the command must not run on unseen. It may have been killed just now.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != supervisor:
            os.kill(os.getpid(), signal.SIGTERM)
        if chld == signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    # Inherited descriptors (a shell's <(...) or 3<file) are the command's own: keep them.
    return subprocess.Popen(command, env=dict(env), close_fds=False, preexec_fn=before_exec)


def _compress(folder: Path) -> None:
    """Turn the ranks' trace*.json into trace*.json.gz; one that cannot be compressed stays as it is."""
    for path in sorted(folder.glob("ranks/*/trace*.json")):
        done = path.with_name(path.name + ".gz")
        unfinished = _unfinished(done)
        try:
            with path.open("rb") as source, _gzip(unfinished) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            unfinished.replace(done)
            path.unlink(missing_ok=True)
        except (OSError, EOFError):
            try:
                unfinished.unlink(missing_ok=True)
            except OSError:
                continue


def _gzip(path: Path) -> Any:
    try:
        from isal import igzip

        opener: Any = igzip.open
    except ImportError:
        return gzip.open(path, "wb", compresslevel=1)
    return opener(path, "wb")
