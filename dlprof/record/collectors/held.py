"""Counts a rank's memory in one step, tensor by tensor.

Parameters, buffers and optimizer state are counted when the step has ended, gradients after each backward pass, and
activations before it (tensors.py). The chosen step is one whose time is not used anyway: that in
which floating-point operations are counted, that in which the profiler warms up, or that after the trace window. If
there is no such step, another one is taken.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from dlprof import files
from dlprof.record import guarded
from dlprof.record.captured import unseen
from dlprof.record.hooks import hide
from dlprof.record.model import tensors
from dlprof.record.model.names import alive
from dlprof.record.model.tensors import Key, Storages, count_idle, models_of, state_of
from dlprof.record.recorder import Recorder
from dlprof.record.step_clock import FETCH, Step

# If there is no step whose time is not used, the tenth training step is taken: it comes after lazy set-up and the first
# compilations. The first two are never taken: most optimizers create their state in the first.
_COUNTED_STEP, _FIRST_STEP = 9, 2

# The most attempts: a step may turn out not to train, or begin within a phase.
_MOST_TRIES = 8

# The most calls of modules in a step, backward passes in which gradients are counted, and inputs that are kept.
_MOST_CALLS, _MOST_COUNTS, _MOST_INPUTS = 400_000, 4, 1_000

_MOST_UNSEEN = 10  # kinds of nodes that are named

# The state of a trace window that has not opened yet.
_WAITING = "waiting"


class Held:
    """Writes the log `held`: rows of the table `held`, and how they were counted."""

    name = "what memory holds"
    _recorder: Recorder

    def __init__(self) -> None:
        self._before = anonymous()  # as soon as torch is imported
        self._look: _Look | None = None
        self._done = False
        self._tries = 0
        # Functions that compiled code calls are compiled too, unless they are hidden with all their callees.
        for method in vars(_Look).values():
            if hasattr(method, "__code__"):
                hide(method, with_callees=True)

    def start(self, recorder: Recorder) -> None:
        """Keep the recorder."""
        self._recorder = recorder

    @unseen
    def step(self, done: Sequence[Step]) -> int | None:
        """Start to count in the step that has just begun, or write the counts of the step that has ended."""
        clock, look = self._recorder.clock, self._look
        if self._done:
            return None
        if look is not None:
            self._leave()
            if look.error is not None:
                raise look.error
            if done[-1].backwards and look.step == done[-1].number:
                self._done = True
                self._write(look)
                return None
        if self._recorder.ended is not None or self._tries >= _MOST_TRIES:
            return None
        if not self._is_due():
            return None if self._will_follow() else int(max(clock.trained_from + _COUNTED_STEP, clock.row.number + 1))
        if done[-1].backwards:  # otherwise a validation may have begun
            self._tries += 1
            if clock.phase in (None, FETCH):
                clock.row.profiled = 1
                self._look = clock.watcher = _Look(self._recorder)
        return clock.row.number + 1

    def stop(self) -> None:
        """Stop counting; an incomplete step is dropped."""
        self._done = True
        self._leave()

    def _leave(self) -> None:
        self._look = self._recorder.clock.watcher = None

    def _is_due(self) -> bool:
        clock, window = self._recorder.clock, self._recorder.window
        if not clock.trains or clock.position < _FIRST_STEP:
            return False
        first = window.get("first_step")
        if window.get("state") == _WAITING and first is not None and clock.row.number >= first:
            return False  # the step is traced
        return bool(clock.row.profiled) or (not self._will_follow() and clock.position >= _COUNTED_STEP)

    def _will_follow(self) -> bool:
        """Return whether a step whose time is not used will follow."""
        window = self._recorder.window
        return window.get("skip") is not None and window.get("state") == _WAITING

    def _write(self, look: _Look) -> None:
        self._recorder.device.look(self._recorder.observed.models, self._recorder.observed.optimizers)
        began = perf_counter_ns()
        counted = look.counted()
        if self._before is not None and counted["process"]["anonymous_bytes"] is not None:
            counted["process"]["before_bytes"] = self._before
        counted["cost_ns"] = look.cost_ns + perf_counter_ns() - began
        self._recorder.keep("held", files.compact(counted))


class _Look:
    """Counts the tensors of one step. An error ends the counting, and the script goes on."""

    def __init__(self, recorder: Recorder) -> None:
        self.step = recorder.clock.row.number
        self.error: Exception | None = None
        self.cost_ns = 0
        self._recorder = recorder
        torch: Any = sys.modules["torch"]
        self._next_number: Any = getattr(torch._C._autograd, "_get_sequence_nr", None)
        self._models = models_of(recorder.observed)  # now, since FSDP replaces parameters while a step runs
        self._by_module = not any(model.replicates for model in self._models)
        # The owner of tensors outside modules, such as those of a loss: the model, if there is only one.
        self._whole = self._models[0].name if len(self._models) == 1 else ("", "")
        self._known = Storages()
        for model in self._models:
            model.count(self._known)
        self._calls = tensors.ModuleCalls()
        self._backward = False
        self._counts = [0, 0]  # how often gradients were counted before and after backward passes
        self._inputs: set[Key] = set()
        self._batch: dict[Key, tuple[int, str, str]] = {}  # inputs since the last backward pass: bytes, device, dtype
        self._largest_batch = self._batch
        self._fullest = tensors.Fullest()
        self._graphs = self._nodes = self._recomputed = 0
        self._unseen: Counter[str] = Counter()
        self._why = ""  # why activations are not counted
        self._moments: dict[tuple[str, str], dict[str, Any]] = {}
        self._gradients: dict[tuple[Any, ...], list[int]] = {}
        self._gathered: dict[tuple[Any, ...], list[int]] = {}
        self._most_gradients = self._most_there = -1
        self._most_anonymous: int | None = None
        if self._next_number is None or not tensors.can_walk():
            self._why = f"PyTorch shows from 2.10 on what a graph keeps, and this is {torch.__version__}"

    # -- what the hooks call

    @guarded
    @unseen
    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Record that a module is called; return whether `leave` must be called after it."""
        calls = self._calls
        if self._why or self._backward or self.error:
            return False
        # Nodes of different threads have the same numbers.
        if get_ident() != self._recorder.clock.owner or len(calls) >= _MOST_CALLS:
            self._by_module = False
            return False
        if not calls.depth:
            self._see_inputs(args, kwargs)
        calls.enter(id(module), self._next_number())
        return True

    @guarded
    def leave(self) -> None:
        """Record that the call of the innermost module ends."""
        self._calls.leave(self._next_number())

    @guarded
    @unseen
    def begin_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count activations before an outermost backward pass."""
        self._backward = True
        if self.error or self._recorder.clock.capturing:
            return
        began = perf_counter_ns()
        self._see_graph(args, kwargs)
        self.cost_ns += perf_counter_ns() - began

    @guarded
    @unseen
    def end_backward(self) -> None:
        """Count gradients after the backward pass."""
        self._backward = False
        self._counts[1] += 1
        if self.error or self._counts[1] > _MOST_COUNTS or self._recorder.clock.capturing:
            return
        began = perf_counter_ns()
        self._batch = {}
        gradients = self._count_gradients()
        size = sum(gradients.by_device().values())
        if size > self._most_gradients:
            self._most_gradients, self._gradients = size, gradients.rows
            self._see_moment("gradients", gradients)
        self.cost_ns += perf_counter_ns() - began

    def fail(self, error: Exception) -> None:
        """Count no more; the collector raises this after the step."""
        self.error = self.error or error

    # -- inner workings

    def _see_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tensor in tensors.tensors_in((args, kwargs)):
            if tensor.requires_grad or len(self._inputs) >= _MOST_INPUTS:
                continue
            for one in tensors.plain(tensor):
                known = tensors.storage_of(one)
                if known is not None and known[0] not in self._known:
                    self._inputs.add(known[0])
                    self._batch[known[0]] = (known[1], str(one.device), tensors.dtype_of(one))

    def _see_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._graphs += 1
        if _size_of(self._batch) > _size_of(self._largest_batch):
            self._largest_batch = self._batch
        self._why = self._why or _obstacle()
        size = 0
        if not self._why:
            roots = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
            graph = tensors.walk(roots)
            if not graph.whole:
                self._why = "the graph has too many nodes"
            self._by_module = self._by_module and not kwargs.get("create_graph")
            self._nodes += graph.nodes
            self._recomputed += graph.recomputed
            self._unseen.update(graph.unseen)
            size = self._fullest.add(graph, self._activations(graph))
        self._counts[0] += 1
        if self._counts[0] > _MOST_COUNTS and size <= self._most_there:
            return
        gathered, gradients = Storages(), self._count_gradients()
        for model in self._models:
            model.count_gathered(gathered)
        gathered.settle()
        size += sum(gradients.by_device().values())
        if size > self._most_there:
            self._most_there, self._gathered = size, gathered.rows
            self._see_moment("backward", gradients)

    def _activations(self, graph: tensors.Graph) -> dict[Key, tensors.Kept]:
        """Return what a graph keeps, without the tensors that are counted elsewhere."""
        gathered = Storages()
        for model in self._models:
            model.count_gathered(gathered)
        elsewhere = (self._known, gathered, self._inputs)
        return {key: one for key, one in graph.kept.items() if one.size and not any(key in them for them in elsewhere)}

    def _count_gradients(self) -> Storages:
        gradients = Storages()
        for model in self._models:
            model.count_gradients(gradients)
        gradients.settle()
        return gradients

    def _see_moment(self, name: str, gradients: Storages) -> None:
        of_gradients = gradients.by_device()
        index = self._recorder.device.in_use()
        for device in {*of_gradients, *([] if index is None else [f"cuda:{index}"])}:
            moment = {"moment": name, "device": device, "gradient_bytes": of_gradients.get(device, 0)}
            if index is not None and device == f"cuda:{index}":
                torch: Any = sys.modules["torch"]
                moment["allocated_bytes"] = int(torch._C._cuda_memoryStats(index)["allocated_bytes"]["all"]["current"])
            self._moments[name, device] = moment
        now = anonymous()
        if now is not None:
            self._most_anonymous = max(now, self._most_anonymous or 0)

    def counted(self) -> dict[str, Any]:
        """Return what the log `held` says of the step that has just ended."""
        if not self._graphs:
            self._why = "no backward pass was seen: CUDA graphs, and functions that are compiled whole, show none"
        rows = Storages()
        for model in self._models:
            model.count(rows)
        optimizers = [state_of(one, self._models, rows) for one in alive(self._recorder.observed.optimizers)]
        count_idle(self._models, rows)
        for model in self._models:
            model.count_buckets(rows)
        rows.settle()
        inputs: dict[tuple[Any, ...], list[int]] = {}
        for size, device, dtype in self._largest_batch.values():
            _add(inputs, ("input", *self._whole, device, dtype, 0), size)
        every = [rows.rows, self._gathered, self._gradients, inputs, self._activation_rows()]
        return {
            "state": "counted",
            "step": self.step,
            "rows": [_row(key, sums) for part in every for key, sums in part.items() if sums[1] or sums[2]],
            "moments": list(self._moments.values()),
            "activations": {
                "state": "abstained" if self._why else "counted",
                "why": self._why,
                "graphs": self._graphs,
                "nodes": self._nodes,
                "recomputed": self._recomputed,
                "unseen": self._unseen.total(),
                "unseen_kinds": [name for name, _ in self._unseen.most_common(_MOST_UNSEEN)],
                "by_module": self._by_module,
            },
            "optimizers": optimizers,
            "process": {"anonymous_bytes": self._most_anonymous},
        }

    def _activation_rows(self) -> dict[tuple[Any, ...], list[int]]:
        rows: dict[tuple[Any, ...], list[int]] = {}
        if self._why:
            return rows
        names: dict[int, tensors.Owner] = {}
        parameters: dict[int, tensors.Owner] = {}
        for model in self._models:
            names = {**model.names, **names}
            parameters = {**model.parameters, **parameters}
        # In the order of the forward pass with one row per size: this shows when the backward pass needs which tensors.
        for one in sorted(self._fullest.most.values(), key=lambda one: one.number):
            owner = names.get(self._calls.owner(one.number), self._whole) if self._by_module else self._whole
            part = "cast" if one.cast_of in parameters else "activation"
            key = (part, *parameters.get(one.cast_of, owner), one.device, one.dtype, 0)
            _add(rows, (*key, one.size) if part == "activation" else key, one.size)
        return rows


def _add(rows: dict[tuple[Any, ...], list[int]], key: tuple[Any, ...], size: int) -> None:
    sums = rows.setdefault(key, [0, 0, 0])
    sums[0] += 1
    sums[1] += size
    sums[2] += size


def _row(key: tuple[Any, ...], sums: list[int]) -> dict[str, Any]:
    part, module, kind, device, dtype, trainable = key[:6]
    row = {"part": part, "module": module, "kind": kind, "device": device, "dtype": dtype}
    return {**row, "tensors": sums[0], "bytes": sums[1], "full_bytes": sums[2], "trainable": trainable}


def _size_of(batch: dict[Key, tuple[int, str, str]]) -> int:
    return sum(size for size, _, _ in batch.values())


def _obstacle() -> str:
    """Return why the graph must not be walked now, or "" if it can be."""
    torch: Any = sys.modules["torch"]
    if not torch._C._len_torch_dispatch_stack():
        return ""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    modes: list[Any] = [*_get_current_dispatch_mode_stack()]
    if all(type(mode).__module__.startswith("dlprof.") for mode in modes):
        return ""
    return "the script has a dispatch mode of its own"  # it would see our operators


def anonymous() -> int | None:
    """Return the anonymous memory of this process in bytes; None if the system does not report it."""
    with contextlib.suppress(OSError):
        found = re.search(rb"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_bytes())
        return int(found[1]) * 1024 if found else None
    return None
