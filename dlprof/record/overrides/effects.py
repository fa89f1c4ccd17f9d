"""What each override has done in this process: how often it took effect, where, what was there before, what failed."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping
from types import FrameType
from typing import Any

from dlprof.overrides import Value
from dlprof.plain import words_of
from dlprof.record.redaction import shown

# Distinct places and earlier values that are kept of an override, and how often a place is looked for: some take effect
# in every step.
_MOST_KEPT = 8
_MOST_LOOKS = 64

_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120 - a prefix
_LIBRARIES = (
    _OURS + os.sep,
    "<frozen ",
    *{sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")},
)


class Effects:
    """The overrides of a process, by name; its collector writes them. May be asked from any thread."""

    def __init__(self, asked: Mapping[str, Value]) -> None:
        self.news = True  # something is not in the file yet
        self._cwd = os.getcwd()  # noqa: PTH109 - a prefix
        self._looks = dict.fromkeys(asked, _MOST_LOOKS)
        self._entries: dict[str, dict[str, Any]] = {
            name: {"value": shown(name, value), "applied": 0, "before": [], "places": [], "error": None}
            for name, value in asked.items()
        }

    def took(self, name: str, before: Any, *, placed: bool = True) -> None:
        """Note that an override took effect, and what was there before; `placed`: a line of the script called for it.

        Where it stands is looked for a few times, and the file is written again for a new place or value only.
        """
        entry = self._entries[name]
        entry["applied"] += 1
        if self._looks[name] <= 0:
            return
        self._looks[name] -= 1
        self._add(entry["before"], shown(name, before))
        if placed and (place := self._place(sys._getframe(1))) is not None:
            self._add(entry["places"], place)
        if entry["applied"] == 1:
            self.news = True

    def failed(self, name: str, why: BaseException | str) -> None:
        """Note why an override did not take effect, or not everywhere; the first reason is kept."""
        entry = self._entries[name]
        if entry["error"] is None:
            entry["error"] = why if isinstance(why, str) else words_of(why)
            self.news = True

    def written(self) -> Mapping[str, Any]:
        """Return what the file holds."""
        self.news = False
        return self._entries

    def _add(self, kept: list[Any], value: Any) -> None:
        if value not in kept and len(kept) < _MOST_KEPT:
            kept.append(value)
            self.news = True

    def _place(self, frame: FrameType | None) -> list[Any] | None:
        """Return file, line and function of the innermost frame that is in no library; None: there is none."""
        while frame is not None:
            file = frame.f_code.co_filename
            if not file.startswith(_LIBRARIES) and f"{os.sep}site-packages{os.sep}" not in file:
                return [file.removeprefix(self._cwd + os.sep), frame.f_lineno, frame.f_code.co_name]
            frame = frame.f_back
        return None
