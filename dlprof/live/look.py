"""The processes of jobs as the kernel and py-spy show them at one moment, and what they do by their stacks.

Nothing in them is changed or stopped. Only the processes of this user are looked at. Of their environment no more is
read than a launcher's numbers and the run that they record into; of their commands only a short, redacted form is kept.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from dlprof import redaction
from dlprof.live import locks
from dlprof.plain import plain
from dlprof.record.launch.process import family, has_ended, stats
from dlprof.record.ranks import RANKS, SIZES
from dlprof.record.samplers.stacks import find as find_py_spy

_TICKS = os.sysconf("SC_CLK_TCK")
_LONGEST_S = 20.0  # that py-spy may take for one process
_AT_ONCE = 8
_MOST_FRAMES = 120
_MOST_FILES, _MOST_PLACES = 500, 8

_DRIVERS = (b"/libcuda.so", b"/libamdhip64.so")

_NUMBERS = {"rank": RANKS, "size": SIZES}
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_ID")


class Frame(NamedTuple):
    """A function that runs, or has called the one before it in a stack."""

    function: str
    file: str
    line: int


@dataclass(frozen=True)
class Thread:
    """A thread of Python, its innermost frame first. `active`: it was on a core, or wanted one."""

    name: str
    main: bool
    active: bool
    gil: bool
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class Process:
    """A process of this user's, from /proc.

    `state`: the kernel's letter. `waits`: the kernel's name for what its main thread waits in, "" if it does not say.
    `gpu`: the library of a GPU's driver is loaded in it.
    `dead`: its children that have ended and that it has not looked after, each with its wait status.
    """

    pid: int
    parent: int
    state: str
    age_s: float
    cpu_s: float
    rss_bytes: int
    command: str
    torch: bool
    gpu: bool = False
    waits: str = ""
    rank: int | None = None
    size: int | None = None
    job: str = ""  # SLURM's numbers of the job and its step
    run: str = ""  # the folder that it records into
    places: tuple[Path, ...] = ()  # where it works, and has files open to write
    dead: tuple[tuple[int, int], ...] = ()
    threads: tuple[Thread, ...] = ()
    unseen: str = ""  # why there are no threads
    texts: Mapping[tuple[str, int], str] = field(default_factory=dict)  # of the user's lines, redacted


def mine() -> dict[int, Process]:
    """Return the processes of this user on this host by number, without their stacks; no zombies."""
    me, known = os.getuid(), stats()
    booted_s = _uptime_s()
    gone: dict[int, list[tuple[int, int]]] = {}
    for pid, stat in known.items():
        if stat[0] == b"Z":
            # The last field but one of what the kernel writes, of 52; 0 where this user may not see it.
            gone.setdefault(int(stat[1]), []).append((pid, int(stat[49]) if len(stat) > 49 else 0))
    found = {}
    for pid, stat in known.items():
        place = Path(f"/proc/{pid}")
        try:
            if has_ended(stat) or place.stat().st_uid != me:
                continue
            words = place.joinpath("cmdline").read_bytes().rstrip(b"\0").decode(errors="replace").split("\0")
            maps = place.joinpath("maps").read_bytes()
            torch = b"/libtorch" in maps
            env = _environment(place) if torch else {}
        except OSError:
            continue  # it has just ended, or is not ours after all
        found[pid] = Process(
            pid=pid,
            parent=int(stat[1]),
            state=stat[0].decode(),
            age_s=max(booted_s - int(stat[19]) / _TICKS, 0.0),
            cpu_s=(int(stat[11]) + int(stat[12])) / _TICKS,
            rss_bytes=int(stat[21]) * os.sysconf("SC_PAGE_SIZE"),
            command=_short(words),
            torch=torch,
            gpu=any(driver in maps for driver in _DRIVERS),
            waits=_text(place / "wchan"),
            rank=_number(env, "rank"),
            size=_number(env, "size"),
            job=".".join(env[name] for name in _SLURM if env.get(name)),
            run=env.get("DLPROF_RUN", ""),
            places=_places(place) if torch else (),
            dead=tuple(sorted(gone.get(pid, ()))),
        )
    return found


def below(pid: int, processes: Mapping[int, Process]) -> list[Process]:
    """Return a process and all that it has started, directly or not, as far as they are among `processes`."""
    children = {one.pid: [b"", str(one.parent).encode()] for one in processes.values()}
    return [processes[one] for one in family([pid], children) if one in processes]


def with_stacks(processes: Iterable[Process]) -> list[Process]:
    """Return the processes with what py-spy sees of their threads, a few at a time."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(_with_stack, processes))


