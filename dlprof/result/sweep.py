"""What `dlprof sweep` measured: a job with each of several values of its settings. sweep.json holds it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from dlprof.errors import DlprofError
from dlprof.result.tried import Gain, student

FILE = "sweep.json"
FORMAT = 1

# Points so near to each other are as good: what two recordings of one job differ by, twice.
NEAR = 0.02

State = Literal["complete", "out_of_time", "interrupted"]


class Axis(msgspec.Struct, frozen=True):
    """A setting, or a {placeholder} of the command, and its values in their order."""

    name: str
    values: tuple[str, ...]


class Reading(msgspec.Struct, frozen=True):
    """One run of a point: its mean steady step, and the samples of it, of the whole job; None: not known."""

    step_ns: float
    samples: float | None = None


class Point(msgspec.Struct, frozen=True):
    """One combination of values: what was measured, what is predicted (None: nothing), and why it has no reading."""

    values: Mapping[str, str]
    readings: tuple[Reading, ...] = ()
    predicted_ns: float | None = None
    why: str = ""

    @property
    def step_ns(self) -> float | None:
        """The mean of the readings' steps."""
        return sum(r.step_ns for r in self.readings) / len(self.readings) if self.readings else None

    @property
    def spread(self) -> float | None:
        """By how much readings differ: their standard deviation as a share of the mean; None: there is but one."""
        steps, mean = [r.step_ns for r in self.readings], self.step_ns
        if len(steps) < 2 or not mean:
            return None
        return math.sqrt(sum((s - mean) ** 2 for s in steps) / (len(steps) - 1)) / mean

    def rate(self, samples: bool) -> float | None:
        """Return samples a second, or steps a second; None: not measured."""
        per_s = [1e9 / r.step_ns * ((r.samples or 0.0) if samples else 1.0) for r in self.readings]
        return sum(per_s) / len(per_s) if per_s else None


class Sweep(msgspec.Struct, frozen=True):
    """A sweep as far as it has come. `rounds`: readings that each point is to have.

    `command`: what is kept of it, as of a recorded one. `digest`: tells whether another command is the same.
    """

    command: tuple[str, ...]
    axes: tuple[Axis, ...]
    points: tuple[Point, ...]
    rounds: int
    steps: int
    state: State = "interrupted"
    seconds: float = 0.0
    warnings: tuple[str, ...] = ()
    digest: str = ""

    @property
    def measured(self) -> tuple[Point, ...]:
        """The points that have readings."""
        return tuple(p for p in self.points if p.readings)

    @property
    def best(self) -> Point | None:
        """The point with the highest rate; None: none was measured."""
        return max(self.measured, key=lambda p: p.rate(self.by_samples) or 0.0, default=None)

    @property
    def rivals(self) -> tuple[Point, ...]:
        """The points that may be as fast as the best one: neither told apart from it nor known to be within NEAR."""
        best = self.best
        found = [] if best is None else [(p, self.gain(best, p)) for p in self.measured if p is not best]
        return tuple(p for p, g in found if g.low is not None and g.high is not None and g.low <= 1 < g.high - NEAR)

    def gain(self, one: Point, other: Point) -> Gain:
        """Return how many times the rate of another point one has.

        The interval is Student's, with the scatter of single runs that all points show together; a point that was
        measured once shows none.
        """
        samples = self.by_samples
        ratio = (one.rate(samples) or 0.0) / (other.rate(samples) or 1.0)
        squares, freedom = 0.0, 0
        for p in self.measured:
            logs = [math.log(r.step_ns) for r in p.readings]
            mean = math.fsum(logs) / len(logs)
            squares += math.fsum((x - mean) ** 2 for x in logs)
            freedom += len(logs) - 1
        if not freedom:
            return Gain(ratio)
        each = 1 / len(one.readings) + 1 / len(other.readings)
        off = math.exp(student(freedom) * math.sqrt(squares / freedom * each))
        return Gain(ratio, ratio / off, ratio * off, min(len(one.readings), len(other.readings)))

    @property
    def by_samples(self) -> bool:
        """Whether the samples of every reading are known."""
        readings = [r for p in self.points for r in p.readings]
        return bool(readings) and all(r.samples for r in readings)


def to_json(sweep: Sweep) -> dict[str, Any]:
    """Return a sweep as plain data."""
    return {"format": FORMAT, **msgspec.to_builtins(sweep)}


def from_json(data: Any) -> Sweep:
    """Return the sweep of the plain data of sweep.json; raise DlprofError where it is none."""
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise DlprofError(f"{FILE} is no sweep of this dlprof's")
    try:
        return msgspec.convert({k: v for k, v in data.items() if k != "format"}, Sweep)
    except msgspec.ValidationError as e:
        raise DlprofError(f"{FILE} is broken: {e}") from None
