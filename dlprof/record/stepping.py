"""A step of the training loop as it is measured, and as it is told of once it has ended."""

from __future__ import annotations

from typing import Any, NamedTuple

from dlprof.record.loaders import LoaderSeen

FETCH, FORWARD, BACKWARD, OPTIMIZER = range(4)
PHASES = ("fetch", "forward", "backward", "optimizer")  # their names


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
    device: Any  # what Recorder.end_of_step gave


class Row:
    """The step that is being measured: one object for all of them, as making one costs as much as a phase's hook."""

    __slots__ = (
        "backwards",
        "fetches",
        "first",
        "forwards",
        "lead_ns",
        "number",
        "optimizer_steps",
        "parts",
        "profiled",
        "start_ns",
        "unsettled",
    )

    def __init__(self, number: int, start_ns: int) -> None:
        self.number = number
        self.parts = [0, 0, 0, 0]  # exclusive time in FETCH, FORWARD, BACKWARD, OPTIMIZER
        self.unsettled: list[LoaderSeen] = []  # that it took batches from, and that are not yet known to train
        self.first = self.profiled = 0
        self.start_ns = start_ns
        self.lead_ns = -1
        self.fetches = self.forwards = self.backwards = self.optimizer_steps = 0

    @property
    def worked(self) -> bool:
        """Return whether anything but fetching was seen."""
        return bool(self.forwards or self.backwards or self.optimizer_steps)

    def settle(self) -> bool:
        """Tell the loaders what their batches were used for, and whether one has learnt of it."""
        kind = kind_of(self)
        changed = [s for s in self.unsettled if s.role != kind != "other"]
        for seen in changed:
            seen.role = kind
        self.unsettled.clear()
        return bool(changed)


def kind_of(step: Step | Row) -> str:
    """Tell train, validation (forward only) or other."""
    if step.backwards or step.optimizer_steps:
        return "train"
    return "validation" if step.forwards else "other"
