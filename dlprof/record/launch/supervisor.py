"""Records the user's command: starts it unchanged, with the recorder's hook on PYTHONPATH, and ends as it ended.

This process waits for the command. If DLPROF_SAMPLE is set, it also starts a process that samples the host and its GPUs
(samplers/). After the command it warns if nothing was recorded, with the reason; if ranks still run; and if overrides
(`--set`) took effect in no rank. Linux only.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from dlprof import overrides, run_folder
from dlprof.errors import DlprofError
from dlprof.nsys import Nsys
from dlprof.overrides import Outcome
from dlprof.plain import tell, words_of
from dlprof.record.device import cpu
from dlprof.record.launch.child import deaf, run_to_end
from dlprof.record.launch.folder import RunFolder, compress
from dlprof.record.launch.process import wait_or_kill
from dlprof.record.launch.watching import StopAfter, Watch
from dlprof.record.ranks import hellos, local_rank, words_here

# The longest wait for the samplers after the command; their measurements are on disk by then. If they started less than
# the second time ago, they have measured nothing and are killed.
_SAMPLERS_END_S = 1.0
_SAMPLERS_SOONEST_S = 1.0
_METRICS_END_S = 2.0  # the longest wait for the last metrics to be pushed


@dataclass(frozen=True)
class Ended:
    """How the command ended."""

    code: int | None
    signal: int | None
    warnings: tuple[str, ...]
    # False if other tasks of the same job still run, or if one that ended at the same time reports on all.
    last: bool


def supervise(
    command: Sequence[str],
    run: RunFolder,
    env: Mapping[str, str],
    launcher: Nsys | None = None,
    overridden: Mapping[str, Any] | None = None,
) -> Ended:
    """Run the command with that environment, record it into the folder, and return how it ended.

    `launcher` runs around it, and leaves its report in this host's folder. `overridden` has the
    settings that ranks override according to `env`, by name, in a form that may be shown. A command that cannot be
    started ends with 127 (not found) or 126 (not executable), as in a shell. One that was ended because of
    DLPROF_STOP_AFTER has ended with 0.
    """
    place, settings, warnings = env.get("DLPROF_LOCAL", ""), overridden or {}, list[str]()
    if place and (why := run.record_at(place)):
        warnings.append(why)
    folder = run.records
    here = run_folder.host_folder(folder, os.uname().nodename)
    if launcher:
        with contextlib.suppress(OSError):
            here.mkdir(parents=True, exist_ok=True)
    samplers, stop = Samplers(folder, env), StopAfter(env.get("DLPROF_STOP_AFTER", ""), folder)
    watch = Watch(env.get("DLPROF_HANG", ""), folder, env, here=run.local is not None)
    metrics = Metrics(folder, env)

    def beside(child: int) -> None:
        stop.start(child)
        watch.start()
        samplers.start()
        metrics.start()

    words = [*(launcher.words(here) if launcher else ()), *command]
    killed = cpu.oom_kills()
    status, resumed = run_to_end(words, recorded(env, folder), beside)
    end_ns = time.time_ns()
    with deaf():
        stop.end()
        watch.end()
        metrics.end()
        code, number = ended = _exit(status)
        if stop.stopped:
            code, number = 0, None
        of_all: list[str] | None = []
        try:
            samplers.end()
            warnings += [] if code in (126, 127) else missing(run)
            if resumed:
                times = "" if len(resumed) == 1 else f" {len(resumed)} times"
                warnings.append(
                    f"the job was stopped and went on again{times}: the steps in which it was stopped are left out"
                )
            warnings += left(folder)
            warnings += watch.warnings()
            warnings += launcher.ended(here) if launcher else []
            compress(run.ranks)
            warnings += samplers.wait()
            warnings += run.local.end(run.ranks) if run.local else []
            end = {"end_ns": end_ns, "exit": {"code": code, "signal": number}, "resumed_ns": resumed}
            if killed is not None:
                end["oom_kills"] = max((cpu.oom_kills() or 0) - killed, 0)
            if watch.reports:
                end["hangs"] = watch.reports
            if stop.stopped:
                end["stopped"] = {"asked": stop.asked, "code": ended[0], "signal": ended[1]}
            of_all = run.end(
                lambda: whole_run(run.path, settings), **end, warnings=[*filter(None, [stop.stopped]), *warnings]
            )
        except Exception as e:  # noqa: BLE001 - whatever happened to the folder, the exit status is the command's
            warnings.append(f"run.json has no end: {words_of(e)}")
    return Ended(code, number, (*warnings, *(of_all or ())), of_all is not None)


def unrecorded(command: Sequence[str], env: Mapping[str, str]) -> Ended:
    """Run the command as it is, and return how it ended."""
    status, _ = run_to_end(command, env, lambda _child: None)
    return Ended(*_exit(status), (), last=False)


def _exit(status: int) -> tuple[int | None, int | None]:
    """Return the exit code or the signal of a wait status."""
    return (None, os.WTERMSIG(status)) if os.WIFSIGNALED(status) else (os.WEXITSTATUS(status), None)


def whole_run(folder: Path, settings: Mapping[str, Any]) -> list[str]:
    """Complete a run once all ranks on all hosts have ended; return warnings about them."""
    compress(run_folder.in_ranks(folder))
    return unapplied(folder, settings)


def must_be_linux() -> None:
    """Raise DlprofError if this system cannot record."""
    if not sys.platform.startswith("linux"):
        raise DlprofError("recording needs Linux; reports can be made anywhere")


def recorded(env: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the environment with the hook first on PYTHONPATH and the run folder named."""
    inject = str(Path(__file__).parents[1] / "inject")
    # An empty entry would put the current directory on the path: only add what there is.
    path = os.pathsep.join(p for p in (inject, env.get("PYTHONPATH", "")) if p)
    return {**env, "PYTHONPATH": path, "DLPROF_RUN": str(folder), "DLPROF_SUPERVISOR": str(os.getpid())}


