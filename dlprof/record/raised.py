"""The errors that a process handles or ends with: their type, where they were raised, and what may be kept of them."""

from __future__ import annotations

import os
import re
import signal
import sys
from types import FrameType
from typing import Any

from dlprof import redaction
from dlprof.record.calls import own_files

_MOST_TEXT = 2_000  # characters of an error's text


# What PyTorch's allocator of host memory says in a RuntimeError.
_ON_HOST = "DefaultCPUAllocator: can't allocate memory"


# The most characters of any other error's text, of which only the first line is kept.
_MOST_LINE = 300

# The lines of a worker's traceback, which is in the text of the error that its loader raises.
_WORKERS = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def last_error() -> dict[str, Any] | None:
    """Return the error that nobody caught and that ends the process, as `described`; None: it ends otherwise."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return None if error is None else described(error)


def handled(thread: int) -> dict[str, Any] | None:
    """Return the error that a thread handles right now, as `described`; None: none."""
    # Before Python 3.12 these are triples, as sys.exc_info() returns them.
    found: Any = sys._current_exceptions().get(thread)
    error = found[1] if isinstance(found, tuple) else found
    return None if error is None else described(error)


def described(error: BaseException) -> dict[str, Any]:
    """Return an error's type, text and site.

    The text is the first line of what a library says, redacted: what the user's own code says may hold anything, and is
    left out, but for what the system says of a file. The site of an error in a loader's worker is the line there.
    """
    is_own, said, at = own_files(), str(error), error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    from_own = at is not None and is_own(at.tb_frame.f_code.co_filename)
    site = _site(error)
    if "DataLoader worker" in said:
        frames = [found for found in _WORKERS.findall(said) if is_own(found[0])]
        site = "{2} ({0}:{1})".format(*frames[-1]) if frames else site
    line = said.strip().partition("\n")[0] + _signal_of_worker(error)
    if from_own:
        line = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else ""
    return {"type": type(error).__name__, "text": redaction.text(line)[:_MOST_LINE], "site": site}


def _signal_of_worker(error: BaseException) -> str:
    """Return what killed the worker of a DataLoader, in the words of torch where its SIGCHLD handler comes first.

    Where it comes second, torch says "exited unexpectedly" only; the exit codes are in the frame that raised it.
    """
    at = error.__traceback__
    while at is not None:
        for worker in at.tb_frame.f_locals.get("failed_workers") or ():
            if (code := getattr(worker, "exitcode", None) or 0) < 0:
                return f": is killed by signal: {signal.strsignal(-code)}."
        at = at.tb_next
    return ""


def memory_failure() -> dict[str, Any] | None:
    """Return the out-of-memory error that ends the process: type, text and site; None if it ends otherwise.

    Python keeps an uncaught error when it prints it, before exit handlers run.
    """
    # Before Python 3.12 only the second name exists.
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None:
        return None
    kind, text = type(error).__name__, str(error)
    if kind not in ("OutOfMemoryError", "MemoryError") and _ON_HOST not in text:
        return None
    return {"type": kind, "text": text[:_MOST_TEXT], "site": _site(error)}


def _site(error: BaseException) -> str:
    """Return the innermost line of the user's own files in the traceback, as "function (file:line)"; "" if none."""
    is_own, site, at = own_files(), "", error.__traceback__
    while at is not None:
        frame: FrameType = at.tb_frame
        if is_own(frame.f_code.co_filename):
            site = f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{at.tb_lineno})"
        at = at.tb_next
    return site
