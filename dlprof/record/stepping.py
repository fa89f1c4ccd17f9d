"""A step of the training loop and its phases: while they are measured, and once the step has ended."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import get_ident
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol

from dlprof.record.loaders import LoaderSeen, Pass, look_at, samples_of

FETCH, FORWARD, BACKWARD, OPTIMIZER = range(4)
_NONE = (0, 0, 0, 0)
_UNTOLD = (0, 0)
PHASES = ("fetch", "forward", "backward", "optimizer")  # their names
_RANGES = tuple(f"dlprof::{phase}" for phase in PHASES)


# The marks that the first loader takes over from.
WEAKER = ("optimizer", "replay", "backward", "forward")

# Without a loader and an optimizer, a forward pass that follows a backward pass begins a step after so many. An
# optimizer that then steps takes the mark over. And so many forward passes without a backward pass are an inference.
_TURNS_WITHOUT_STEP = 8
_INFERENCE_STEPS = 32

# A process that has made as many steps of forward passes alone, for so long, infers and is recorded. What is shorter is
# a validation before training, or nothing to measure.
_INFERENCE_NS = 2_000_000_000

# Without a loader and without an optimizer of PyTorch's, replays of CUDA graphs mark the steps after so many with a
# backward pass in them. Before, they may be the micro-batches of an optimizer's step.
REPLAYS_WITHOUT_STEP = 32

# A script that takes this many optimizer steps on one batch has no loop over a loader; its steps are the optimizer's.
# A gradient-accumulating or adversarial loop takes far fewer a batch.
STEPS_WITHOUT_FETCH = 32

# A step of training ends with the optimizer's: batches before that are its micro-batches. A script that goes on for so
# many, or before its first optimizer step for so long, steps no optimizer of PyTorch's: each batch is a step then.
_MICRO_BATCHES = 8
_WITHOUT_OPTIMIZER_NS = 10_000_000_000


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
    unused_forward_ns: int = 0  # of forward_ns, in passes whose result no backward pass uses
    samples: int = -1  # this and the next two: see the table `steps`; -1: not counted
    inputs: int = -1
    tokens: int = -1

    @property
    def end_ns(self) -> int:
        """When it ended."""
        return self.start_ns + self.dur_ns


NEVER = sys.maxsize
_FORWARDS = Step._fields.index("forwards")


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
    unused_forward_ns: int = 0
    judged_ns: int = 0  # of the forward passes so far, those of which it is known whether a backward pass uses them
    used_from: int = 0  # a backward pass uses the last forward pass once there are more of them than this; NEVER
    samples: int = 0  # so far; -1: something could not be counted
    inputs: int = 0
    tokens: int = 0
    taken: int = -1  # backward passes at the last call of a model that counts in these
    told: tuple[int, int] = (0, 0)  # samples and tokens as the script names them, 0: it does not
    # Loaders that it took batches from, and that are not yet known to train.
    unsettled: list[LoaderSeen] = field(default_factory=list)
    graded: bool = False  # a model that trains was called with gradients on

    @property
    def worked(self) -> bool:
        """Return whether anything but fetching was seen."""
        return bool(self.forwards or self.backwards or self.optimizer_steps)

    def end(self, now: int, device: Any) -> tuple[Any, ...]:
        """Return the cells of a Step that ends now, and become the next step."""
        if self.backwards <= self.used_from and self.forwards:
            self.judge(unused=True)
        fetch, forward, backward, optimizer = parts = self.parts
        cells = (
            self.number,
            self.start_ns,
            now - self.start_ns,
            self.lead_ns,
            fetch,
            forward,
            backward,
            optimizer,
            self.fetches,
            self.forwards,
            self.backwards,
            self.optimizer_steps,
            self.first,
            self.profiled,
            device,
            self.unused_forward_ns,
            self.told[0] or self.samples or -1,
            self.inputs or -1,
            self.told[1] or self.tokens or -1,
        )
        self.number += 1
        self.start_ns = now
        self.lead_ns = -1
        parts[:] = _NONE
        self.fetches = self.forwards = self.backwards = self.optimizer_steps = self.first = self.profiled = 0
        self.samples = self.inputs = self.tokens = 0
        self.told = _UNTOLD
        self.taken = -1
        self.graded = False
        if self.judged_ns:
            self.unused_forward_ns = self.judged_ns = 0
        return cells

    def load(self, batch: Any, over: Pass) -> None:
        """Count the samples of a batch of a pass over a loader."""
        samples = over.size if over.leads is False and over.firsts is None else samples_of(batch, over)
        self.samples = self.samples + samples if samples >= 0 <= self.samples else -1

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Count what a model gets as its first argument; return whether that says more than the loader's batches."""
        shape, tokens = look_at(args[0] if args else next(iter(kwargs.values()), None))
        self.inputs = self.inputs + shape if shape >= 0 <= self.inputs else -1
        self.tokens += tokens
        self.taken = self.backwards
        return tokens > 0 or self.samples <= 0

    def forward_again(self, *, with_grad: bool) -> None:
        """Judge the forward passes so far, where another one begins."""
        if self.used_from == NEVER or self.backwards > self.used_from or not with_grad:
            self.judge(unused=self.used_from == NEVER)

    def judge(self, *, unused: bool) -> None:
        """Note whether a backward pass uses the forward passes since this was last called.

        None uses one without gradients, or one that comes after the last backward pass of a step.
        """
        if unused:
            self.unused_forward_ns += self.parts[FORWARD] - self.judged_ns
        self.judged_ns = self.parts[FORWARD]

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