def _with_stack(process: Process) -> Process:
    command = find_py_spy()
    if command is None:
        return replace(process, unseen="py-spy is not installed (pip install py-spy)")
    why = ""
    # py-spy does not stop the process, so a stack may change while it reads: then it fails, and is run again.
    for _ in range(4):
        try:
            done = subprocess.run(
                [command, "dump", "--pid", str(process.pid), "--json", "--nonblocking", "--full-filenames"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
                timeout=_LONGEST_S,
            )
            threads = _threads(process.pid, json.loads(done.stdout)) if not done.returncode else ()
        except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError, AttributeError) as e:
            why = f"py-spy: {plain(e, 200)}"
            continue
        if threads:
            return replace(process, threads=threads, texts=texts_of(threads))
        lines = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        denied = next((line for line in lines if "ermission" in line or "not permitted" in line), "")
        why = f"py-spy: {plain(denied or (lines or ['it saw nothing'])[0], 200)}"
        if denied:
            break
    return replace(process, unseen=why)


def _threads(pid: int, seen: Sequence[Mapping[str, Any]]) -> tuple[Thread, ...]:
    return tuple(
        Thread(
            name=str(one.get("thread_name") or ""),
            main=one.get("os_thread_id") == pid,
            active=bool(one.get("active")),
            gil=bool(one.get("owns_gil")),
            frames=tuple(
                Frame(str(frame["name"]), str(frame["filename"]), int(frame["line"]))
                for frame in one["frames"][:_MOST_FRAMES]
            ),
        )
        for one in sorted(seen, key=lambda one: one.get("os_thread_id") != pid)
    )


_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib(?:64)?[/\\]python3|torchinductor_|^<|^$")
_OURS = str(Path(__file__).parents[1]) + os.sep


def is_own(file: str) -> bool:
    """Return whether a file is the user's: neither Python's, nor an installed package's, nor dlprof's.

    By its path alone: the job may run in another Python than this.
    """
    return not _INSTALLED.search(file) and not file.startswith(_OURS)


def line_of(file: str, line: int) -> str:
    """Return the text of a line, redacted, as it is on the disk now; "" where it cannot be read."""
    lines = _source(file)
    return plain(" ".join(lines[line - 1].split()), 120) if 0 < line <= len(lines) else ""


@functools.cache
def _source(file: str) -> list[str]:
    with contextlib.suppress(OSError):
        path = Path(file)
        if path.is_file() and path.stat().st_size < 4_000_000:
            return redaction.source(path.read_text(errors="replace")).splitlines()
    return []


def texts_of(threads: Iterable[Thread]) -> dict[tuple[str, int], str]:
    """Return the text of the innermost line of the user's in each thread, as it is on the disk now."""
    found = {}
    for thread in threads:
        frame = next((frame for frame in thread.frames if is_own(frame.file)), None)
        if frame is not None:
            found[frame.file, frame.line] = line_of(frame.file, frame.line)
    return found


def _environment(place: Path) -> dict[str, str]:
    """Return the variables of a process that this module knows; none where it has written over them."""
    wanted = {"DLPROF_RUN", *_SLURM, *(name for names in _NUMBERS.values() for name in names)}
    found = {}
    with contextlib.suppress(OSError):
        for item in place.joinpath("environ").read_bytes().split(b"\0"):
            name, _, value = item.decode(errors="replace").partition("=")
            if name in wanted:
                found[name] = value
    return found


def _places(place: Path) -> tuple[Path, ...]:
    """Return the folders that a process works in, or has files open in to write; some at most."""
    found: dict[Path, None] = {}
    with contextlib.suppress(OSError):
        found[(place / "cwd").readlink()] = None
        for fd in sorted((place / "fd").iterdir())[:_MOST_FILES]:
            with contextlib.suppress(OSError, IndexError, ValueError):
                file = fd.readlink()
                flags = int(_text(place / "fdinfo" / fd.name).split("flags:")[1].split()[0], 8)
                if flags & os.O_ACCMODE and file.is_absolute() and file.is_file() and len(found) < _MOST_PLACES:
                    found[file.parent] = None
    return tuple(found)


