"""Runs the user's command as a child in the same process group, on the same terminal, with what it would inherit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlprof.plain import tell
from dlprof.record.launch.lingering import Lingering
from dlprof.record.launch.process import tied
from dlprof.record.launch.signals import PASSED_ON, Witness, pass_on
from dlprof.record.launch.suspension import Suspensions

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
