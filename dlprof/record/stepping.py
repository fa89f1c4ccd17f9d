"""A step of the training loop and its phases: while they are measured, and once the step has ended."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from dlprof.record.loaders import LoaderSeen, Pass

if TYPE_CHECKING:
    from dlprof.record.recorder import Recorder

FETCH, FORWARD, BACKWARD, OPTIMIZER = range(4)
PHASES = ("fetch", "forward", "backward", "optimizer")  # their names
_RANGES = tuple(f"dlprof::{phase}" for phase in PHASES)


class Step(NamedTuple):
    """One step of the training loop that has ended. Times are perf_counter nanoseconds."""

    number: int
    start_ns: int
    dur_ns: int
    lead_ns: int  # from the start to the first forward, fetching not counted; -1: there was none
    fetch_ns: int  # this and the next three: exclusive of each other
    forward_ns: int
    backward_ns: int
    optimizer_ns: int
    fetches: int
    forwards: int
    backwards: int
    optimizer_steps: int
    first: int
    profiled: int
    device: Any  # what StepClock.end_of_step returned


@dataclass(slots=True, eq=False)
class Row:
    """The step that is being measured: one object for all of them, as making one costs as much as a phase's hook."""

    number: int
    start_ns: int
    lead_ns: int = -1
    parts: list[int] = field(default_factory=lambda: [0, 0, 0, 0])  # exclusive ns in FETCH, FORWARD, …
    fetches: int = 0
    forwards: int = 0
    backwards: int = 0
    optimizer_steps: int = 0
    first: int = 0
    profiled: int = 0
    # Loaders that it took batches from, and that are not yet known to train.
    unsettled: list[LoaderSeen] = field(default_factory=list)

    @property
    def worked(self) -> bool:
        """Return whether anything but fetching was seen."""
        return bool(self.forwards or self.backwards or self.optimizer_steps)

    def end(self, now: int, device: Any) -> tuple[Any, ...]:
        """Return the cells of a Step that ends now, and become the next step."""
        parts = self.parts
        cells = (
            self.number,
            self.start_ns,
            now - self.start_ns,
            self.lead_ns,
            *parts,
            self.fetches,
            self.forwards,
            self.backwards,
            self.optimizer_steps,
            self.first,
            self.profiled,
            device,
        )
        self.number += 1
        self.start_ns = now
        self.lead_ns = -1
        parts[FETCH] = parts[FORWARD] = parts[BACKWARD] = parts[OPTIMIZER] = 0
        self.fetches = self.forwards = self.backwards = self.optimizer_steps = self.first = self.profiled = 0
        return cells

    def unsettle(self, over: Pass) -> bool:
        """Note a pass that the step takes batches from, unless its loader is known to train.

        Return whether this step had not taken any from that loader.
        """
        seen = over.loader
        if seen is None or seen.role == "train":
            over.unsettled = False
            return False
        if seen in self.unsettled:
            return False
        self.unsettled.append(seen)
        return True

    def settle(self) -> bool:
        """Set the role of the loaders by what their batches were used for; return whether one has changed."""
        kind = kind_of(self)
        changed = [s for s in self.unsettled if s.role != kind != "other"]
        for seen in changed:
            seen.role = kind
        self.unsettled.clear()
        return bool(changed)


def kind_of(step: Step | Row) -> str:
    """Return train, validation (forward only) or other."""
    if step.backwards or step.optimizer_steps:
        return "train"
    return "validation" if step.forwards else "other"


@dataclass(slots=True, eq=False)
class Phases:
    """The phases of the step that is being measured. They nest, and their times exclude each other."""

    _driver: Recorder
    row: Row = field(default_factory=lambda: Row(0, 0))
    owner: int = 0  # the thread that trains
    off: bool = False
    # True while a module's call needs no look: inside a fetch, a forward or a backward, or when switched off.
    inside: bool = False
    phases: list[int] = field(default_factory=list)  # that are open, the innermost last
    # What opens a named range around each phase: the trace while its window is open, NVTX all along.
    ranges: list[Callable[[str], Any]] = field(default_factory=list)
    _open_ranges: dict[int, Any] = field(default_factory=dict)  # by how many phases are open
    _since_ns: int = 0  # when the innermost phase was entered or resumed

    @property
    def phase(self) -> int | None:
        """The innermost phase that the training thread is in; None: in none of them."""
        return self.phases[-1] if self.phases else None

    @property
    def fetching(self) -> bool:
        """Return whether the caller is on the training thread, inside next() or iter() of a loader."""
        phases = self.phases
        return bool(phases) and phases[-1] == FETCH and not self.off and get_ident() == self.owner

    def open_range(self, name: str) -> Any:
        """Open a named range if a trace is recorded, and return it: its __exit__ closes it. Else return None."""
        if is_compiling() or not self.ranges:
            return None
        try:
            return self._open(name)
        except Exception as e:  # noqa: BLE001 - the script goes on
            self._driver.fail(e)
            return None

    def end(self) -> int:
        """Leave the innermost phase, and return which it was; −1: there was none."""
        phases = self.phases
        if not phases:
            return -1
        try:
            if self._open_ranges:
                opened = self._open_ranges.pop(len(phases), None)
                if opened is not None:
                    opened.__exit__(None, None, None)
            phase = phases.pop()
            now = perf_counter_ns()
            self.row.parts[phase] += now - self._since_ns
            self._since_ns = now
            self.inside = phases[-1] != OPTIMIZER or self.off if phases else self.off
        except Exception as e:  # noqa: BLE001 - the script goes on
            self._driver.fail(e)
            return -1
        return phase

    def _push(self, phase: int) -> None:
        phases = self.phases
        now = perf_counter_ns()
        if phases:
            self.row.parts[phases[-1]] += now - self._since_ns
        phases.append(phase)
        self.inside = phase != OPTIMIZER
        if self.ranges:
            self._open_ranges[len(phases)] = self._open(_RANGES[phase])
        self._since_ns = now

    def _open(self, name: str) -> contextlib.ExitStack:
        opened = contextlib.ExitStack()
        for make in self.ranges:
            opened.enter_context(make(name))
        return opened


def is_compiling() -> bool:
    """Return whether torch.compile is tracing the caller."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())
