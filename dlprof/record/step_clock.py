"""Marks the steps of training and times their phases. hooks.py calls it, several times a step.

A step ends where its mark is. The mark is the strongest that the script has shown: its own `dlprof.step()`, the next
batch of a loader, the optimizer's step, the replay of a CUDA graph, the first forward pass after a backward pass. Where
nothing of that is seen for long, and no backward pass, the script only infers: each outermost forward pass is a step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import get_ident
from time import perf_counter_ns
from types import FrameType
from typing import Any

from dlprof.record import guarded
from dlprof.record.captured import unseen
from dlprof.record.loaders import FetchWatcher
from dlprof.record.observed import Observed
from dlprof.record.stepping import (
    BACKWARD,
    FETCH,
    FORWARD,
    NEVER,
    OPTIMIZER,
    REPLAYS_WITHOUT_STEP,
    STEPS_WITHOUT_FETCH,
    WEAKER,
    MicroBatches,
    Phases,
    Row,
    Turns,
    is_compiling,
    is_inference,
)

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
                observed.calls.see_forward(observed.model_id, args)
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
                self._driver.steps_due()
        else:
            if len(self.done) < _EARLY_STEPS:
                self.done.append(cells)
            if self.may_infer and is_inference(cells, self.done, now):
                self._driver.infer()

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
                self._driver.begin()
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
