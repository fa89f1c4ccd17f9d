"""Makes the script's objects with other arguments: the wrapper of a constructor that all kinds of objects share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from dlprof.overrides import Value
from dlprof.record import handlers
from dlprof.record.calls.attribution import passed, passing
from dlprof.record.overrides.effects import Effects


class Kind:
    """A kind of object whose constructors are wrapped; `wanted` are the overrides that were asked for, by setting."""

    group: str  # of the overrides: "loader"

    def __init__(self, settings: Mapping[str, Value], effects: Effects) -> None:
        self.wanted = settings
        self.effects = effects

    def change(self, made: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments to make an object with instead of those given; an override that it leaves is noted."""
        new = {name: value for name, value in self.wanted.items() if name in given}
        for name in self.wanted.keys() - new.keys():
            self.effects.failed(f"{self.group}.{name}", f"{type(made).__name__} does not take it")
        return new

    def refused(self, made: Any, given: Mapping[str, Any]) -> None:
        """Take back what a constructor that failed may have changed in its arguments."""

    def done(self, made: Any, given: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
        """See an object that was made with changed arguments."""

    def fail(self, error: BaseException) -> None:
        """Note why none of them took effect."""
        for setting in self.wanted:
            self.effects.failed(f"{self.group}.{setting}", error)


def wanted(asked: Mapping[str, Value], group: str) -> dict[str, Value]:
    """Return the overrides of a group, by setting."""
    return {name.partition(".")[2]: value for name, value in asked.items() if name.startswith(f"{group}.")}


def _bound(
    signature: inspect.Signature, made: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments | None:
    """Return the arguments by name, with the defaults; None: they do not fit."""
    try:
        bound = signature.bind(made, *args, **kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    return bound


def watched(kind: Kind, making: list[int], original: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor that makes objects of a kind with changed arguments.

    `making`: the objects that are being made; a class may call the constructor above it, which changes nothing then.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(made: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - what it stands for
        if id(made) in making:
            with passing:
                return original(made, *args, **kwargs)
        bound = _bound(signature, made, args, kwargs)
        if bound is None:
            with passing:
                return original(made, *args, **kwargs)  # which says what is wrong
        given = dict(bound.arguments)
        making.append(id(made))
        try:
            try:
                changed = kind.change(made, given)
            except Exception as e:  # noqa: BLE001 - made as the script says
                kind.fail(e)
                changed = {}
            bound.arguments.update(changed)
            before = handlers.runs()
            try:
                original(*bound.args, **bound.kwargs)
            except BaseException as e:
                # What a signal's handler raises refuses nothing.
                if not changed or not isinstance(e, Exception) or handlers.runs() != before:
                    passed(e)
                    raise
                kind.fail(e)
                kind.refused(made, bound.arguments)
                bound.arguments.update({name: given[name] for name in changed if name in kind.wanted})
                with passing:
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
            kind.fail(e)
        return None

    return __init__
