"""What a process of a training job does, by the functions of PyTorch and Python that are in its stack."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dlprof.live.look import Frame, Process, Thread, is_own


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
    _Rule("loader", r"torch/utils/data/dataloader\.py", r"(?:^|\.)(?:__next__|__iter__|_shutdown_workers)$"),
    _Rule(
        "backward",
        r"torch/autograd/(?:graph|__init__)\.py|torch/_tensor\.py",
        r"(?:^|\.)(?:_engine_run_backward|backward|grad)$",
    ),
    _Rule("optimizer", r"torch/optim/|torch/amp/grad_scaler\.py|torch/nn/utils/clip_grad"),
    _Rule("forward", r"torch/nn/(?:modules|parallel)/"),
)
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

# Where Python waits for another thread or process, innermost.
_LOCKS = re.compile(r"(?:^|/)(?:threading|queue|selectors|subprocess|multiprocessing/\w+|concurrent/.+)\.py$")
_LOCK_TEXT = re.compile(r"\bacquire\(|^with .*lock|\block\b", re.I)


@dataclass(frozen=True)
class Doing:
    """What a process does.

    `what`: one of `WORDS`. `name`: of the collective, or of the call that waits. `file`, `line` and
    `text`: the user's innermost line, "" and 0 where there is none. `idle`: no thread of the process runs.
    """

    role: str
    what: str
    name: str = ""
    file: str = ""
    line: int = 0
    text: str = ""
    function: str = ""
    idle: bool = False

    @property
    def at(self) -> str:
        """The user's line: "train.py:88"; "" for none."""
        return f"{self.file.rpartition('/')[2]}:{self.line}" if self.file else ""


def doing(process: Process) -> Doing:
    """Return what a process does, by its main thread; a process that could not be seen does "unknown"."""
    main = next((thread for thread in process.threads if thread.main), None)
    if main is None:
        return Doing("rank" if process.torch else "other", "unknown")
    idle = not any(thread.active for thread in process.threads) and process.state != "R"
    own = next((frame for frame in main.frames if is_own(frame.file)), None)
    file, line, function = (own.file, own.line, own.function) if own else ("", 0, "")
    text = process.texts.get((file, line), "")
    what, name = activity(main.frames)
    if what == "code":
        innermost = main.frames[0]
        called = WAITS.search(text) if own is not None and innermost == own else None
        if called is not None and idle:
            what, name = ("wait" if called[1] == "wait" else "device"), called[1]
        elif idle and (_LOCKS.search(innermost.file) or _LOCK_TEXT.search(text)):
            what = "lock"
    return Doing(role_of(process), what, name, file, line, text, function, idle)


def activity(frames: Sequence[Frame]) -> tuple[str, str]:
    """Return what a stack is of, and of a collective its name; the innermost frame is the first."""
    for what, file, function in _COMPILED:
        found = [frame for frame in frames if file.search(frame.file) and function.search(frame.function)]
        if found:
            return what, found[-1].function.rpartition(".")[2] if what in ("collective", "joining") else ""
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
