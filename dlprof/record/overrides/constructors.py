"""Makes the script's objects with other arguments: the wrapper of a constructor that all kinds of objects share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from dlprof.overrides import Value
from dlprof.record.overrides.effects import Effects


class Kind(Protocol):
    """A kind of object whose constructors are wrapped."""

    group: str  # of the overrides: "loader"
    wanted: Mapping[str, Value]  # those that were asked for, by setting
    effects: Effects

    def change(self, made: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments to make an object with instead of those given; an override that it leaves is noted."""

    def refused(self, made: Any, given: Mapping[str, Any]) -> None:
        """Take back what a constructor that failed may have changed in its arguments."""

    def done(self, made: Any, given: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
        """See an object that was made with changed arguments."""


def wanted(asked: Mapping[str, Value], group: str) -> dict[str, Value]:
    """Return the overrides of a group, by setting."""
    return {name.partition(".")[2]: value for name, value in asked.items() if name.startswith(f"{group}.")}


def watched(kind: Kind, making: list[int], original: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor that makes objects of a kind with changed arguments.

    `making`: the objects that are being made; a class may call the constructor above it, which changes nothing then.
    """
    signature = inspect.signature(original)

    def fail(error: BaseException) -> None:
        for setting in kind.wanted:
            kind.effects.failed(f"{kind.group}.{setting}", error)

    @functools.wraps(original)
    def __init__(made: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - what it stands for
        if id(made) in making:
            return original(made, *args, **kwargs)
        try:
            bound = signature.bind(made, *args, **kwargs)
            bound.apply_defaults()
        except TypeError:
            return original(made, *args, **kwargs)  # which says what is wrong
        given = dict(bound.arguments)
        making.append(id(made))
        try:
            try:
                changed = kind.change(made, given)
            except Exception as e:  # noqa: BLE001 - made as the script says
                fail(e)
                changed = {}
            bound.arguments.update(changed)
            try:
                original(*bound.args, **bound.kwargs)
            except Exception as e:
                if not changed:
                    raise
                fail(e)
                kind.refused(made, bound.arguments)
                bound.arguments.update({name: given[name] for name in changed if name in kind.wanted})
                original(*bound.args, **bound.kwargs)
                return None
        finally:
            making.remove(id(made))
        try:
            for setting in kind.wanted:
                if setting in changed:
                    kind.effects.took(f"{kind.group}.{setting}", given[setting])
            kind.done(made, given, changed)
        except Exception as e:  # noqa: BLE001 - it is made, and the script goes on
            fail(e)
        return None

    return __init__
