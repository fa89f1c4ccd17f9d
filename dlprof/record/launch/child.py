"""Runs the user's command as a child in the same process group, on the same terminal, with all that it would inherit.

Signals that reach only the supervisor are passed on to the command, each once.

If the command still runs some seconds after a signal that ends it, its processes are named. A parent that waits for its
children, as multiprocessing does at exit, outlives a Ctrl-C that reached it alone, and a child that is blocked in C
never runs Python's signal handler.

Suspensions without a signal, as by `docker pause` and schedulers that freeze a control group, are noticed too: a
sleeping thread wakes far too late although it did not wait for a core. This also shows a paused virtual machine, but
not a busy host.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlprof.plain import tell
from dlprof.record.device.cpu import KernelCounters
from dlprof.record.launch.process import awaits, family, running, start, tied

# A suspension that both a signal and the clock show within this time counts once.
_TOGETHER_NS = 1_000_000_000

# Signals that end a command unless it handles them.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def run_to_end(command: Sequence[str], env: Mapping[str, str], beside: Callable[[int], None]) -> tuple[int, list[int]]:
    """Run the command to its end; return its wait status, and when it continued after being stopped, Unix ns.

    `beside` is called with its process once it runs, to start other processes next to it.
    """
    waited_for = {signal.SIGCHLD, *PASSED_ON}
    # If a parent process has set SIGCHLD to be ignored, the kernel would reap the child before we wait for it.
    chld = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    witness, suspensions = Witness(), Suspensions()
    lingering: Lingering | None = None
    resumed: list[int] = []  # when the command continued,
    continued: list[int] = []  # and when this process did, by a signal
    try:
        try:
            child = _start(command, env, mask, chld)
            lingering = Lingering(child.pid)
            witness.start()
            beside(child.pid)
        except OSError as e:
            missing = isinstance(e, FileNotFoundError)
            said = "command not found" if missing else e.strerror
            is_script = command[0].endswith(".py") and Path(command[0]).is_file()
            tell(f"{command[0]}: {said}" + ("; leave out the -- to run it under Python" if is_script else ""))
            return (127 if missing else 126) << 8, resumed
        waiter = threading.Thread(target=_signal_end, args=(child.pid, threading.get_ident()), daemon=True)
        start(waiter)
        suspensions.start()
        while True:
            # Never with a timeout: in a process that was suspended for longer than that, Python returns a signal that
            # was never sent (sigtimedwait is interrupted, and Python returns a structure that was not filled in).
            info = signal.sigwaitinfo(waited_for)
            if info.si_signo != signal.SIGCHLD:
                if info.si_signo == signal.SIGCONT:
                    continued.append(time.time_ns())
                if info.si_signo in _ENDING:
                    lingering.end_requested()
                pass_on(child.pid, info, witness)
                continue
            pid, status = os.waitpid(child.pid, os.WNOHANG | os.WCONTINUED)
            if pid and os.WIFCONTINUED(status):
                resumed.append(time.time_ns())
            elif pid:
                child.returncode = os.waitstatus_to_exitcode(status)
                if waiter.is_alive():
                    waiter.join()
                known = (*resumed, *continued)
                more = (at for at in suspensions.end() if all(abs(at - n) > _TOGETHER_NS for n in known))
                return status, sorted((*resumed, *more))
    finally:
        witness.end()
        suspensions.end()
        if lingering is not None:
            lingering.ended()
        # Signals for the command that arrived while it ended must not affect the report.
        while signal.sigtimedwait(waited_for, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGCHLD, chld if chld is not None else signal.SIG_DFL)


def _signal_end(child: int, waiting: int) -> None:
    """Send the waiting thread a SIGCHLD once the child has ended: the kernel may send its own to another thread."""
    with contextlib.suppress(OSError):  # reaped already
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    signal.pthread_kill(waiting, signal.SIGCHLD)


def _start(command: Sequence[str], env: Mapping[str, str], mask: Any, chld: Any) -> subprocess.Popen[bytes]:
    # If this process is killed, the command must not go on running unnoticed.
    tie = tied(signal.SIGTERM)

    def before_exec() -> None:
        tie()
        if chld == signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    # Inherited descriptors (a shell's <(...) or 3<file) are meant for the command: keep them.
    return subprocess.Popen(command, env=dict(env), close_fds=False, preexec_fn=before_exec)


# A script may take this long to save a checkpoint before it ends.
_PATIENCE_S = 15.0

_MOST_NAMED = 8


class Lingering:
    """Warns if a command still runs some time after the first signal that ends it."""

    def __init__(self, pid: int, patience_s: float = _PATIENCE_S) -> None:
        self._pid, self._patience_s = pid, patience_s
        self._timer: threading.Timer | None = None

    def end_requested(self) -> None:
        """Start the timer, unless it runs already."""
        if self._timer is None:
            self._timer = threading.Timer(self._patience_s, self._say)
            self._timer.daemon = True
            start(self._timer)

    def ended(self) -> None:
        """Cancel the warning."""
        if self._timer is not None:
            self._timer.cancel()

    def _say(self) -> None:
        processes = family([self._pid], running())
        named = ", ".join(map(str, processes[:_MOST_NAMED]))
        more = f" and {len(processes) - _MOST_NAMED} more" if len(processes) > _MOST_NAMED else ""
        tell(
            f"the command was told to end {self._patience_s:.0f} s ago and still runs"
            f" (processes {named}{more}); dlprof waits for it and ends nothing: a second Ctrl-C, or kill, does"
        )


# Suspensions longer than the sum of both are noticed.
_EVERY_S = 2.0

_LATE_S = 1.5


class Suspensions:
    """Notices suspensions of this process between start() and end()."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dlprof suspensions", daemon=True)
        self._resumed: list[int] = []

    def start(self) -> None:
        """Start; if no more threads are allowed, no suspension will be noticed."""
        start(self._thread)

    def end(self) -> list[int]:
        """Return when this process continued after each suspension, Unix ns."""
        self._over.set()
        return self._resumed

    def _watch(self) -> None:
        counters = KernelCounters(whole_process=False)  # of this thread, including its wait for a core
        due, waited_ns = time.monotonic() + _EVERY_S, counters.cores()[1]
        # −1: this kernel does not report the wait.
        while waited_ns >= 0 and not self._over.wait(due - time.monotonic()):
            late, before_ns = time.monotonic() - due, waited_ns
            due, waited_ns = time.monotonic() + _EVERY_S, counters.cores()[1]
            if late > _LATE_S and waited_ns - before_ns < late / 2 * 1e9:
                self._resumed.append(time.time_ns())
        counters.close()


