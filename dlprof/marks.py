"""What a script may use whether or not anybody records: marks of its steps and ranges, and the version."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

__version__ = "0.1.0"

_F = TypeVar("_F", bound=Callable[..., Any])

# Set by record/hooks.py in a process that is recorded. Nothing here imports that, so that a script may always call us.
recorder: Any = None


def step(*, samples: int | None = None, tokens: int | None = None) -> None:
    """Say that a step of the training loop has ended; from the first call on, steps end here and nowhere else.

    `samples`, `tokens`: of how many this rank's step was, where its loaders and its model's input do not show that.
    """
    if recorder is not None:
        recorder.clock.user_step(samples, tokens)


def annotate(name: str) -> _Annotation:
    """Name a part of the script, as a context manager or a decorator; the name shows in the recorded trace."""
    return _Annotation(name)


class _Annotation:
    """A named range of the script; one entry at a time."""

    __slots__ = ("_name", "_range")

    def __init__(self, name: str) -> None:
        self._name = name
        self._range: Any = None

    def __enter__(self) -> None:
        if recorder is not None:
            self._range = recorder.clock.open_range(self._name)

    def __exit__(self, *_: object) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def __call__(self, function: _F) -> _F:
        name = self._name

        @functools.wraps(function)
        def annotated(*args: Any, **kwargs: Any) -> Any:
            # A range of its own for each call: the function may recurse or run in several threads.
            with _Annotation(name):
                return function(*args, **kwargs)

        return annotated  # type: ignore[return-value]
