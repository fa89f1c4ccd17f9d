"""Keeps Kineto, PyTorch's profiler library, off the script's stderr, reads its messages, and has it detach CUPTI.

Kineto writes its messages to stderr alone; torch 2.3 to 2.12 also write them into the trace, but not the first ones,
which explain why CUPTI cannot be used. In a job on the CPU no message matters: Kineto is silenced there.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dlprof.record.device import relay
from dlprof.record.log import file_of

# Levels of libkineto's ILoggerObserver.h: 2 WARNING, which failing calls of CUPTI are, 4 ERROR; 6 is above them all.
_WARNINGS, _SILENCE = "2", "6"
_LEVEL = "KINETO_LOG_LEVEL"  # is read once, when Kineto begins
_TEAR_DOWN = "TEARDOWN_CUPTI"  # is read whenever a trace has ended

# CUDA graphs crash when CUPTI comes back after it was torn down, with CUDA before this: see torch/profiler/profiler.py.
_TEARS_DOWN_WELL = (12, 6)
_TEAR_DOWN_S = 0.05

_PIPE_BYTES = 1 << 20  # as much as an unprivileged process may have (pipe(7))

# The relay sends what it kept as soon as it has read the pipe to its end, and that is closed by then.
_KEPT_S = 1.0


class Kineto:
    """Kineto's stderr and environment around the calls of our profiler.

    `errors` is what it reported; None: its messages were not kept.
    """

    def __init__(self, on_device: bool, *, elsewhere: bool = False) -> None:
        """Make ready for it; `elsewhere`: in another thread than the one that has imported torch."""
        self.errors: list[str] | None = None
        self._relay: _Relay | None = None
        self._users_level = _LEVEL in os.environ
        self._tearing_down = False
        # Without the relay Kineto's warnings would be on the script's stderr, and without that function for good.
        self._listens = on_device and (self._users_level or _default_level() is not None)
        # Kineto has a line for stderr, whatever its level, where it begins elsewhere.
        if (self._listens or elsewhere) and file_of(2) is not None and sys.executable:
            with contextlib.suppress(OSError):  # this system cannot have one
                self._relay = _Relay(everything=self._users_level)

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Have Kineto begin, which sets how much it reports; afterwards it reports as much as without us."""
        if not self._users_level:
            _put(_LEVEL, _WARNINGS if self._keeps else _SILENCE)
        try:
            with self.listening():
                yield
        finally:
            if not self._users_level:
                _put(_LEVEL, None)
                if self._keeps and (default := _default_level()) is not None:
                    default()

    @property
    def _keeps(self) -> bool:
        """Whether what it reports is kept."""
        return self._relay is not None and self._listens

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Keep Kineto's messages off the script's stderr meanwhile, and nothing else."""
        if self._relay is None:
            yield
            return
        self._relay.put_in()
        try:
            yield
        finally:
            self._relay.take_out()

    def tear_down(self, captured: bool) -> bool | None:
        """Ask Kineto to take CUPTI down at the end of this trace, and return whether it will.

        CUPTI, left alone, stays attached and makes every launch of the rest of the job slower (pytorch#144455 measured
        10 to 20 %). What the user has set is left as it is. `captured`: a CUDA graph was captured while it was
        attached, and may hold on to it. None: CUPTI has no part in this.
        """
        import torch

        if not torch.version.cuda:
            return None
        users = os.environ.get(_TEAR_DOWN)
        if users is not None:
            return users == "1"
        if captured or tuple(map(int, torch.version.cuda.split(".")[:2])) < _TEARS_DOWN_WELL:
            return False
        _put(_TEAR_DOWN, "1")
        self._tearing_down = True
        return True

    def torn_down(self, index: int | None) -> None:
        """Make the calls into CUDA in one of which Kineto takes CUPTI down, so that it does so now.

        It waits for the next one of any thread. A profiler that the script starts before that comes finds itself
        without device events, or crashes (kineto#1554, kineto#1169). Querying whether a stream is idle waits for
        nothing.
        """
        if not self._tearing_down or index is None:
            return
        import torch

        cuda: Any = torch.cuda
        stream = cuda.current_stream(index)
        until = time.monotonic() + _TEAR_DOWN_S
        while time.monotonic() < until:
            stream.query()
            time.sleep(0.001)

    def leave(self) -> None:
        """Leave the environment as it was. Kineto's thread that takes CUPTI down reads it until it has done so."""
        if self._tearing_down and _TEAR_DOWN not in os.environ:
            _put(_TEAR_DOWN, None)
        self._tearing_down = False

    def close(self) -> None:
        """End the relay, and keep its messages in `errors`."""
        if self._relay is not None:
            kept = self._relay.close()
            self.errors = kept if self._listens else None
            self._relay = None


def _put(name: str, value: str | None) -> None:
    """Set a variable for libraries of C, or take it away; `os.environ`, which is the script's, stays as it is."""
    libc = ctypes.CDLL(None)
    if value is None:
        libc.unsetenv(name.encode())
    else:
        libc.setenv(name.encode(), value.encode(), 1)


def _default_level() -> Any:
    """Return PyTorch's function that sets its default level for Kineto, errors only; None: this PyTorch lacks it."""
    import torch

    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_NOLOAD).suppressLibkinetoLogMessages
    except (OSError, AttributeError):
        return None