def _number(env: Mapping[str, str], what: str) -> int | None:
    return next((int(env[name]) for name in _NUMBERS[what] if env.get(name, "").isdecimal()), None)


def _short(words: Sequence[str]) -> str:
    """Return what a command runs: the script or module after the interpreter, with as much as may be shown."""
    shown = redaction.words(words)
    if shown and re.search(r"(^|/)python[\d.]*$", shown[0]):
        rest = list(shown[1:])
        while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
            rest.pop(0)
        shown = rest or shown
    return plain(" ".join(shown), 100)


def _uptime_s() -> float:
    return float(Path("/proc/uptime").read_text().split()[0])


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        text = path.read_text().strip()
        return "" if text == "0" else text
    return ""


# Without a free inode no file can be made either.
_FREE = """
import os, sys
disk = os.statvfs(sys.argv[1])
print(disk.f_bavail * disk.f_frsize if disk.f_favail or not disk.f_files else 0)
"""


def disks(paths: Iterable[Path], seconds: float = 2.0) -> list[tuple[str, int | None]]:
    """Return what is free on the disk of each path, in bytes; None: it does not answer within this time."""
    # A process, which a dead network disk keeps as long as it likes; a thread would keep this process.
    asked = []
    for path in dict.fromkeys(map(str, paths)):
        words = [sys.executable, "-S", "-c", _FREE, path]
        nowhere = subprocess.DEVNULL
        process = subprocess.Popen(words, stdin=nowhere, stdout=subprocess.PIPE, stderr=nowhere)
        asked.append((path, process))
    until = time.monotonic() + seconds
    found: list[tuple[str, int | None]] = []
    for path, process in asked:
        try:
            said = process.communicate(timeout=max(until - time.monotonic(), 0.05))[0]
        except subprocess.TimeoutExpired:
            process.kill()
            found.append((path, None))
            continue
        if said.strip().isdigit():
            found.append((path, int(said)))
    return found


# What a process does.


class _Rule(NamedTuple):
    """An activity: a stack with a frame of that file and function is of it. The first rule that fits counts."""

    what: str
    file: str
    function: str = ""


# The functions of torch.distributed that are no collective.
_NO_COLLECTIVE = r"(?!.*(?:wrapper|get_|is_|_check|_validate|_rank|_world|_coalescing|_get_|_object_to|_tensor_to))"

# In this order: a loader's transform may be a module, a hook of backward a collective, and a step of an optimizer may
# run the model again.
_RULES = (
    _Rule(
        "joining",
        r"torch/distributed/(?:rendezvous|distributed_c10d)\.py",
        r"init_process_group|rendezvous|_new_process_group|new_group",
    ),
    _Rule("starting", r"importlib/_bootstrap|^<frozen importlib"),
    _Rule(
        "compile",
        r"torch/_(?:dynamo/(?!eval_frame|utils|external)|inductor/|functorch/_aot)|triton/compiler"
        r"|torch/utils/cpp_extension",
    ),
    _Rule("window", r"torch/(?:profiler/|autograd/profiler\.py)|dlprof/record/recorder\.py"),
    _Rule("checkpoint", r"torch/serialization\.py|torch/distributed/checkpoint/|safetensors/|(?:^|/)orbax/"),
    _Rule("collective", r"torch/distributed/(?:distributed_c10d|_functional_collectives)\.py", _NO_COLLECTIVE + r"\w"),
    _Rule("device", r"torch/(?:cuda|accelerator)/(?:__init__|streams)\.py", r"(?:^|\.)synchronize$"),
    _Rule("loader", r"torch/utils/data/dataloader\.py", r"(?:^|\.)(?:__next__|__iter__|_shutdown_workers)$"),
    _Rule(
        "backward",
        r"torch/autograd/(?:graph|__init__)\.py|torch/_tensor\.py",
        r"(?:^|\.)(?:_engine_run_backward|backward|grad)$",
    ),
    _Rule("optimizer", r"torch/optim/|torch/amp/grad_scaler\.py|torch/nn/utils/clip_grad"),
    _Rule("forward", r"torch/nn/(?:modules|parallel)/"),
)
_NAMED = ("collective", "device", "joining")
_COMPILED = tuple((rule.what, re.compile(rule.file), re.compile(rule.function)) for rule in _RULES)


