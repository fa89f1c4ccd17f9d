"""Puts the overrides of `--set` in place, and writes what each of them did: overrides.json."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING

from dlprof.files import write
from dlprof.plain import words_of
from dlprof.record.recorder import Recorder
from dlprof.record.stepping import Step

if TYPE_CHECKING:
    from dlprof.record.overrides.effects import Effects

# The file is written when training starts, soon after, ever less often, and at the end.
_FIRST_PAUSE_NS = 1_000_000_000


class Overrides:
    """Writes overrides.json: of each override its value, how often it took effect, where, and what was before."""

    name = "overrides"

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._effects: Effects | None = None
        self._due_ns = 0
        self._pause_ns = _FIRST_PAUSE_NS
        if text := os.environ.get("DLPROF_SET"):
            self._install(json.loads(text))

    def start(self, recorder: Recorder) -> None:
        """Write what took effect before training."""
        if self._effects is not None:
            self._recorder = recorder
            self._write(perf_counter_ns())

    def step(self, done: Sequence[Step]) -> None:
        """Write again where there is news."""
        if self._recorder is None or self._effects is None or not self._effects.news:
            return
        now = done[-1].start_ns + done[-1].dur_ns
        if now > self._due_ns:
            self._write(now)

    def stop(self) -> None:
        """Write for the last time."""
        if self._recorder is not None:
            self._write(perf_counter_ns())
            self._recorder = None

    def _install(self, told: dict[str, dict[str, bool | int | float | str | None]]) -> None:
        """Put the wrappers in place: now, right after torch was imported and before the script makes anything."""
        from dlprof.record.overrides import effects, loaders, switches

        asked = {name: value for name, value in told["set"].items() if value is not None}
        self._effects = effects.Effects(asked)
        switches.note_environment(asked, told["environment"], self._effects)
        for kind, part in (("loader.", loaders), ("torch.", switches)):
            try:
                part.install(asked, self._effects)
            except Exception as e:  # noqa: BLE001, PERF203 - a torch that is not as we know it costs these alone
                for name in asked:
                    if name.startswith(kind):
                        self._effects.failed(name, words_of(e))

    def _write(self, now_ns: int) -> None:
        assert self._recorder is not None
        assert self._effects is not None
        write(self._recorder.folder / "overrides.json", json.dumps(self._effects.written()))
        self._due_ns, self._pause_ns = now_ns + self._pause_ns, self._pause_ns * 2
