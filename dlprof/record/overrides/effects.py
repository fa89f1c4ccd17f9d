"""What each override has done in this process: how often it took effect, where, what was there before, what failed."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from dlprof.overrides import Value
from dlprof.plain import words_of
from dlprof.record.calls.frames import own_files
from dlprof.redaction import shown

# Distinct places and earlier values that are kept of an override, and how often a place is looked for: some take effect
# in every step.
_MOST_KEPT = 8
_MOST_LOOKS = 64

Place = tuple[str, int, str]  # file, line and function


class Effects:
    """The overrides of a process, by name; its collector writes them. May be asked from any thread."""

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