class Words(NamedTuple):
    """What an activity is called: by itself, and of a rank that others wait for ("{name}" is that of the call)."""

    short: str
    sentence: str


# Of every activity that a rule or `doing` names.
WORDS = {
    "joining": Words("starts", "is in {name}, and waits for others to join the process group"),
    "starting": Words("starts", "is importing modules"),
    "compile": Words("compiles", "is compiling"),
    "window": Words("writes a trace", "is writing the trace of a profiler"),
    "checkpoint": Words("saves", "is saving or loading a checkpoint"),
    "collective": Words("trains (in a collective)", "is in {name}"),
    "wait": Words("trains (in a collective)", "is in .{name}() of a collective"),
    "loader": Words("waits for data", "waits for its loader"),
    "forward": Words("trains", "is in its forward pass"),
    "backward": Words("trains", "is in its backward pass"),
    "optimizer": Words("trains", "is in its optimizer step"),
    "device": Words("trains (waits for its device)", "waits for its device in .{name}()"),
    "lock": Words("waits for a lock", "waits for a lock, or another thread or process"),
    "code": Words("runs Python", "runs Python"),
    "unknown": Words("cannot be looked at", "could not be looked at"),
}

# Who a process is, by its main thread: none of these frames is a rank's.
_ROLE_RULES = (
    _Rule("worker", r"torch/utils/data/_utils/worker\.py", "_worker_loop"),
    _Rule("launcher", r"torch/distributed/(?:elastic/|run\.py|launcher/)|accelerate/commands/"),
    _Rule("launcher", r"torch/multiprocessing/spawn\.py", r"(?:^|\.)(?:join|_join_procs_with_timeout)$"),
    _Rule(
        "helper",
        r"torch/_inductor/compile_worker|concurrent/futures/process\.py"
        r"|multiprocessing/(?:pool|managers|resource_tracker|forkserver)\.py",
        "worker|serve|main",
    ),
)
_ROLES = tuple((rule.what, re.compile(rule.file), re.compile(rule.function)) for rule in _ROLE_RULES)

# Words of the user's line that say that it waits for another process or for the device.
WAITS = re.compile(r"\.(wait|synchronize|item|cpu|tolist|numpy)\(")
_SPINS = ("synchronize", "item", "cpu", "tolist")  # who waits for a GPU asks it again and again, and keeps a core busy

_RECORDER = re.compile(r"(?:^|/)dlprof/record/")

# Where Python waits for another thread or process, innermost.
_LOCKS = re.compile(r"(?:^|/)(?:threading|queue|selectors|subprocess|multiprocessing/\w+|concurrent/.+)\.py$")
_LOCK_TEXT = re.compile(r"\bacquire\(|^with .*lock|\block\b", re.I)


@dataclass(frozen=True)
class Doing:
    """What a process does.

    `what`: one of `WORDS`. `name`: of the collective, or of the call that waits. `file`, `line` and
    `text`: the user's innermost line, "" and 0 where there is none. `idle`: no thread of the process runs. `holder`:
    who holds the lock that it waits for, as the end of a sentence; "" where that is not known.
    """

    role: str
    what: str
    name: str = ""
    file: str = ""
    line: int = 0
    text: str = ""
    function: str = ""
    idle: bool = False
    holder: str = ""

    @property
    def at(self) -> str:
        """The user's line: "train.py:88"; "" for none."""
        return f"{self.file.rpartition('/')[2]}:{self.line}" if self.file else ""


def doing(process: Process) -> Doing:
    """Return what a process does, by its main thread; a process that could not be seen does "unknown"."""
    main = next((thread for thread in process.threads if thread.main), None)
    if main is None:
        return Doing("rank" if process.torch else "other", "unknown")
    # A thread of the recorder works in its own right, as when it answers `dlprof hang`.
    idle = not any(thread.active for thread in process.threads if not _records(thread)) and process.state != "R"
    own = next((frame for frame in main.frames if is_own(frame.file)), None)
    file, line, function = (own.file, own.line, own.function) if own else ("", 0, "")
    text = process.texts.get((file, line), "")
    what, name = activity(main.frames)
    if what == "code":
        innermost = main.frames[0]
        called = WAITS.search(text) if own is not None and innermost == own else None
        if called is not None and (idle or (process.gpu and called[1] in _SPINS)):
            what, name = ("wait" if called[1] == "wait" else "device"), called[1]
        elif idle and (_LOCKS.search(innermost.file) or _LOCK_TEXT.search(text)):
            what = "lock"
    role = role_of(process)
    held = _holder(process.threads, main, role) if idle else ""
    return Doing(role, what, name, file, line, text, function, idle, held)


