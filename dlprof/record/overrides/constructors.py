"""Makes the script's objects with other arguments: the wrapper of a constructor that all kinds of objects share.

What each override has done in this process: how often it took effect, where, what was there before, what failed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

from dlprof.overrides import Value
from dlprof.plain import words_of
from dlprof.record import handlers
from dlprof.record.attribution import passed, passing
from dlprof.record.calls import own_files
from dlprof.redaction import shown


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


# Distinct places and earlier values that are kept of an override, and how often a place is looked for: some take effect
# in every step.
_MOST_KEPT = 8


_MOST_LOOKS = 64


Place = tuple[str, int, str]  # file, line and function


class Effects:
    """The overrides of a process, by name; its collector writes them. Any thread may call these methods."""

    def __init__(self, asked: Mapping[str, Value]) -> None:
        self.news = True  # something is not in the file yet
        self._is_own = own_files()
        self._cwd = os.getcwd()  # noqa: PTH109 - a prefix
        self._looks = dict.fromkeys(asked, _MOST_LOOKS)
        self._entries: dict[str, dict[str, Any]] = {
            name: {"value": shown(name, value), "applied": 0, "before": [], "places": [], "error": None}
            for name, value in asked.items()
        }

    def took(self, name: str, before: Any, *, placed: bool | Place = True) -> None:
        """Note that an override took effect, and what was there before.

        `placed`: where; True: the line of the script that is being run, False: nowhere in particular. It is looked for
        a few times, and the file is written again for a new place or value only.
        """
        entry = self._entries[name]
        entry["applied"] += 1
        if self._looks[name] <= 0:
            return
        self._looks[name] -= 1
        if (shown_before := shown(name, before)) != entry["value"] or not entry["before"]:
            self._add(entry["before"], shown_before)  # what a library makes again has the value already
        place = self._place(sys._getframe(1)) if placed is True else placed
        if place:
            self._add(entry["places"], [place[0].removeprefix(self._cwd + os.sep), *place[1:]])
        if entry["applied"] == 1:
            self.news = True

    def has_applied(self, name: str) -> bool:
        """Return whether an override took effect so far."""
        return bool(self._entries[name]["applied"])

    def failed(self, name: str, why: BaseException | str, *, undone: bool = False) -> None:
        """Note why an override did not take effect, or not everywhere; the first reason is kept.

        `undone`: it had taken effect, and was taken back.
        """
        entry = self._entries[name]
        if undone and entry["applied"]:
            entry["applied"] -= 1
        if entry["error"] is None:
            entry["error"] = why if isinstance(why, str) else words_of(why)
            self.news = True

    @contextlib.contextmanager
    def noting(self, *names: str) -> Iterator[None]:
        """Note what is raised meanwhile as the reason why these overrides did not take effect; it goes no further."""
        try:
            yield
        except Exception as e:  # noqa: BLE001 - a torch that is not as we know it; the script goes on
            for name in names:
                self.failed(name, e)

    def written(self) -> Mapping[str, Any]:
        """Return what the file holds."""
        self.news = False
        return self._entries

    def _add(self, kept: list[Any], value: Any) -> None:
        if value not in kept and len(kept) < _MOST_KEPT:
            kept.append(value)
            self.news = True

    def _place(self, frame: FrameType | None) -> Place | None:
        """Return the place of the innermost frame that is in no library; None: there is none."""
        while frame is not None:
            file = frame.f_code.co_filename
            if self._is_own(file):
                return file, frame.f_lineno, frame.f_code.co_name
            frame = frame.f_back
        return None
