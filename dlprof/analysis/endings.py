"""What the errors and signals that end jobs mean, and what to do: a row for each.

An error is known by its text, which a library wrote, or else by its type; a signal by its number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace


class Failed(Struct, frozen=True):
    """What an error means: what happened, and what to do.

    `what` continues "The job ended because". `follows`: another process failed before, so that a rank with another
    error is the one to look at. `anywhere`: the error is raised in whatever line the training thread is just at, which
    says nothing.
    """

    what: str
    changes: tuple[str, ...]
    follows: bool = False
    anywhere: bool = False


# By a pattern of the error's "type: text", whose groups stand for "{0}", "{1}" of what happened; the first one counts.
ENDINGS: Mapping[str, Failed] = {
    r"DataLoader worker \(pid.*\).* is killed by signal: (Bus error|Unknown signal 7)": Failed(
        "a loader worker found no room in /dev/shm, in which workers hand over batches",
        (
            "more room there: `docker run --shm-size=8g` or `--ipc=host`, an `emptyDir` with `medium: Memory` in"
            " Kubernetes",
            "fewer workers, a smaller `prefetch_factor`; or"
            ' `torch.multiprocessing.set_sharing_strategy("file_system")` where /tmp has room',
        ),
        anywhere=True,
    ),
    r"DataLoader worker \(pid.*\).* is killed by signal: Killed": Failed(
        "a loader worker was killed from outside (SIGKILL), by the kernel for want of memory or by somebody",
        (
            "look into the kernel's log (`dmesg | grep -i kill`): where it names the worker, use fewer workers, or a"
            " data set that keeps less (arrays, not lists of objects, which every worker copies)",
        ),
        anywhere=True,
    ),
    r"DataLoader worker \(pid.*\).* (?:is killed by signal: (.+?)\.|exited unexpectedly)": Failed(
        "a loader worker died ({0})",
        (
            "run with `num_workers=0` to see the error itself, or `faulthandler.enable()` in `worker_init_fn`",
            "where a library is not safe after a fork: `multiprocessing_context='spawn'`",
        ),
        anywhere=True,
    ),
    r"^(?:ConnectionResetError|EOFError|BrokenPipeError|ConnectionRefusedError):": Failed(
        "a process that it spoke with is gone, mostly a loader worker that was killed",
        (
            "look into the kernel's log (`dmesg | grep -i kill`), and above on stderr for a worker's own error",
            "run with `num_workers=0` to see an error itself",
        ),
        anywhere=True,
    ),
    r"DataLoader timed out after (\d+)": Failed(
        "no batch came for {0} s: the loader's workers stood still",
        (
            "`py-spy dump --pid` of a worker shows where it waits: often a lock that another thread held when it was"
            " forked (`multiprocessing_context='spawn'`, or no thread before the loader), or a file system",
        ),
    ),
    r"Caught (\w+) in DataLoader worker process": Failed(
        "a loader worker raised {0}", ("the line above is the one of the worker that raised it",)
    ),
    (
        r"unable to (?:open|mmap|write|allocate) .*shared memory|insufficient shared memory|shm_open"
        r"|No space left on device.*shm"
    ): Failed(
        "/dev/shm is full, in which workers hand over batches",
        ("more room there: `docker run --shm-size=8g` or `--ipc=host`", "fewer workers, a smaller `prefetch_factor`"),
    ),
    r"Too many open files|received \d+ items of ancdata": Failed(
        "the process has as many files open as it may",
        (
            "`ulimit -n 65536` before the job",
            'or `torch.multiprocessing.set_sharing_strategy("file_system")`; keep no batches of workers in lists',
        ),
    ),
    r"No space left on device": Failed(
        "a disk is full", ("free some of it, or write elsewhere: checkpoints, logs, caches",)
    ),
    (
        r"Watchdog caught collective operation timeout|NCCL.*(?:timeout|timed out)"
        r"|Timed? ?out.*(?:collective|barrier|store)"
    ): Failed(
        "a collective timed out: a rank did not come to it",
        (
            "with `TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1` the ranks write what they waited for:"
            " `dlprof report` of their folder names the rank that was missing, and its line",
        ),
        follows=True,
    ),
    r"Connection (?:closed|reset)|Broken pipe|Socket Timeout|recvValue failed|NCCL.*(?:remote|system) error": Failed(
        "the connection to another rank broke: that rank ended first",
        ("look at the rank that ended first",),
        follows=True,
    ),
    r"device-side assert": Failed(
        "a kernel found what it asserts broken, mostly an index outside of its table (labels, token numbers)",
        ("`CUDA_LAUNCH_BLOCKING=1` shows the call; on the CPU the same line says which index",),
    ),
    r"illegal memory access|misaligned address|unspecified launch failure": Failed(
        "a kernel touched memory that it may not",
        ("`CUDA_LAUNCH_BLOCKING=1` shows the call, `compute-sanitizer` the access",),
    ),
    r"(?i)returned nan values|\bnan\b|non-?finite|not finite": Failed(
        "a number was not finite",
        (
            "a lower learning rate, gradients clipped (`clip_grad_norm_`), `bfloat16` for `float16`",
            "`torch.autograd.set_detect_anomaly(True)` for one run names the operation",
        ),
    ),
    r"Trying to backward through the graph a second time": Failed(
        "a graph was used twice: a tensor of an earlier step is still in the loss",
        ("detach what one step hands to the next: `hidden = hidden.detach()`",),
    ),
    r"Expected all tensors to be on the same device": Failed(
        "tensors of one operation are on different devices", ("`x = x.to(device)` before that line",)
    ),
    r"CUDA driver version is insufficient|no kernel image is available|CUDA-capable device": Failed(
        "this PyTorch does not fit the GPU or its driver",
        ("install the wheel for this driver and GPU (https://pytorch.org/get-started/locally/)",),
    ),
}

# Signals that end a job where its own error did not: what happened, and what to do. SIGTERM and SIGUSR1 are no failure
# of the job's: a time limit or a preemption, which the report says elsewhere.
SIGNALS: Mapping[int, Failed] = {
    7: Failed(
        "a page of memory could not be had (SIGBUS): mostly /dev/shm is full", next(iter(ENDINGS.values())).changes
    ),
    9: Failed(
        "it was killed from outside (SIGKILL): by the kernel for want of memory, by a scheduler, or by somebody",
        ("look into the kernel's log (`dmesg | grep -i kill`) and the scheduler's (`sacct -j JOB`)",),
    ),
    11: Failed(
        "it touched memory that it may not (SIGSEGV)",
        ("`python -X faulthandler` shows the line; a library in C++ is at fault, often two that do not fit",),
    ),
    6: Failed(
        "a library gave up (SIGABRT)", ("its last words are on stderr; `python -X faulthandler` shows the line",)
    ),
}

# Errors that are somebody's wish, or that a rule of their own reports.
_NO_FAILURE = ("KeyboardInterrupt", "SystemExit", "OutOfMemoryError", "MemoryError")


def of_error(error: Mapping[str, Any]) -> Failed | None:
    """Return what an error means; None: it is no failure."""
    kind, text = str(error.get("type") or ""), str(error.get("text") or "")
    if kind in _NO_FAILURE or "DefaultCPUAllocator: can't allocate memory" in text or "out of memory" in text:
        return None
    for pattern, meant in ENDINGS.items():
        if (found := re.search(pattern, f"{kind}: {text}")) is not None:
            what = meant.what.format(*(group or "without a signal" for group in found.groups()))
            return replace(meant, what=what)
    return Failed(f"{kind} was raised", ("its traceback is on stderr",))
