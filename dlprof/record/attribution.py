"""Keeps Python's warnings at the lines that they name without us, and our frames out of the script's tracebacks.

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

_OURS = __file__.rpartition("attribution")[0]  # as co_filename is written
_in_place: list[CodeType] = []  # of wrappers that look like another function; there is one of them a recording


def passed_over(wrapper: Any) -> Any:
    """Have warnings and logging count no frame of a function, or of a class method's, in place; return it.

    For a wrapper that calls the original from its own frame. Anything else is returned unchanged.
    """
    function = getattr(wrapper, "__func__", wrapper)
    if isinstance(function, FunctionType):
        folder, slash, name = function.__code__.co_filename.rpartition("/")
        if not folder.endswith(_NOT_COUNTED):
            file = f"{folder}{slash}{_NOT_COUNTED}/{name}"
            function.__code__ = function.__code__.replace(co_filename=file)
    return wrapper


def passed(error: BaseException) -> None:
    """Take the caller's frame, a wrapper's, out of the traceback of what the original raised; the caller re-raises.

    Python 3.10 keeps a traceback of its own for that, and shows the frame.
    """
    trace = error.__traceback__
    if trace is not None and trace.tb_frame is sys._getframe(1):
        error.__traceback__ = trace.tb_next


class _Passing:
    """A block in which a wrapper calls the original: see `passed`."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and trace.tb_frame is sys._getframe(1):
            error.__traceback__ = trace.tb_next


passing = _Passing()


def is_wrapper(code: CodeType) -> bool:
    """Return whether code is that of a wrapper, which passes its call on to the original."""
    file = code.co_filename
    return (_NOT_COUNTED in file and file.startswith(_OURS)) or any(code is one for one in _in_place)


def in_place_of(wrapper: Any, original: Any) -> Any:
    """Return a wrapper with the name of another Python function, and a frame that looks like its at its last line.

    For a wrapper that does by itself what the original does, and has no frame of the original's below its own. It must
    use no globals. Where this Python keeps line numbers in an unknown way, it is as `passed_over` makes it.
    """
    code = original.__code__
    line = max(line for _, _, line in code.co_lines() if line is not None)
    table = _one_line(wrapper.__code__, _columns(code, line))
    ours = wrapper.__code__.replace(
        co_filename=code.co_filename, co_firstlineno=line, co_linetable=table, co_name=code.co_name
    )
    if sys.version_info >= (3, 11):
        ours = ours.replace(co_qualname=code.co_qualname)
    if {at for _, _, at in ours.co_lines()} != {line}:
        passed_over(wrapper)
        return wrapper
    # Dynamo knows the original by its name. Around another function it puts a frame, and names its inputs by that.
    _in_place[:] = [ours]
    made = FunctionType(ours, original.__globals__, original.__name__, wrapper.__defaults__, wrapper.__closure__)
    made.__kwdefaults__ = wrapper.__kwdefaults__
    made.__qualname__, made.__doc__ = original.__qualname__, original.__doc__
    return made


def _columns(code: CodeType, line: int) -> tuple[int, int] | None:
    """Return the columns of the call that a line returns, as a traceback underlines it; None: they are not kept."""
    if sys.version_info < (3, 11):
        return None
    places = (place for place in code.co_positions() if place[:2] == (line, line))
    found = {(first, end) for _, _, first, end in places if first is not None and end is not None}
    statement = min((first for first, _ in found), default=0)  # "return" itself
    within = [(first, end) for first, end in found if first > statement]
    return max(within, key=lambda one: one[1] - one[0], default=None)


def _one_line(code: CodeType, columns: tuple[int, int] | None) -> bytes:
    """Return a table that has all instructions on the first line, at these columns (Objects/locations.md, PEP 626)."""
    size = len(code.co_code)
    if sys.version_info >= (3, 11):
        no_columns, long_form = 13, 14
        kind, place = (no_columns, b"\0") if columns is None else (long_form, b"\0\0" + b"".join(map(_varint, columns)))
        lengths = [min(8, size // 2 - at) for at in range(0, size // 2, 8)]
        return b"".join(bytes([0x80 | kind << 3 | length - 1]) + place for length in lengths)
    return bytes(b for at in range(0, size, 254) for b in (min(254, size - at), 0))


def _varint(column: int) -> bytes:
    """Return a column as the table has it: plus 1, six bits a byte, the lowest first, and a bit that says more come."""
    value = column + 1
    return bytes([value]) if value < 64 else bytes([value & 63 | 64, value >> 6])
