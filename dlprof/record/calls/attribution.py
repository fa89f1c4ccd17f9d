"""Keeps Python's warnings at the lines that they name without us, though frames of ours stand above those.

A function that warns with `stacklevel=2` names the frame that called it: a wrapper of ours, which it does not know of.
"""

from __future__ import annotations

import sys
from types import CodeType, FunctionType
from typing import Any

# `stacklevel` of warnings and of logging counts no frame of a file with "importlib" and "_bootstrap" in its name:
# _is_internal_frame of Lib/warnings.py and Lib/logging, is_internal_frame of Python/_warnings.c, since Python 3.3.
# The file's own name stays at the end, and the source in a traceback: it is found by the module's loader.
_NOT_COUNTED = "importlib_bootstrap"


def passed_over(wrapper: Any) -> Any:
    """Have warnings and logging count no frame of a function, or of a class method's, in place; return it.

    For a wrapper that calls what it stands for from its own frame. Anything else is returned as it is.
    """
    function = getattr(wrapper, "__func__", wrapper)
    if isinstance(function, FunctionType):
        folder, slash, name = function.__code__.co_filename.rpartition("/")
        if not folder.endswith(_NOT_COUNTED):
            file = f"{folder}{slash}{_NOT_COUNTED}/{name}"
            function.__code__ = function.__code__.replace(co_filename=file)
    return wrapper


def in_place_of(wrapper: Any, original: Any) -> Any:
    """Return a wrapper with the name of another Python function, and a frame that looks like its at its last line.

    For a wrapper that does by itself what the original does, and has no frame of the original's below its own. It must
    use no globals. Where this Python keeps line numbers in an unknown way, it is as `passed_over` makes it.
    """
    code = original.__code__
    line = max(line for _, _, line in code.co_lines() if line is not None)
    table = _one_line(wrapper.__code__)
    ours = wrapper.__code__.replace(
        co_filename=code.co_filename, co_firstlineno=line, co_linetable=table, co_name=code.co_name
    )
    if sys.version_info >= (3, 11):
        ours = ours.replace(co_qualname=code.co_qualname)
    if {at for _, _, at in ours.co_lines()} != {line}:
        passed_over(wrapper)
        return wrapper
    # Dynamo knows the original by its name. Around another function it puts a frame, and names its inputs by that.
    made = FunctionType(ours, original.__globals__, original.__name__, wrapper.__defaults__, wrapper.__closure__)
    made.__kwdefaults__ = wrapper.__kwdefaults__
    made.__qualname__, made.__doc__ = original.__qualname__, original.__doc__
    return made


def _one_line(code: CodeType) -> bytes:
    """Return a table of line numbers with all instructions on the first line (Objects/locations.md, PEP 626)."""
    size = len(code.co_code)
    if sys.version_info >= (3, 11):
        no_columns, same_line = 13, 0
        lengths = [min(8, size // 2 - at) for at in range(0, size // 2, 8)]
        return bytes(b for length in lengths for b in (0x80 | no_columns << 3 | length - 1, same_line))
    return bytes(b for at in range(0, size, 254) for b in (min(254, size - at), 0))