@dataclass(slots=True, eq=False)
class MicroBatches:
    """How many batches are one step: those until the optimizer steps."""

    largest: int = -1  # backward passes of an optimizer's step so far; -1: none of PyTorch's has stepped
    _most: int = _MICRO_BATCHES  # before one has stepped, and backward passes of the steps that have ended by then
    _before: int = 0

    def go_on(self, row: Row) -> bool:
        """Return whether the optimizer has yet to step for what the step has done."""
        # An optimizer that a compiled function steps is not seen: never wait for more than there was to wait for.
        if self.largest >= 0:
            return 0 < row.backwards < self.largest
        if 0 < row.backwards < self._most and perf_counter_ns() - row.start_ns < _WITHOUT_OPTIMIZER_NS:
            return True
        if row.backwards:
            self._most = 0
            self._before += row.backwards
        return False

    def grow(self, row: Row) -> bool:
        """Take in an optimizer's step with more micro-batches than any before; return whether it is the first."""
        first = self.largest < 0
        self.largest = row.backwards + (self._before if first else 0)
        return first


@dataclass(slots=True, eq=False)
class Turns:
    """What marks the steps where neither a loader nor an optimizer does."""

    _count: int = 0  # forward passes that followed a backward pass
    _backwards: int = 0  # of the step at the last of them

    def mark(self, row: Row, *, trains: bool) -> str | None:
        """Return what does, at a forward pass that is not the step's first; None: it is not known yet."""
        if row.backwards > self._backwards:
            self._count, self._backwards = self._count + 1, row.backwards
        if self._count >= _TURNS_WITHOUT_STEP:
            return "backward"
        return "forward" if not trains and row.forwards >= _INFERENCE_STEPS else None


def is_inference(ended: tuple[Any, ...], done: list[tuple[Any, ...]], now: int) -> bool:
    """Return whether a process that has made these steps, and none of training, only infers; `ended` is the last."""
    return ended[_FORWARDS] > 0 and len(done) >= _INFERENCE_STEPS and now - done[0][1] >= _INFERENCE_NS


def kind_of(step: Step | Row) -> str:
    """Return train, validation (forward only) or other."""
    if step.backwards or step.optimizer_steps:
        return "train"
    return "validation" if step.forwards else "other"


class Watcher(Protocol):
    """What sees each module's call and each outermost backward pass of a step. Its methods must not raise."""

    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """See a module's call, an inner one's too, on any thread; return whether `leave` must be called behind it."""

    def leave(self) -> None:
        """See the innermost call end."""

    def begin_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See what backward() or grad() of torch.autograd was called with, before it begins."""

    def end_backward(self) -> None:
        """See it end."""


class Driver(Protocol):
    """What the clock calls: the recorder."""

    def begin(self) -> None:
        """Start recording: the process has just begun to train."""

    def infer(self) -> None:
        """Start recording a process that only infers."""

    def steps_due(self) -> None:
        """Take the steps that have ended."""

    def fail(self, error: Exception) -> None:
        """Switch the recording off, since it failed."""


@dataclass(slots=True, eq=False)
class Phases:
    """The phases of the step that is being measured. They nest, and their times exclude each other."""

    _driver: Driver
    row: Row = field(default_factory=lambda: Row(0, 0))
    owner: int = 0  # the thread that trains
    off: bool = False
    # True while a module's call needs no look: inside a fetch, a forward or a backward, or when switched off.
    inside: bool = False
    naming: bool = False  # a module's call does need one there too: the trace names it
    phases: list[int] = field(default_factory=list)  # that are open, the innermost last
    # What opens a named range around each phase: the trace while its window is open, NVTX all along.
    ranges: list[Callable[[str], Any]] = field(default_factory=list)
    watcher: Watcher | None = None  # in single steps whose times count for nothing
    is_captured: Callable[[], bool] = lambda: False  # what runs, into a graph: see captured.py; once there is a torch
    _open_ranges: dict[int, Any] = field(default_factory=dict)  # by how many phases are open
    _since_ns: int = 0  # when the innermost phase was entered or resumed

    @property
    def phase(self) -> int | None:
        """The innermost phase that the training thread is in; None: in none of them."""
        return self.phases[-1] if self.phases else None

    @property
    def is_within(self) -> bool:
        """Return whether a module that is called now is no outermost one."""
        return bool(self.phases) and self.phases[-1] != OPTIMIZER

    @property
    def _sees_every_call(self) -> bool:
        """Return whether modules within the outermost are looked at, too."""
        return self.naming or self.watcher is not None

    @property
    def is_inner(self) -> bool:
        """Return whether a module that is called now is looked at only as one within another."""
        return self._sees_every_call and self.is_within

    @property
    def fetching(self) -> bool:
        """Return whether the caller is on the training thread, inside next() or iter() of a loader."""
        phases = self.phases
        return bool(phases) and phases[-1] == FETCH and not self.off and get_ident() == self.owner

    def fail(self, error: Exception) -> None:
        """Switch the recording off, since a hook failed."""
        self._driver.fail(error)

    def open_range(self, name: str) -> Any:
        """Open a named range if a trace is recorded, and return it: its __exit__ closes it. Else return None."""
        if is_compiling() or not self.ranges or self.is_captured():
            return None
        try:
            return self._open(name)
        except Exception as e:  # noqa: BLE001 - the script goes on
            self.fail(e)
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
            self.inside = self.off or (self.is_within and not self._sees_every_call)
        except Exception as e:  # noqa: BLE001 - the script goes on
            self.fail(e)
            return -1
        return phase

    def _push(self, phase: int) -> None:
        phases = self.phases
        now = perf_counter_ns()
        if phases:
            self.row.parts[phases[-1]] += now - self._since_ns
        phases.append(phase)
        self.inside = phase != OPTIMIZER and not self._sees_every_call
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
