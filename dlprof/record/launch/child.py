"""Runs the user's command as a child in the same process group, on the same terminal, with what it would inherit.

Says which processes of a command still run some seconds after it was told to end; a shell waits for it as well.

A parent that waits for its children, as multiprocessing's does at its end, outlives a Ctrl-C that reached it alone; and
a child that is blocked in C never gets as far as Python's handler.

Notices that this process was suspended without a signal, as `docker pause` and schedulers freeze a control group.

A thread sleeps, and is woken far too late, though it has not waited for a core: for that time it could not run. A
virtual machine that stood still shows as well, and a busy host does not.

Passes on to the user's command the signals that reached the supervisor alone, each once.
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
from dlprof.record.launch.process import awaits, family, running, tied

# A suspension that both a signal and the clock have shown counts once, by its signal.
_TOGETHER_NS = 1_000_000_000

# Signals that ask a command to end.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def run_to_end(command: Sequence[str], env: Mapping[str, str], beside: Callable[[], None]) -> tuple[int, list[int]]:
    """Run the command to its end; return its wait status, and when it went on again after it was stopped, Unix ns.

    Once it runs, `beside` is called, to start what is to run next to it.
    """
    watched = {signal.SIGCHLD, *PASSED_ON}
    # A parent may have left SIGCHLD ignored, and the kernel would then reap the child before we ask.
    chld = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    witness, suspensions = Witness(), Suspensions()
    lingering: Lingering | None = None
    resumed: list[int] = []  # when the command went on again,
    continued: list[int] = []  # and when this process did, by a signal
    try:
        try:
            child = _start(command, env, mask, chld)
            lingering = Lingering(child.pid)
            witness.start()
            beside()
        except OSError as e:
            missing = isinstance(e, FileNotFoundError)
            said = "command not found" if missing else e.strerror
            is_script = command[0].endswith(".py") and Path(command[0]).is_file()
            tell(f"{command[0]}: {said}" + ("; leave out the -- to run it under Python" if is_script else ""))
            return (127 if missing else 126) << 8, resumed
        waiter = threading.Thread(target=_signal_end, args=(child.pid, threading.get_ident()), daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread more is allowed here
            waiter.start()
        suspensions.start()
        while True:
            # Never with a timeout: in a process that was suspended for longer than that, Python returns a signal that
            # nobody has sent (sigtimedwait is then interrupted, and what it has not filled in is returned).
            info = signal.sigwaitinfo(watched)
            if info.si_signo != signal.SIGCHLD:
                if info.si_signo == signal.SIGCONT:
                    continued.append(time.time_ns())
                if info.si_signo in _ENDING:
                    lingering.told_to_end()
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
        # What arrived for the command while it ended is not meant for the report.
        while signal.sigtimedwait(watched, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGCHLD, chld if chld is not None else signal.SIG_DFL)


def _signal_end(child: int, waiting: int) -> None:
    """Send the waiting thread a SIGCHLD once the child has ended: the kernel's may be another thread's, or lost."""
    with contextlib.suppress(OSError):  # reaped already
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    signal.pthread_kill(waiting, signal.SIGCHLD)


def _start(command: Sequence[str], env: Mapping[str, str], mask: Any, chld: Any) -> subprocess.Popen[bytes]:
    # Should this process be killed, the command must not run on unseen.
    tie = tied(signal.SIGTERM)

    def before_exec() -> None:
        tie()
        if chld == signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    # Inherited descriptors (a shell's <(...) or 3<file) are the command's own: keep them.
    return subprocess.Popen(command, env=dict(env), close_fds=False, preexec_fn=before_exec)


# As long as a script may take to save a checkpoint before it ends.
_PATIENCE_S = 15.0


_MOST_NAMED = 8


class Lingering:
    """Watches one command from the first signal that tells it to end."""

    def __init__(self, pid: int, patience_s: float = _PATIENCE_S) -> None:
        self._pid, self._patience_s = pid, patience_s
        self._timer: threading.Timer | None = None

    def told_to_end(self) -> None:
        """Start the clock, unless it runs."""
        if self._timer is None:
            self._timer = threading.Timer(self._patience_s, self._say)
            self._timer.daemon = True
            with contextlib.suppress(RuntimeError):  # no thread more is allowed here
                self._timer.start()

    def ended(self) -> None:
        """Say nothing any more."""
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


# A suspension that is longer than both together is seen.
_EVERY_S = 2.0


_LATE_S = 1.5


class Suspensions:
    """Watches this process from its start() to its end()."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dlprof suspensions", daemon=True)
        self._resumed: list[int] = []

    def start(self) -> None:
        """Begin; where no thread more is allowed, nothing will be seen."""
        with contextlib.suppress(RuntimeError):
            self._thread.start()

    def end(self) -> list[int]:
        """Return when this process went on again after each suspension, Unix ns."""
        self._over.set()
        return self._resumed

    def _watch(self) -> None:
        counters = KernelCounters(whole_process=False)  # of this thread: among them how long it waited for a core
        due, waited_ns = time.monotonic() + _EVERY_S, counters.cores()[1]
        # −1: this kernel does not say it.
        while waited_ns >= 0 and not self._over.wait(due - time.monotonic()):
            late, before_ns = time.monotonic() - due, waited_ns
            due, waited_ns = time.monotonic() + _EVERY_S, counters.cores()[1]
            if late > _LATE_S and waited_ns - before_ns < late / 2 * 1e9:
                self._resumed.append(time.time_ns())
        counters.close()


_SI_KERNEL = 0x80  # <asm-generic/siginfo.h>: sent by the kernel, as the terminal's Ctrl-C is, to the whole group


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


# What the witness runs: it writes which signals reach it, and from whom.
_WITNESS = """
import os, signal, sys
while True:
    seen = signal.sigwaitinfo([int(number) for number in sys.argv[1:]])
    os.write(1, b"%d %d\\n" % (seen.si_signo, seen.si_pid))
"""


# How long a signal may take to reach all whom its sender named; so long one to this process alone is held back.
_TOGETHER_S = 0.1


# How long the witness may take to write what has reached it: on a busy host it waits for a core as all others do.
_WRITTEN_S = 5.0


class Witness:
    """A process that does nothing but sit in the command's process group, to know who a signal was for.

    A scheduler may signal the whole group, or every process of the job. Then the command has had the signal, and would
    have it twice if it were passed on: many a script takes the second for "at once, and without a checkpoint".
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._seen: list[tuple[float, list[bytes]]] = []

    def start(self) -> None:
        """Start it; without it every signal to this process is passed on."""
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
        """Return whether the same signal, of the same sender, has reached the witness too."""
        if self._process is None or self._process.stdout is None:
            return False
        same = b"%d %d" % (info.si_signo, info.si_pid)
        fd = self._process.stdout.fileno()
        until = time.monotonic() + _TOGETHER_S
        while True:
            now = time.monotonic()
            # What reached it alone has nothing to do with what comes later.
            self._seen = [(at, lines) for at, lines in self._seen if lines and now - at < 10 * _TOGETHER_S]
            for _, seen in self._seen:
                if same in seen:
                    seen.remove(same)
                    return True
            # Sent to both, it is there by now; that the witness has come to write it is another matter.
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
    """Take no SIGTERM: a launcher that ends all tasks once one has failed means their commands, and this one's is over.

    What is started meanwhile takes none either.
    """
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def pass_on(child: int, info: signal.struct_siginfo, witness: Witness) -> None:
    """Send the child a signal that reached only this process; stop with it where it is to stop."""
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