class _Relay:
    """The process relay.py, and the pipe that leads there."""

    def __init__(self, everything: bool) -> None:
        """Start it; raises OSError where that cannot be."""
        with contextlib.ExitStack() as its_ends, contextlib.ExitStack() as our_ends:
            # Packets keep apart what different threads write; see relay.py.
            read, self._write = os.pipe2(os.O_CLOEXEC | os.O_DIRECT)
            its_ends.callback(os.close, read)
            our_ends.callback(os.close, self._write)
            with contextlib.suppress(OSError):  # each packet takes a page, and by default there are 16
                fcntl.fcntl(self._write, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            self._kept, kept = os.pipe2(os.O_CLOEXEC)
            its_ends.callback(os.close, kept)
            our_ends.callback(os.close, self._kept)
            self._stderr = fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, 3)
            our_ends.callback(os.close, self._stderr)
            command = [sys.executable, "-I", "-S", relay.__file__, *(["all"] if everything else [])]
            # It must load nothing of ours, and is not one of the job's processes.
            env = {name: value for name, value in os.environ.items() if not name.startswith("DLPROF_")}
            first = subprocess.Popen(command, stdin=read, stdout=kept, stderr=self._stderr, env=env)
            if first.wait():
                raise OSError(f"{relay.__file__} ended with status {first.returncode}")
            our_ends.pop_all()  # they stay open
        self._is_in = False
        os.register_at_fork(after_in_child=self._forked)

    def put_in(self) -> None:
        """Put the pipe where stderr is, if the relay is still there."""
        if self._write < 0:
            return
        readers = select.poll()
        readers.register(self._write, 0)
        if not readers.poll(0):  # it would report that there is no reader any more
            os.dup2(self._write, 2)
            self._is_in = True

    def take_out(self) -> None:
        """Put stderr back, unless the script has put something else there meanwhile."""
        if self._is_in:
            self._is_in = False
            if file_of(2) == file_of(self._write):
                os.dup2(self._stderr, 2)

    def close(self) -> list[str]:
        """Return what was kept. A child of the script's that still holds the pipe goes on writing through it."""
        if self._write < 0:
            return []
        os.close(self._write)
        os.close(self._stderr)
        self._write = -1
        until = time.monotonic() + _KEPT_S
        kept = b""
        while (left := until - time.monotonic()) > 0 and select.select([self._kept], [], [], left)[0]:
            read = os.read(self._kept, 65536)
            if not read:
                break
            kept += read
        os.close(self._kept)
        return kept.decode(errors="replace").splitlines()

    def _forked(self) -> None:
        """Run in a fork's child, which has the stderr that it would have had, and holds nothing open for us."""
        if self._write >= 0:
            self.take_out()
            os.close(self._write)
            self._write = -1
