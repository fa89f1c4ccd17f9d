"""Starts the ranks of a measurement on this host, watches them, and ends all once one has failed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from dlprof.errors import DlprofError
from dlprof.files import writing
from dlprof.read.opening import read_file
from dlprof.record.launch.process import tied, wait_or_kill
from dlprof.trial.bandwidth.plan import Plan
from dlprof.trial.bandwidth.results import RESULT, Raw

_POLL_S = 0.05
# Once one has failed, so long the others may take to fail too: who was killed has taken them along.
_TOGETHER_S = 1.0
_END_S = 2.0

# This package, whatever else has its name in the folder where the ranks start.
_START = (
    "import sys; sys.path[0] = sys.argv.pop(1); from dlprof.trial.bandwidth.taking_part import main; main(sys.argv[1:])"
)
_ROOT = str(Path(__file__).resolve().parents[3])


class StoppedError(Exception):
    """The user has asked for the end: no rank is left."""


def run_here(plan: Plan, ranks: int, env: Mapping[str, str], quiet: bool, stopped: Callable[[], bool]) -> Raw:
    """Measure with ranks on this host and return what they measured; none of them is left in any case.

    Raises StoppedError where `stopped` says so, and DlprofError, with what the rank that failed first has said.
    """
    with writing("a temporary folder"):
        held = tempfile.TemporaryDirectory(prefix="dlprof-bandwidth-", ignore_cleanup_errors=True)
    with held as name:
        folder = Path(name)
        processes: list[subprocess.Popen[bytes]] = []
        try:
            with writing("what the ranks print"):
                processes += [_start(plan, r, ranks, folder, env, quiet) for r in range(ranks)]
            _wait(processes, folder, stopped)
        finally:
            for process in processes:
                process.send_signal(signal.SIGTERM)
            for process in processes:
                wait_or_kill(process, _END_S)
        try:
            return msgspec.json.decode(read_file(folder / RESULT), type=Raw)
        except msgspec.DecodeError as e:
            raise DlprofError(f"rank 0 left no measurement: {e}") from None


def _start(
    plan: Plan, rank: int, ranks: int, folder: Path, env: Mapping[str, str], quiet: bool
) -> subprocess.Popen[bytes]:
    # Progress, and what NCCL_DEBUG makes NCCL print: stdout is kept for the result.
    shown = subprocess.DEVNULL if quiet else 2
    with (folder / f"{rank}.txt").open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-c", _START, _ROOT, plan.to_text(), str(rank), str(ranks), str(folder)],
            env={**env, "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=shown,
            stderr=errors,
            start_new_session=True,  # the terminal's Ctrl-C is for the process that ends them
            preexec_fn=tied(signal.SIGKILL),
        )


def _wait(processes: Sequence[subprocess.Popen[bytes]], folder: Path, stopped: Callable[[], bool]) -> None:
    """Wait until all have ended well. Raises DlprofError once one has failed, and StoppedError."""
    failed_s, first = 0.0, -1
    while True:
        if stopped():
            raise StoppedError
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes):
            return
        if any(codes):
            if first < 0:
                failed_s, first = time.monotonic(), next(r for r, code in enumerate(codes) if code)
            if None not in codes or time.monotonic() - failed_s > _TOGETHER_S:
                raise DlprofError(_why(codes, first, folder))
        time.sleep(_POLL_S)


def _why(codes: Sequence[int | None], first: int, folder: Path) -> str:
    """Say why the ranks failed: one that was ended by a signal has taken the others along, else the first to fail.

    NCCL aborts a rank (SIGABRT) whose peer has gone.
    """
    for rank, code in enumerate(codes):
        if code is not None and code < 0 and -code != signal.SIGABRT:
            name = signal.strsignal(-code) or f"signal {-code}"
            more = ": out of memory?" if -code == signal.SIGKILL else ""
            return f"rank {rank} was ended by a signal ({name}){more}"
    line = _last_line(folder / f"{first}.txt") or "it said nothing"
    own = line.removeprefix("dlprof: ")
    return own if own != line else f"rank {first} failed: {line}"


def _last_line(output: Path) -> str:
    """Return the last line that a rank printed, ours where there is one."""
    lines = [line.strip() for line in read_file(output).decode(errors="replace").splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.startswith("dlprof: ")), lines[-1][:300] if lines else "")


def environment(environ: Mapping[str, str], ranks: int, *, on_gpus: bool) -> dict[str, str]:
    """Return the environment of ranks: on the CPU they see no GPU and share its cores."""
    env = dict(environ)
    if not on_gpus:
        env["CUDA_VISIBLE_DEVICES"] = ""
        env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    return env
