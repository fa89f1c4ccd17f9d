"""Notes a signal that asks for the end, so that what runs is ended first and what was found is kept."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

_ASKS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Asked:
    """`by`: the signal that has asked for the end; 0: none yet."""

    by: int = 0

    def __call__(self) -> bool:
        """Return whether one has."""
        return self.by != 0


@contextmanager
def stopping() -> Iterator[Asked]:
    """Note signals that ask for the end, instead of ending; those that are ignored stay so."""
    asked = Asked()

    def note(number: int, _frame: FrameType | None) -> None:
        asked.by = asked.by or number

    before = {number: signal.getsignal(number) for number in _ASKS}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, note)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