def _holder(threads: Sequence[Thread], main: Thread, role: str) -> str:
    """Say who holds the lock that the main thread waits for: ", which thread T holds, in train.py:12: f()"."""
    stacks = [[(frame.file, frame.line) for frame in one.frames if is_own(frame.file)] for one in threads]
    found = locks.holder(stacks, threads.index(main))
    if found is None:
        return ""
    if found.thread < 0:
        lost = ", which no thread of it holds: another process does, or a thread held it when the worker was forked"
        return lost if role == "worker" else ""
    if threads[found.thread] is main:
        return f", which it holds already, since {found.taken}"
    text = line_of(*found.now)
    name = plain(threads[found.thread].name, 60) or "another one"
    return f", which thread {name} holds, in {found.now}{f': {text}' if text else ''}"


def _records(thread: Thread) -> bool:
    return not thread.main and any(_RECORDER.search(frame.file) for frame in thread.frames)


def activity(frames: Sequence[Frame]) -> tuple[str, str]:
    """Return what a stack is of, and the name of a collective or a wait; the innermost frame is the first."""
    for what, file, function in _COMPILED:
        found = [frame for frame in frames if file.search(frame.file) and function.search(frame.function)]
        if found:
            return what, found[-1].function.rpartition(".")[2] if what in _NAMED else ""
    return "code", ""


def role_of(process: Process) -> str:
    """Return who a process is: rank, worker (of a loader), launcher, helper, or other where it has not loaded torch."""
    if not process.torch:
        return "other"
    main = next((thread for thread in process.threads if thread.main), Thread("", True, False, False, ()))
    for role, file, function in _ROLES:
        if any(file.search(frame.file) and function.search(frame.function) for frame in main.frames):
            return role
    return "rank"


def fetches(worker: Process) -> bool:
    """Return whether a loader's worker makes a batch, and does not wait for its next task."""
    main = next((thread for thread in worker.threads if thread.main), None)
    return main is not None and any("_utils/fetch.py" in frame.file for frame in main.frames)


def jobs(processes: Iterable[Process]) -> list[list[Process]]:
    """Return the training jobs among processes with stacks: those with a rank, each with what it has started.

    Processes of one job have a launcher, a recording or SLURM's number in common.
    """
    known = {one.pid: one for one in processes}
    roles = {one.pid: role_of(one) for one in known.values() if one.torch}
    roots: dict[int, int] = {}

    def root_of(pid: int) -> int:
        # What a rank has made to work for it is the rank's; a rank is that of a launcher, and of no other process.
        while (parent := known.get(known[pid].parent)) is not None:
            serves = roles.get(pid) in ("worker", "helper") and parent.torch
            if not serves and roles.get(parent.pid) != "launcher" and not _starts(parent):
                break
            pid = parent.pid
        return pid

    torch = [one for one in known.values() if one.torch]
    for one in torch:
        roots[one.pid] = root_of(one.pid)
    keys: dict[str, int] = {}
    found: dict[int, list[Process]] = {}
    for one in sorted(torch, key=lambda one: one.pid):
        root = roots[one.pid]
        for key in filter(None, (one.run, one.job and f"SLURM {one.job}")):
            root = found_root = keys.setdefault(key, root)
            roots[one.pid] = found_root
        found.setdefault(root, []).append(one)
    return [members for _, members in sorted(found.items()) if any(roles[one.pid] == "rank" for one in members)]


_LAUNCHERS = re.compile(r"(?:^|[/ ])(?:torchrun|mpirun|mpiexec|prterun|srun|deepspeed|accelerate|dlprof)\b")


def _starts(process: Process) -> bool:
    return bool(_LAUNCHERS.search(process.command))
