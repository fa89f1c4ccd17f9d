"""Marks the steps of training and times their phases. hooks.py calls it, several times a step.

A step ends where its mark is. The mark is the strongest that the script has shown: its own `dlprof.step()`, the next
batch of a loader, the optimizer's step, the replay of a CUDA graph, the first forward pass after a backward pass. Where
nothing of that is seen for long, and no backward pass, the script only infers: each outermost forward pass is a step.

`Step` is one that has ended, `Row` the one that is being measured. The marks of loaders and optimizers are kept by
`MicroBatches` and `Turns`, nested phases by `Phases`, and all of it by `StepClock`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import get_ident
from time import perf_counter_ns
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dlprof.record import guarded
from dlprof.record.captured import unseen
from dlprof.record.loaders import FetchWatcher, LoaderSeen, Pass, look_at, samples_of
from dlprof.record.observed import Observed

if TYPE_CHECKING:
    from dlprof.record.recorder import Recorder

# What a closure that an optimizer calls does outside of forward and backward passes is in none of the phases.
FETCH, FORWARD, BACKWARD, OPTIMIZER, CLOSURE = range(5)
_NONE = (0, 0, 0, 0, 0)
_UNTOLD = (0, 0)
PHASES = ("fetch", "forward", "backward", "optimizer")  # their names
_RANGES = tuple(f"dlprof::{phase}" for phase in (*PHASES, "closure"))

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
    parts: list[int] = field(default_factory=lambda: [*_NONE])  # exclusive ns in FETCH, FORWARD, …
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
        fetch, forward, backward, optimizer, _ = parts = self.parts
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


@dataclass(slots=True, eq=False)
class Phases:
    """The phases of the step that is being measured. They nest, and their times exclude each other."""

    _recorder: Recorder
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
        return self.phases[-1] if self.phases and self.phases[-1] != CLOSURE else None

    @property
    def is_within(self) -> bool:
        """Return whether a module that is called now is no outermost one."""
        return bool(self.phases) and self.phases[-1] < OPTIMIZER

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
        self._recorder.fail(error)

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
        self.inside = phase < OPTIMIZER and not self._sees_every_call
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


NO_STEP = sys.maxsize

# Steps kept in memory until the process trains: a long validation before training must not grow without bound.
_EARLY_STEPS = 4096


@dataclass(slots=True, eq=False)
class StepClock(Phases):
    """The state machine of steps. Every step touches all of it, and little else of ours."""

    observed: Observed = field(default_factory=Observed)
    mark: str | None = None  # what ends a step: user, loader, optimizer, replay, backward, forward
    started: bool = False  # the process trains or infers, and the collectors have started
    trains: bool = False  # it has made a backward pass or an optimizer's step
    grad_enabled: Callable[[], bool] = lambda: True  # torch's, once there is one
    may_infer: bool = True  # what this process infers is recorded
    trained_from: int = 0  # number of the first step that trained, or inferred until then
    capturing: bool = False  # a CUDA graph is being captured on the training thread; see device/gpu.py
    end_of_step: Callable[[], Any] | None = None  # called at each step's end; Step.device keeps the answer
    fetch_watcher: FetchWatcher | None = None
    differentiated: Callable[[Any], None] | None = (
        None  # sees what `backward` and `grad` begin from, in the counted step
    )
    losses: Any = None  # what sees the losses of backward passes, where they are asked for; see collectors/losses.py
    done: list[tuple[Any, ...]] = field(default_factory=list)  # the cells of Steps that were not passed on yet
    due_ns: int = 0  # they are passed on at the first step that ends then or later, or
    due_step: int = NO_STEP  # when this one begins
    _beginning: bool = False  # the first backward pass or optimizer's step: threads may make theirs at a time
    _fetched: bool = False  # any loader was seen
    _fetch_began_ns: int = 0
    _newly_asked: bool = False  # the loader that was asked last is the last of row.unsettled
    _optimizer_depth: int = 0
    _steps_since_fetch: int = 0
    _micro: MicroBatches = field(default_factory=MicroBatches)
    _turns: Turns = field(default_factory=Turns)

    @property
    def position(self) -> int:
        """How many steps have ended since training began, which is what the trace's window counts."""
        return self.row.number - self.trained_from

    # -- phases
    # The usual case is written out in these, nested phases and ranges go by _push: a step's work leaves nothing of ours
    # in the processor's caches, and a function more to call is more to bring there than to run.

    def begin_backward(self) -> bool:
        """Enter a backward pass. Like all of these, return False if it is not to be timed: then do not call end()."""
        try:
            if self.off or (get_ident() != self.owner and not self.owns(BACKWARD)):
                return False
            if self.phases and self.phases[-1] == BACKWARD:
                return False
            self.row.backwards += 1
            if self.observed.calls.looks:
                self.observed.calls.see_backward()
            if not self.trains:
                self._train()
            if self.phases or self.ranges:
                self._push(BACKWARD)
            else:
                self.phases.append(BACKWARD)
                self.inside = True
                self._since_ns = perf_counter_ns()
        except Exception as e:  # noqa: BLE001 - the script goes on
            self.fail(e)
            return False
        return True

    @unseen
    def begin_forward(self, module: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> bool:
        """Enter an outermost module's call with these arguments."""
        try:
            if self.off or (get_ident() != self.owner and not self.owns(FORWARD)) or self.is_inner:
                return False
            row, observed = self.row, self.observed
            now = perf_counter_ns()
            with_grad = self.grad_enabled()
            if row.forwards:
                self._go_on_forward(now, with_grad)
            else:
                row.lead_ns = now - row.start_ns - row.parts[FETCH]
            row.forwards += 1
            if id(module) != observed.model_id:
                observed.see_model(module, args)
            if observed.forward_looks and with_grad and observed.is_model:
                observed.forward_looks -= 1
                observed.calls.see_forward(module, args)
            elif observed.idle_looks and self.trains and observed.is_model:
                observed.idle_looks -= 1
                observed.calls.see("forward")
            row.used_from = row.backwards if with_grad or observed.frozen else NEVER
            if with_grad and observed.is_model and not observed.frozen:
                row.graded = True
            looks = observed.learns and (row.taken != row.backwards or observed.pipeline)
            if looks and (with_grad or not self.trains) and not row.take(args, kwargs or {}):
                observed.look_no_more()
            if now >= observed.padding.due_ns and self.trains and with_grad and observed.learns and not self._fetched:
                observed.see_batch((args, kwargs), row.number)
            if observed.autocast_looks:
                observed.see_autocast()
            if self.phases or self.ranges:
                self._push(FORWARD)
            else:
                self.phases.append(FORWARD)
                self.inside = self.watcher is None
                self._since_ns = now
        except Exception as e:  # noqa: BLE001 - the script goes on
            self.fail(e)
            return False
        return True

    def begin_fetch(self, iterator: Any, *, first: bool) -> bool:
        """Enter next() of a loader's iterator; ends the step before it, if anything was done with its batch."""
        try:
            if self.off or (get_ident() != self.owner and not self.owns(FETCH)):
                return False
            row = self.row
            if self.phases or self.mark != "loader":
                if FETCH in self.phases:
                    return False
                self._enter_loader()
            else:
                self._steps_since_fetch = 0
                if row.optimizer_steps or (row.worked and not self._micro.go_on(row)):
                    self.end_step(perf_counter_ns())
            row.fetches += 1
            if first:
                row.first = 1
            over = iterator._dlprof_pass
            if over is None or (over.loader is None and not over.adopted):
                over = self.observed.adopt(iterator)
            self._newly_asked = over.unsettled and row.unsettle(over)
            if over.asks and self.fetch_watcher is not None:
                self.fetch_watcher.ask(iterator)
            if self.phases or self.ranges:
                self._push(FETCH)
            else:
                self.phases.append(FETCH)
                self.inside = True
                self._since_ns = perf_counter_ns()
            self._fetch_began_ns = self._since_ns
        except Exception as e:  # noqa: BLE001 - the script goes on
            self.fail(e)
            return False
        return True

    @unseen
    def end_fetch(self, iterator: Any, batch: Any) -> None:
        """Leave next() of a loader's iterator, which returned a batch."""
        phases = self.phases
        if FETCH in phases and (over := iterator._dlprof_pass) is not None:
            self.row.load(batch, over)
        if len(phases) == 1 and phases[0] == FETCH and not self._open_ranges:
            phases.pop()
            now = perf_counter_ns()
            self.row.parts[FETCH] += now - self._since_ns
            self._since_ns = now
            self.inside = self.off
        elif self.end() != FETCH:
            return
        if self.fetch_watcher is not None:
            began = self._fetch_began_ns
            self.fetch_watcher.got(iterator, self.row.number, began, self._since_ns - began)
        if self._since_ns >= self.observed.padding.due_ns and self.trains:
            self.observed.see_batch(batch, self.row.number, iterator._dlprof_pass)

    def ask(self, iterator: Any) -> None:
        """Ask for one of several batches that make one fetch."""
        if self.fetch_watcher is not None:
            self.fetch_watcher.ask(iterator)
            self._fetch_began_ns = perf_counter_ns()

    def got(self, iterator: Any) -> None:
        """Take one of several batches that make one fetch."""
        if self.fetch_watcher is not None:
            began = self._fetch_began_ns
            self.fetch_watcher.got(iterator, self.row.number, began, perf_counter_ns() - began)

    @guarded
    def begin_epoch(self) -> bool:
        """Enter iter() of a loader, where its workers start."""
        if self.off or not self.owns(FETCH) or FETCH in self.phases:
            return False
        self._enter_loader()
        self.row.first = 1
        self._push(FETCH)
        self._fetch_began_ns = self._since_ns
        return True

    @guarded
    def see_iterator(self, loader: Any, iterator: Any) -> None:
        """Remember which loader an iterator belongs to; call it after begin_epoch() and end()."""
        began = self._fetch_began_ns
        self.observed.see_loader(loader, iterator, began, self._since_ns - began)
        if self.fetch_watcher is not None:
            self.fetch_watcher.begun(iterator)

    @guarded
    def see_made(self, loader: Any, iterator: Any) -> None:
        """Remember it where iter() is the loader's own, as torchdata's is."""
        if not self.off and self.owns(FETCH) and FETCH not in self.phases:
            self.observed.see_loader(loader, iterator, perf_counter_ns(), 0)

    def end_of_epoch(self) -> None:
        """Note that a loader's iterator had no more batches."""
        self.row.first = 1
        if self._newly_asked:
            # It returned no batch: what this step does is nothing that it was used for.
            del self.row.unsettled[-1:]  # a step may have ended meanwhile
            self._newly_asked = False

    def begin_optimizer(self, optimizer: Any) -> bool:
        """Enter an optimizer's step, the outermost that counts alone; return whether it is this optimizer's first."""
        try:
            if self.off or (get_ident() != self.owner and not self.owns(OPTIMIZER)):
                return False
            if self._optimizer_depth:
                self._see_interrupted(sys._getframe(2))
            self._optimizer_depth += 1
            if self._optimizer_depth > 1:
                return False
            if not self.trains:
                self._train()
            new = id(optimizer) != self.observed.optimizer_id and self.observed.see_optimizer(optimizer)
            if self.phases or self.ranges:
                self._push(OPTIMIZER)
            else:
                self.phases.append(OPTIMIZER)
                self.inside = False
                self._since_ns = perf_counter_ns()
        except Exception as e:  # noqa: BLE001 - the script goes on
            self.fail(e)
            return False
        return new

    def end_optimizer(self) -> None:
        """Leave an optimizer's step; where no loader marks the steps, a step ends here."""
        try:
            if self.off or get_ident() != self.owner or not self._optimizer_depth:
                return
            self._optimizer_depth -= 1
            phases = self.phases
            if self._optimizer_depth or OPTIMIZER not in phases:
                return
            if len(phases) == 1 and not self._open_ranges:
                phases.pop()
                now = perf_counter_ns()
                self.row.parts[OPTIMIZER] += now - self._since_ns
                self._since_ns = now
                self.inside = False
            else:
                while self.end() not in (OPTIMIZER, -1):
                    pass
            self._stepped()
        except Exception as e:  # noqa: BLE001 - the script goes on
            self.fail(e)

    @guarded
    def begin_closure(self) -> None:
        """Enter a closure that the optimizer's step calls."""
        if not self.off and get_ident() == self.owner and self.phases and self.phases[-1] == OPTIMIZER:
            self._push(CLOSURE)

    @guarded
    def end_closure(self) -> None:
        """Leave it, and what it left open."""
        if not self.off and get_ident() == self.owner and CLOSURE in self.phases:
            while self.end() not in (CLOSURE, -1):
                pass

    # -- steps

    def user_step(self, samples: Any = None, tokens: Any = None) -> None:
        """End a step where the script says so (dlprof.step()), which may say how much it worked on."""
        if is_compiling() or self.is_captured():
            return
        try:
            if self.off or not self.owns(FETCH):
                return
            self.mark = "user"
            self.row.told = self.observed.see_told(samples), self.observed.see_told(tokens)
            self.end_step(perf_counter_ns())
        except Exception as e:  # noqa: BLE001 - the script goes on
            self.fail(e)

    def replayed(self, forwards: int, backwards: int, optimizer_steps: int) -> None:
        """Count what a CUDA graph holds, which was just replayed; may raise."""
        if (backwards or optimizer_steps) and not self.trains:
            self._train()
        row = self.row
        row.backwards += backwards
        row.forwards += forwards
        if not row.worked and not optimizer_steps:
            row.forwards = 1
        if optimizer_steps:
            row.optimizer_steps += optimizer_steps - 1
            self._stepped()
            return
        if self.mark is None and not self._fetched and row.backwards > REPLAYS_WITHOUT_STEP:
            self.mark = "replay"
        if self.mark == "replay" and backwards:
            self.end_step(perf_counter_ns())

    def end_step(self, now: int) -> None:
        """End the step, and begin the next one; not while a graph is captured, which runs nothing."""
        if self.capturing:
            return
        row, observed = self.row, self.observed
        if self.phases:
            row.parts[self.phases[-1]] += now - self._since_ns
            self._since_ns = now
        if row.forwards and not (row.backwards or row.optimizer_steps):
            observed.see_evaluation(with_graph=row.graded)
        if row.unsettled and row.settle():
            observed.news = True
        cells = row.end(now, self.end_of_step() if self.end_of_step is not None else None)
        if self.started:
            self.done.append(cells)
            if now >= self.due_ns or row.number >= self.due_step or observed.news:
                self._recorder.steps_due()
        else:
            if len(self.done) < _EARLY_STEPS:
                self.done.append(cells)
            if self.may_infer and is_inference(cells, self.done, now):
                self._recorder.infer()

    def owns(self, phase: int) -> bool:
        """Return whether this thread trains: the first one that calls, until another runs backward or an optimizer."""
        thread = get_ident()
        if thread == self.owner:
            return True
        if self.owner and (self.started or self._beginning or phase in (FETCH, FORWARD)):
            return False
        self.owner = thread
        self.phases.clear()
        self._open_ranges.clear()
        self.done.clear()
        self._optimizer_depth = 0
        self.inside = False
        self.row = Row(0, perf_counter_ns())
        return True

    def switch_off(self) -> None:
        """Let every hook pass its call on at once."""
        self.off = True
        self.inside = True
        self.ranges.clear()
        self.end_of_step = self.watcher = None

    # -- inner workings

    def _train(self) -> None:
        """Note that the process trains: what it did before was validation, also where it was recorded."""
        if self.mark == "forward":
            self.mark = None
        if self.started:
            self.trained_from = self.row.number
        else:
            self._beginning = True
            try:
                self._recorder.begin()
            finally:
                self._beginning = False
        self.trains = self.started

    def _go_on_forward(self, now: int, with_grad: bool) -> None:
        """End the step at a forward pass that is not its first, where nothing else ends one."""
        row = self.row
        row.forward_again(with_grad=with_grad)
        if self._fetched or self.phases:
            return
        self.mark = self.mark or self._turns.mark(row, trains=self.trains)
        if (self.mark == "backward" and row.backwards) or self.mark == "forward":
            self.end_step(now)
            row.lead_ns = 0

    def _stepped(self) -> None:
        """Count an optimizer's step, which ends a step of training where nothing else does."""
        row = self.row
        row.optimizer_steps += 1
        if self.capturing:
            return
        if row.backwards > self._micro.largest and self._micro.grow(row):
            self.trained_from = row.number  # what came before were its micro-batches
        self._steps_since_fetch += 1
        stale = self._steps_since_fetch > STEPS_WITHOUT_FETCH
        if (self.mark in (None, "backward") and not self._fetched) or (self.mark == "loader" and stale):
            self.mark = "optimizer"
        if self.mark == "optimizer":
            self.end_step(perf_counter_ns())

    def _see_interrupted(self, stepping: FrameType) -> None:
        """Leave optimizers' steps that raised, and never called the hook after them; one is called in this frame."""
        running, frame = 0, stepping.f_back
        while frame is not None:
            running += frame.f_code is stepping.f_code
            frame = frame.f_back
        if running < self._optimizer_depth:
            self._optimizer_depth = running
            while not running and OPTIMIZER in self.phases:
                self.end()

    def _enter_loader(self) -> None:
        if self.phases == [OPTIMIZER]:
            # A step() that raised never called the hook after it.
            self.end()
            self._optimizer_depth = 0
        self._fetched = True
        self._steps_since_fetch = 0
        if self.mark is None or (self.mark in WEAKER and not self.observed.loaders):
            self.mark = "loader"
        if self.mark != "user" and self.row.worked and not self.phases:
            self.end_step(perf_counter_ns())