def end_like(ended: Ended) -> NoReturn:
    """End this process with the command's exit code, or by the signal that ended the command."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    if ended.signal is not None:
        # The command has written its core file, if any; ours would be of the wrong program.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if ended.signal not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(ended.signal, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {ended.signal})
        os.kill(os.getpid(), ended.signal)
        sys.exit(128 + ended.signal)  # a signal that does not end a process by default: as a shell does
    sys.exit(ended.code)


class Samplers:
    """The process that samples this host next to the job; there is none unless DLPROF_SAMPLE is set."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self._folder = folder
        # Not the recorded environment: this process is not part of the job.
        self._env = {name: value for name, value in env.items() if name != "DLPROF_RUN"}
        self._process: subprocess.Popen[bytes] | None = None
        self._failed: str | None = None
        self._started_s = time.monotonic()

    def start(self) -> None:
        """Start it. It ends with this process, even if that is killed; its measurements are on disk."""
        if self._env.get("DLPROF_SAMPLE", "off") == "off":
            return
        try:
            main = Path(__file__).parents[1] / "samplers" / "__main__.py"
            self._process = subprocess.Popen(
                # -S: the user's sitecustomize is for the job's processes. Other places of modules are passed instead.
                [sys.executable, "-S", main, self._folder, str(os.getpid()), *filter(os.path.isabs, sys.path)],
                env=self._env,
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # the terminal's Ctrl-C is for the job
            )
        except (OSError, subprocess.SubprocessError) as e:
            self._failed = f"nothing is sampled: {e}"

    def end(self) -> None:
        """Tell it that the job is over."""
        if self._process is None or self._process.stdin is None:
            return
        if self._process.poll() is not None:
            self._failed = f"the samplers ended before the job (status {self._process.returncode})"
        with contextlib.suppress(OSError), self._process.stdin as stdin:
            stdin.write(b"over")  # a forked child of this process may hold the pipe open
        if time.monotonic() - self._started_s < _SAMPLERS_SOONEST_S:
            self._process.kill()

    def wait(self) -> list[str]:
        """Wait for its end; return at most one line about what went wrong."""
        if self._process is not None:
            wait_or_kill(self._process, _SAMPLERS_END_S)
        return [self._failed] if self._failed else []


