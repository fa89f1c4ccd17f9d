"""Finds the user's line in a stack as PyTorch dumps it: dicts of function, file and line, the innermost first.

Such a stack may have C++ frames between and below the Python frames. Work on a thread of the autograd engine has only
C++ frames.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

# Files of Python itself, of installed packages, and of code that a compiler wrote.
_INSTALLED = re.compile(
    r"[/\\](site|dist)-packages[/\\]|[/\\]lib(64)?[/\\]python3[^/\\]*[/\\]|[/\\]torch[/\\](_|nn|optim|autograd|utils|"
    r"distributed|cuda|fx|ao|jit|library|overrides|functional)|[/\\]torchinductor_|^<|\.cpython-"
)
_TORCH = re.compile(r"[/\\]torch[/\\]|[/\\]torchinductor_|^<")
_PYTHON = re.compile(r"\.py$|^<(?!built-in)")
_NODE = re.compile(r"(\w+Backward\d*|AccumulateGrad)::(?:apply|operator)\b")
_ENGINE = "torch::autograd::Engine::"

MOST_FRAMES = 400
_LONGEST = 300  # characters of a function's or a file's name

NO_FRAME = ""


class Site(NamedTuple):
    """Where something was called: `line`, the user's, as "function (file:line)"; `via`, what that called in PyTorch.

    Without a line of the user's, the innermost one of a library, or "backward of NODE"; "": no frame is known.
    """

    line: str
    via: str


class Sites:
    """Finds the site of each stack, each distinct stack once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Site]] = {}  # keeps the stack alive, so that no other one gets its id

    def of(self, frames: Any) -> Site:
        """Return the site of a stack."""
        found = self._known.get(id(frames))
        if found is None:
            found = self._known[id(frames)] = frames, site_of(frames)
        return found[1]


def site_of(frames: Any) -> Site:
    """Return the site of a stack; Site("", "") if it is malformed."""
    library = inner = node = ""
    engine = False
    for frame in frames[:MOST_FRAMES] if isinstance(frames, list) else ():
        if not isinstance(frame, dict):
            continue
        name, file, line = frame.get("name"), frame.get("filename"), frame.get("line")
        if not isinstance(name, str) or not isinstance(file, str):
            continue
        if not _PYTHON.search(file[:4096]):
            if not node and (named := _NODE.search(name[:4096])):
                node = named[1]
            engine = engine or name.startswith(_ENGINE)
            continue
        place = f"{name[:_LONGEST]} ({file[-_LONGEST:]}:{line if isinstance(line, int) else 0})"
        if not _INSTALLED.search(file):
            return Site(place, inner or library)
        if not _TORCH.search(file):
            library = library or place
        inner = inner or place
    if library:
        return Site(library, inner)
    return Site(f"backward of {node or 'some node'}" if node or engine else inner, inner)
