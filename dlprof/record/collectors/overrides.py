"""Applies the overrides of `--set`, and writes to the log `overrides` what each of them did."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from dlprof.overrides import Value
from dlprof.record.recorder import Recorder
from dlprof.record.step_clock import Step

if TYPE_CHECKING:
    from dlprof.record.overrides.constructors import Effects

# The file is written when training starts, then at intervals that double, and at the end.
_FIRST_PAUSE_NS = 1_000_000_000


# What installs the wrappers of the overrides of one kind: a function of dlprof/record/overrides.
_Part = Callable[[Mapping[str, Value], "Effects"], None]


class Overrides:
    """Writes the log `overrides`: of each its value, how often and where it took effect, and the value before."""

    name = "overrides"

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._values: Mapping[str, Value] = {}
        self._before: Mapping[str, Any] = {}  # variables of the command's environment that are overridden
        self._effects: Effects | None = None  # None if nothing is overridden
        self._switches: Any = None  # the module, imported when it is needed
        self._due_ns = 0
        self._pause_ns = _FIRST_PAUSE_NS
        if text := os.environ.get("DLPROF_SET"):
            self._install(json.loads(text))

    def start(self, recorder: Recorder) -> None:
        """Write what took effect before training."""
        if self._effects is not None:
            self._recorder = recorder
            self._switches.begin(self._values, self._effects)
            self._write(perf_counter_ns())

    def step(self, done: Sequence[Step]) -> None:
        """Write again if something new took effect."""
        if self._recorder is None or self._effects is None or not self._effects.news:
            return
        now = done[-1].end_ns
        if now > self._due_ns:
            self._write(now)

    def stop(self) -> None:
        """Write the final state."""
        if self._recorder is not None:
            self._write(perf_counter_ns())
            self._recorder = None

    def _install(self, settings: Mapping[str, Any]) -> None:
        """Install the wrappers. This happens right after torch was imported, before the script creates anything."""
        from dlprof.record.overrides import constructors, models, switches

        parts: Mapping[str, tuple[_Part, ...]] = {
            "loader": (constructors.install_loaders,),
            "ddp": (constructors.install_ddp,),
            "optimizer": (constructors.install_optimizers,),
            "torch": (switches.install, models.install),
            "model": (models.install,),
            "gc": (switches.install,),
            "copy": (switches.install_copies,),
        }
        self._values, self._before = settings["set"], settings["environment"]
        self._effects = constructors.Effects(self._values)
        self._switches = switches
        groups = {name.partition(".")[0] for name in self._values}
        for part in dict.fromkeys(part for group, some in parts.items() if group in groups for part in some):
            its = (name for name in self._values if part in parts.get(name.partition(".")[0], ()))
            with self._effects.noting(*its):
                part(self._values, self._effects)

    def _write(self, now_ns: int) -> None:
        assert self._recorder is not None
        assert self._effects is not None
        self._switches.see_environment(self._values, self._before, self._effects)
        self._recorder.keep("overrides", json.dumps(self._effects.written()))
        self._due_ns, self._pause_ns = now_ns + self._pause_ns, self._pause_ns * 2
