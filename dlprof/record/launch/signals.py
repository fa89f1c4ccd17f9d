"""Passes on to the user's command the signals that reached the supervisor alone, each once."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from dlprof.record.launch.process import awaits, tied

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