_SI_KERNEL = 0x80  # <asm-generic/siginfo.h>: the kernel sent it to the whole group, as for Ctrl-C on a terminal

PASSED_ON = {
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

# The program of the witness: it writes which signals reach it, and their senders.
_WITNESS = """
import os, signal, sys
while True:
    seen = signal.sigwaitinfo([int(number) for number in sys.argv[1:]])
    os.write(1, b"%d %d\\n" % (seen.si_signo, seen.si_pid))
"""

# A signal may take this long to reach all processes that its sender named; one to this process alone waits as long.
_TOGETHER_S = 0.1

# `timeout` and others signal the process and then its group. The kernel makes one of two such signals of a process that
# has not taken the first yet, as it mostly has not; this one has, and takes the second within this time.
_AT_ONCE_S = 0.05

# The witness may take this long to write a signal: on a busy host it waits for a core like all others.
_WRITTEN_S = 5.0


class Witness:
    """An idle process in the command's process group, which shows whether a signal was for the whole group.

    A scheduler may signal the whole group, or every process of the job. Then the command already has the signal, and
    must not get it twice: many scripts understand the second as "end at once, without a checkpoint".
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._seen: list[tuple[float, list[bytes]]] = []
        self._last: tuple[float, bytes] = (-1.0, b"")  # when a signal to the whole group was taken, and which

    def start(self) -> None:
        """Start it. Without it, every signal to this process is passed on."""
        tie = tied(signal.SIGKILL)

        def before_exec() -> None:
            tie()
            signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)

        with contextlib.suppress(OSError, subprocess.SubprocessError):
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _WITNESS, *(str(int(number)) for number in sorted(PASSED_ON))],
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                preexec_fn=before_exec,
            )

    def saw(self, info: signal.struct_siginfo) -> bool:
        """Return whether the same signal from the same sender has reached the witness too."""
        if self._process is None or self._process.stdout is None:
            return False
        same = b"%d %d" % (info.si_signo, info.si_pid)
        if same == self._last[1] and time.monotonic() - self._last[0] < _AT_ONCE_S:
            return True
        fd = self._process.stdout.fileno()
        until = time.monotonic() + _TOGETHER_S
        while True:
            now = time.monotonic()
            # Drop old signals that reached only the witness.
            self._seen = [(at, lines) for at, lines in self._seen if lines and now - at < 10 * _TOGETHER_S]
            for _, seen in self._seen:
                if same in seen:
                    seen.remove(same)
                    self._last = (time.monotonic(), same)
                    return True
            # A signal to both has arrived by now, but the witness may not have written it yet.
            late = now >= until
            wait = (
                _TOGETHER_S if late and now < until + _WRITTEN_S and awaits(self._process.pid, info.si_signo) else 0.0
            )
            if not select.select([fd], [], [], wait if late else until - now)[0]:
                if late and not wait:
                    return False
                continue
            lines = os.read(fd, 4096).splitlines()
            if not lines:
                return False
            self._seen.append((time.monotonic(), lines))

    def end(self) -> None:
        """End it."""
        if self._process is not None and self._process.stdout is not None:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()


@contextlib.contextmanager
def deaf() -> Iterator[None]:
    """Ignore SIGTERM: a launcher that ends all tasks after a failure means their commands, and this one has ended.

    Processes that are started in this block ignore it too.
    """
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def pass_on(child: int, info: signal.struct_siginfo, witness: Witness) -> None:
    """Send the child a signal that reached only this process; if it is SIGTSTP, stop too."""
    number = info.si_signo
    if info.si_code != _SI_KERNEL and not witness.saw(info):
        try:
            os.kill(child, number)
        except ProcessLookupError:
            return
    if number == signal.SIGTSTP:
        # Stop like any process, and continue here after SIGCONT.
        os.kill(os.getpid(), signal.SIGTSTP)
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