class Metrics:
    """The process that hands out the figures of a job while it runs (dlprof.live.metrics), if DLPROF_METRICS is set.

    What goes wrong it says itself. Of several tasks on a host the first has one: it serves all ranks of the host.
    """

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self._words = ["-m", "dlprof.live.metrics", str(folder), env.get("DLPROF_METRICS", ""), str(os.getpid())]
        # From no folder of the user's, whose modules may have the names of others.
        path = os.pathsep.join(filter(os.path.isabs, sys.path))
        self._env = {n: v for n, v in env.items() if not n.startswith("DLPROF_")} | {"PYTHONPATH": path}
        self._asked = bool(env.get("DLPROF_METRICS")) and local_rank() in (None, 0)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, if it is asked for."""
        words, nowhere = [sys.executable, *self._words], subprocess.DEVNULL
        try:
            if self._asked:
                self._process = subprocess.Popen(
                    words, env=self._env, cwd="/", stdin=nowhere, stdout=nowhere, start_new_session=True
                )
        except (OSError, subprocess.SubprocessError) as e:
            tell(f"--metrics is off: {e}")

    def end(self) -> None:
        """Tell it that the job is over, and wait for its last figures."""
        if self._process is not None:
            self._process.terminate()
            wait_or_kill(self._process, _METRICS_END_S)


# Ranks may take this long to end after the command, such as those of a launcher that was signalled together with them.
_LEAVING_S = 1.0

_MOST_NAMED = 16

_NOT_REACHED = "(python -I, -E, -S, a cleaned environment, or no Python)"


def missing(run: RunFolder) -> list[str]:
    """Return at most one line that says why nothing was recorded."""
    if any((rank / "facts.json").exists() for rank in run.ranks) or run_folder.recorded(run.path):
        return []
    if run.ranks:
        return ["no report is possible: no rank could write its facts.json"]
    said = [one for host in run.hosts for one in hellos(host)]
    last = {one["pid"]: one for one in said}
    if not said:
        why = f"the hook was never reached {_NOT_REACHED}"
    # Processes that had reached the hook before; a forked child that runs another program had not.
    elif any("exec" in last[one["pid"]] for one in said if "python" in one):
        why = f"the command replaced itself (os.exec) by a program that the hook did not reach {_NOT_REACHED}"
    elif not any("torch" in one for one in said):
        why = "the command never imported torch"
    else:
        why = "torch was imported, but no backward(), no optimizer step and no lasting inference was seen"
    return [f"nothing was recorded: {why}"]


def left(folder: Path) -> list[str]:
    """Return at most one line with the ranks that still run after the command: a launcher that dies may leave some."""
    until = time.monotonic() + _LEAVING_S
    while (ranks := _running(folder)) and time.monotonic() < until:
        time.sleep(0.05)
    if not ranks:
        return []
    named = ", ".join(f"rank {rank} (process {pid})" for rank, pid in ranks[:_MOST_NAMED])
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return [
        f"the command has ended and left some of its job running: {named}{more}; dlprof ends nothing,"
        " and what is recorded from now on is in a report made later"
    ]


def _running(folder: Path) -> list[tuple[int, int]]:
    """List rank and process of this supervisor's ranks that still run.

    Each has written a file about itself: a process that sets its title (setproctitle) overwrites its environment.
    """
    return sorted((w.rank, w.pid) for w in words_here(folder) if w.supervisor == str(os.getpid()) and w.runs)


def outcomes(folder: Path, names: Iterable[str]) -> dict[str, Outcome]:
    """Return what each override did in the ranks of a run folder, by name. A rank without a file did nothing."""
    reports = []
    for rank in run_folder.in_ranks(folder) if names else ():
        try:
            reports.append(json.loads(run_folder.lines_of(rank, "overrides")[-1]))
        except (IndexError, ValueError, RecursionError):  # noqa: PERF203 - the rank was killed, or the disk was full
            continue
    found = overrides.outcomes(names, reports)
    return {name: found[name] for name in names}


def applied(folder: Path, settings: Mapping[str, Any]) -> list[str]:
    """Return a line for each override that applied everywhere: what it changed, and where."""
    found = outcomes(folder, settings).items() if settings else ()
    return [
        f"{name} {overrides.described(settings[name], one)}" for name, one in found if one.applied and not one.error
    ]


def unapplied(folder: Path, settings: Mapping[str, Any]) -> list[str]:
    """Return a line for each override that did not apply everywhere, with the reason if it is known."""
    lines = []
    for name, outcome in outcomes(folder, settings).items():
        said = f"--set {name}={settings[name]}"
        why = f": {outcome.error}" if outcome.error else ""
        if not outcome.applied:
            lines.append(f"{said} never applied{why}")
        elif outcome.error:
            lines.append(f"{said} did not apply everywhere{why}")
    return lines
