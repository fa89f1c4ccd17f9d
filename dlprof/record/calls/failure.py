"""What a process died of, where that is memory: the error that Python printed last, and the user's line of it."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from dlprof.record.calls.frames import own_files

_MOST_TEXT = 2_000  # characters of an error's text

# What PyTorch's allocator of host memory says in a RuntimeError.
_ON_HOST = "DefaultCPUAllocator: can't allocate memory"


def memory_failure() -> dict[str, Any] | None:
    """Return the error for want of memory that the process ends with: type, text and site; None: it ends otherwise.

    Python keeps an error that nobody caught when it prints it, before anything that runs at exit.
    """
    # Until Python 3.12 it had the first name alone.
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None:
        return None
    kind, text = type(error).__name__, str(error)
    if kind not in ("OutOfMemoryError", "MemoryError") and _ON_HOST not in text:
        return None
    return {"type": kind, "text": text[:_MOST_TEXT], "site": _site(error)}


def _site(error: BaseException) -> str:
    """Return the innermost line of the user's own that the error passed, as "function (file:line)"; "": none."""
    is_own, site, at = own_files(), "", error.__traceback__
    while at is not None:
        frame: FrameType = at.tb_frame
        if is_own(frame.f_code.co_filename):
            site = f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{at.tb_lineno})"
        at = at.tb_next
    return site
