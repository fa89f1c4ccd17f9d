"""Passes on what a process writes to stderr, but for the messages of Kineto, which it keeps.

Kineto, PyTorch's profiler library, and CUPTI below it report errors on stderr only, among many messages that nobody
needs. While our profiler starts or stops, descriptor 2 of the rank is a pipe, and this file, as a process of its own,
reads it. So nothing else is lost or waits: not what other threads print meanwhile, not what a child that they start
prints for as long as it lives, and not the last message of a process that dies in the call. A thread could not do that,
since the call may hold the interpreter's lock while the pipe is full; a file in the pipe's place would swallow that
last message.

Started as `python -I -S relay.py`: stdin is the pipe, stdout takes what is kept, stderr is the real one. With the
argument "all" Kineto's messages are passed on as well, since the user has asked for them.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys

# As Kineto begins its messages (libkineto/src/Logger.cpp): "WARNING:2026-01-02 03:04:05 17:17 init.cpp:178] …".
MESSAGE = re.compile(
    rb"(VERBOSE|INFO|WARNING|STAGE|ERROR|USDT):\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \d+:\d+ [\w.]+:\d+\] "
    # libkineto_api.cpp, where the profiler begins in another thread than the one that has loaded Kineto. It goes on.
    rb"|ERROR: External init callback must run in same thread as registerClient",
    re.ASCII,
)
KEPT_LEVELS = (b"WARNING", b"ERROR")

# A pipe holds 64 KiB, and what is kept is read at the end only.
_MOST_KEPT = 32 << 10
_MOST_EACH = 1000

# The pipe is in packet mode (pipe(2), O_DIRECT): what one call writes is read by one call, in packets of at most
# PIPE_BUF bytes. So a message of several lines is not mixed up with what another thread writes in between.
_PACKET = select.PIPE_BUF


def relay(pipe: int, stderr: int, kept: int, everything: bool) -> None:
    """Read packets to the end of the pipe; pass on what is no message of Kineto's, and keep its warnings and errors."""
    left = _MOST_KEPT  # bytes that may still be kept
    keeping = ended = False  # in a message that is longer than a packet; after one whose line is not ended yet
    while packet := os.read(pipe, _PACKET):
        found = MESSAGE.match(packet)
        if found is None and not keeping and not (ended and packet == b"\n"):
            ended = False
            _pass_on(stderr, packet)
            continue
        if everything:
            _pass_on(stderr, packet)
        if found is not None and found[1] in KEPT_LEVELS and left > 0:
            # One line each, so that a reader can split them.
            text = packet[:_MOST_EACH].strip().replace(b"\n", b" ") + b"\n"
            left -= len(text)
            os.write(kept, text)
        keeping = len(packet) == _PACKET and (found is not None or keeping)
        ended = not keeping and packet[-1:] != b"\n"


def _pass_on(stderr: int, data: bytes) -> None:
    """Write all of it, or nothing if there is no reader any more."""
    with contextlib.suppress(OSError):
        while data:
            select.select([], [stderr], [])  # the script may have it not block
            data = data[os.write(stderr, data) :]


def main() -> None:
    """Detach from the rank, and relay until the pipe is at its end: signals are for the job."""
    of_job = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    for number in of_job:
        signal.signal(number, signal.SIG_IGN)
    if os.fork():
        os._exit(0)  # a script that waits for any child of its own must not get this one
    relay(0, 2, 1, sys.argv[1:] == ["all"])
    os._exit(0)


if __name__ == "__main__":
    main()
