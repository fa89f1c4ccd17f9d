"""Records the user's command: starts it unchanged, with the recorder's hook on PYTHONPATH, and ends as it ended.

This process waits beside the command. Where DLPROF_SAMPLE asks for it, it also starts one that samples what the host
and its GPUs do (samplers/). Linux only.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dlprof import run_folder
from dlprof.errors import DlprofError
from dlprof.record.device import cpu
from dlprof.record.launch.child import run_to_end
from dlprof.record.launch.folder import RunFolder, compress
from dlprof.record.launch.postmortem import left, missing
from dlprof.record.launch.process import wait_or_kill
from dlprof.record.launch.signals import deaf
from dlprof.record.launch.unapplied import unapplied
from dlprof.redaction import shown

# How long the end of the command may wait for the samplers; what they measured is on disk by then. Sooner after their
# start than this they have measured nothing, and are not waited for.
_SAMPLERS_END_S = 1.0
_SAMPLERS_SOONEST_S = 1.0


class Launcher(Protocol):
    """A program that the command is started with."""

    def words(self, folder: Path) -> Sequence[str]:
        """Return the words before the command's; what the program writes goes into that folder."""

    def ended(self, folder: Path) -> list[str]:
        """Make of what it left what is read, and return warnings; raises nothing."""


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
    launcher: Launcher | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Ended:
    """Run the command with that environment, record it into the folder, and return how it ended.

    `launcher` starts it, and makes something of what it left in the folder of what is recorded on this host.
    `overrides` are the settings that `env` has the ranks override, by name.
    Raises DlprofError if the folder cannot be made or already holds a run. A command that cannot be started ends with
    127 (not found) or 126 (not executable), as in a shell.
    """
    must_be_linux()
    folder = folder.absolute()
    asked = {name: shown(name, value) for name, value in (overrides or {}).items()}
    run = RunFolder(folder, command, {**options, "set": asked} if asked else options, env)
    here = run_folder.host_folder(folder, os.uname().nodename)
    if launcher:
        with contextlib.suppress(OSError):
            here.mkdir(parents=True, exist_ok=True)
    samplers = Samplers(folder, env)
    words = [*(launcher.words(here) if launcher else ()), *command]
    killed = cpu.oom_kills()
    status, resumed = run_to_end(words, recorded(env, folder), samplers.start)
    end_ns = time.time_ns()
    with deaf():
        samplers.end()
        code, number = (None, os.WTERMSIG(status)) if os.WIFSIGNALED(status) else (os.WEXITSTATUS(status), None)
        warnings = [] if code in (126, 127) else missing(run)
        if resumed:
            times = "" if len(resumed) == 1 else f" {len(resumed)} times"
            warnings.append(
                f"the job was stopped and went on again{times}: the steps in which it was stopped are left out"
            )
        warnings += left(folder)
        warnings += launcher.ended(here) if launcher else []
        compress(run.ranks)
        warnings += samplers.wait()
        end = {"end_ns": end_ns, "exit": {"code": code, "signal": number}, "resumed_ns": resumed, "warnings": warnings}
        if killed is not None:
            end["oom_kills"] = max((cpu.oom_kills() or 0) - killed, 0)
        of_all: list[str] | None = []
        try:
            of_all = run.end(lambda: whole_run(folder, asked), **end)
        except (OSError, ValueError) as e:
            warnings.append(f"run.json has no end: {e}")
    return Ended(folder, code, number, (*warnings, *(of_all or ())), of_all is not None)


def whole_run(folder: Path, asked: Mapping[str, Any]) -> list[str]:
    """Do what is left to do once all ranks have ended, wherever they ran; return warnings about them."""
    compress(run_folder.in_ranks(folder))
    return unapplied(folder, asked)


def must_be_linux() -> None:
    """Raise DlprofError where nothing can be recorded."""
    if not sys.platform.startswith("linux"):
        raise DlprofError("recording needs Linux; reports can be made anywhere")


def recorded(env: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the environment with the hook first on PYTHONPATH and the run folder named."""
    inject = str(Path(__file__).parents[1] / "inject")
    # An empty entry would put the current directory on the path: only add what there is.
    path = os.pathsep.join(p for p in (inject, env.get("PYTHONPATH", "")) if p)
    return {**env, "PYTHONPATH": path, "DLPROF_RUN": str(folder), "DLPROF_SUPERVISOR": str(os.getpid())}


def end_like(ended: Ended) -> None:
    """End this process with the command's exit code, or by the signal that ended the command."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    if ended.signal is not None:
        # The command has left its core, if any; ours would be about the wrong program.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if ended.signal not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(ended.signal, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {ended.signal})
        os.kill(os.getpid(), ended.signal)
        sys.exit(128 + ended.signal)  # a signal whose default is not to end: as a shell says
    sys.exit(ended.code)


class Samplers:
    """The process that samples this host beside the job; there is none where DLPROF_SAMPLE does not ask for it."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self._folder = folder
        # Not the recorded environment: this process is no part of the job.
        self._env = {name: value for name, value in env.items() if name != "DLPROF_RUN"}
        self._process: subprocess.Popen[bytes] | None = None
        self._failed: str | None = None
        self._started_s = time.monotonic()

    def start(self) -> None:
        """Start it. It ends with this process, however that ends: what was measured is on disk."""
        if self._env.get("DLPROF_SAMPLE", "off") == "off":
            return
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    Path(__file__).parents[1] / "samplers" / "__main__.py",
                    self._folder,
                    str(os.getpid()),
                ],
                env=self._env,
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # the terminal's Ctrl-C is for the job
            )
        except (OSError, subprocess.SubprocessError) as e:
            self._failed = f"nothing is sampled: {e}"

    def end(self) -> None:
        """Let it know that the job is over."""
        if self._process is None or self._process.stdin is None:
            return
        if self._process.poll() is not None:
            self._failed = f"the samplers ended before the job (status {self._process.returncode})"
        with contextlib.suppress(OSError), self._process.stdin as stdin:
            stdin.write(b"over")  # a forked child of this process may hold the pipe open
        if time.monotonic() - self._started_s < _SAMPLERS_SOONEST_S:
            self._process.kill()

    def wait(self) -> list[str]:
        """Wait for its end; return in at most one line what went wrong."""
        if self._process is not None:
            wait_or_kill(self._process, _SAMPLERS_END_S)
        return [self._failed] if self._failed else []
