"""Marks the steps of training and times their phases. hooks.py calls it, several times a step.

A step ends where its mark is. The mark is the strongest that the script has shown: its own `dlprof.step()`, the next
batch of a loader, the optimizer's step, the replay of a CUDA graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from dlprof.record.loaders import FetchWatcher, adopt
from dlprof.record.observed import Observed
from dlprof.record.stepping import BACKWARD, FETCH, FORWARD, OPTIMIZER, Phases, Row, is_compiling

NO_STEP = sys.maxsize

# A script that takes this many optimizer steps on one batch has no loop over a loader; its steps are the optimizer's.
# A gradient-accumulating or adversarial loop takes far fewer a batch.
_STEPS_WITHOUT_FETCH = 32

# Without a loader and without an optimizer of PyTorch's, replays of CUDA graphs mark the steps after so many with a
# backward pass in them. Before, they may be the micro-batches of an optimizer's step.
_REPLAYS_WITHOUT_STEP = 32

# Steps kept in memory until the process trains: a long validation before training must not grow without bound.
_EARLY_STEPS = 4096


@dataclass(slots=True, eq=False)
class StepClock(Phases):
    """The state machine of steps. Every step touches all of it, and little else of ours."""

    observed: Observed = field(default_factory=Observed)
    mark: str | None = None  # what ends a step: user, loader, optimizer, replay
    started: bool = False  # the process trains, and the collectors have started
    trained_from: int = 0  # number of the first step that trained
    capturing: bool = False  # a CUDA graph is being captured on the training thread; see graphs.py
    end_of_step: Callable[[], Any] | None = None  # called at each step's end; Step.device keeps the answer
    fetch_watcher: FetchWatcher | None = None
    done: list[tuple[Any, ...]] = field(default_factory=list)  # the cells of Steps that nobody has heard of
    due_ns: int = 0  # they hear of them at the first step that ends then or later, or
    due_step: int = NO_STEP  # when this one begins
    _fetched: bool = False  # any loader was seen
    _fetch_began_ns: int = 0
    _newly_asked: bool = False  # the loader that was asked last is the last of row.unsettled
    _optimizer_depth: int = 0
    _steps_since_fetch: int = 0

    @property
    def position(self) -> int:
        """How many steps have ended since training began, which is what the trace's window counts."""
        return self.row.number - self.trained_from

    # -- phases

    # The usual case is written out in these, nested phases and ranges go by _push: a step's work leaves nothing of ours
    # in the processor's caches, and a function more to call is more to bring there than to run.

    def begin_backward(self) -> bool:
        """Enter a backward pass. Like all of these, return False where it is not ours to time: do not call end()."""
        try:
            if self.off or (get_ident() != self.owner and not self.owns(BACKWARD)):
                return False
            if self.phases and self.phases[-1] == BACKWARD:
                return False
            self.row.backwards += 1
            if self.observed.calls.looks:
                self.observed.calls.see_backward()
            if not self.started:
                self._driver.begin()
            if self.phases or self.ranges:
                self._push(BACKWARD)
            else:
                self.phases.append(BACKWARD)
                self.inside = True
                self._since_ns = perf_counter_ns()
        except Exception as e:  # noqa: BLE001 - the script goes on
            self._driver.fail(e)
            return False
        return True

    def begin_forward(self, module: Any) -> bool:
        """Enter an outermost module's call."""
        try:
            if self.off or (get_ident() != self.owner and not self.owns(FORWARD)):
                return False
            row, observed = self.row, self.observed
            now = perf_counter_ns()
            if not row.forwards:
                row.lead_ns = now - row.start_ns - row.parts[FETCH]
            row.forwards += 1
            if id(module) != observed.model_id:
                observed.see_model(module)
            if observed.autocast_looks:
                observed.see_autocast()
            if self.phases or self.ranges:
                self._push(FORWARD)
            else:
                self.phases.append(FORWARD)
                self.inside = True
                self._since_ns = now
        except Exception as e:  # noqa: BLE001 - the script goes on
            self._driver.fail(e)
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
                if row.backwards or row.forwards or row.optimizer_steps:
                    self.end_step(perf_counter_ns())
            row.fetches += 1
            if first:
                row.first = 1
            over = iterator._dlprof_pass or adopt(iterator)
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
            self._driver.fail(e)
            return False
        return True

    def end_fetch(self, iterator: Any) -> None:
        """Leave next() of a loader's iterator, which returned a batch."""
        phases = self.phases
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

    def begin_epoch(self) -> bool:
        """Enter iter() of a loader, where its workers start."""
        try:
            if self.off or not self.owns(FETCH) or FETCH in self.phases:
                return False
            self._enter_loader()
            self.row.first = 1
            self._push(FETCH)
            self._fetch_began_ns = self._since_ns
        except Exception as e:  # noqa: BLE001 - the script goes on
            self._driver.fail(e)
            return False
        return True

    def see_iterator(self, loader: Any, iterator: Any) -> None:
        """Remember which loader an iterator belongs to; call it after begin_epoch() and end()."""
        try:
            began = self._fetch_began_ns
            self.observed.see_loader(loader, iterator, began, self._since_ns - began)
            if self.fetch_watcher is not None:
                self.fetch_watcher.begun(iterator)
        except Exception as e:  # noqa: BLE001 - the script goes on
            self._driver.fail(e)

    def see_made(self, loader: Any, iterator: Any) -> None:
        """Remember it where iter() is the loader's own, as torchdata's is."""
        try:
            if not self.off and self.owns(FETCH) and FETCH not in self.phases:
                self.observed.see_loader(loader, iterator, perf_counter_ns(), 0)
        except Exception as e:  # noqa: BLE001 - the script goes on
            self._driver.fail(e)

    def end_of_epoch(self) -> None:
        """Note that a loader's iterator had no more batches."""
        self.row.first = 1
        if self._newly_asked:
            # It returned no batch: what this step does is nothing that it was used for.
            del self.row.unsettled[-1:]  # a step may have ended meanwhile
            self._newly_asked = False

    def begin_optimizer(self, optimizer: Any) -> bool:
        """Enter an optimizer's step, and return whether it is this one's first.

        Only the outermost counts (ZeroRedundancyOptimizer steps another inside).
        """
        try:
            if self.off or (get_ident() != self.owner and not self.owns(OPTIMIZER)):
                return False
            self._optimizer_depth += 1
            if self._optimizer_depth > 1:
                return False
            if not self.started:
                self._driver.begin()
            new = id(optimizer) != self.observed.optimizer_id and self.observed.see_optimizer(optimizer)
            if self.phases or self.ranges:
                self._push(OPTIMIZER)
            else:
                self.phases.append(OPTIMIZER)
                self.inside = False
                self._since_ns = perf_counter_ns()
        except Exception as e:  # noqa: BLE001 - the script goes on
            self._driver.fail(e)
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
            self._driver.fail(e)

    # -- steps

    def user_step(self) -> None:
        """End a step where the script says so (dlprof.step())."""
        if is_compiling():
            return
        try:
            if self.off or not self.owns(FETCH):
                return
            self.mark = "user"
            self.end_step(perf_counter_ns())
        except Exception as e:  # noqa: BLE001 - the script goes on
            self._driver.fail(e)

    def replayed(self, forwards: int, backwards: int, optimizer_steps: int) -> None:
        """Count what a CUDA graph holds, which was just replayed; may raise."""
        if (backwards or optimizer_steps) and not self.started:
            self._driver.begin()
        row = self.row
        row.backwards += backwards
        row.forwards += forwards
        if not row.worked and not optimizer_steps:
            row.forwards = 1
        if optimizer_steps:
            row.optimizer_steps += optimizer_steps - 1
            self._stepped()
            return
        if self.mark is None and not self._fetched and row.backwards > _REPLAYS_WITHOUT_STEP:
            self.mark = "replay"
        if self.mark == "replay" and backwards:
            self.end_step(perf_counter_ns())

    def end_step(self, now: int) -> None:
        """End the step; the next one begins. Does nothing while a graph is captured: that runs nothing."""
        if self.capturing:
            return
        row, observed = self.row, self.observed
        if self.phases:
            row.parts[self.phases[-1]] += now - self._since_ns
            self._since_ns = now
        if row.unsettled and row.settle():
            observed.news = True
        cells = row.end(now, self.end_of_step() if self.end_of_step is not None else None)
        if self.started:
            self.done.append(cells)
            if now >= self.due_ns or row.number >= self.due_step or observed.news:
                self._driver.steps_due()
        elif len(self.done) < _EARLY_STEPS:
            self.done.append(cells)

    def owns(self, phase: int) -> bool:
        """Return whether this thread is the one that trains. Until training is seen, that is the first one that calls.

        A backward pass or an optimizer's step before training has started makes its thread the one.
        """
        thread = get_ident()
        if thread == self.owner:
            return True
        if self.owner and (self.started or phase in (FETCH, FORWARD)):
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
        self.end_of_step = None

    # -- inner workings

    def _stepped(self) -> None:
        """Count an optimizer's step, which ends a step of training where nothing else does."""
        self.row.optimizer_steps += 1
        if self.capturing:
            return
        self._steps_since_fetch += 1
        stale = self._steps_since_fetch > _STEPS_WITHOUT_FETCH
        if (self.mark is None and not self._fetched) or (self.mark == "loader" and stale):
            self.mark = "optimizer"
        if self.mark == "optimizer":
            self.end_step(perf_counter_ns())

    def _enter_loader(self) -> None:
        if self.phases == [OPTIMIZER]:
            # A step() that raised never called the hook after it.
            self.end()
            self._optimizer_depth = 0
        self._fetched = True
        self._steps_since_fetch = 0
        if self.mark is None or (self.mark in ("optimizer", "replay") and not self.observed.loaders):
            self.mark = "loader"
        if self.mark != "user" and self.row.worked and not self.phases:
            self.end_step(perf_counter_ns())
