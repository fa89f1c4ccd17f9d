"""The call sites that were seen, each once, within bounds."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from dlprof.plain import words_of
from dlprof.record import guarded
from dlprof.record.calls.files import Files
from dlprof.record.calls.frames import Frames, Place
from dlprof.record.model.names import parameters_of

if TYPE_CHECKING:
    from dlprof.record.loaders import LoaderSeen

# A call of a kind is looked at so often, and so many places of it are kept: a look costs microseconds, and a script
# may make a loader, or take a step, a million times.
LOOKS = 64
PLACES = 12

# What is moved is a model if it has more than this share of its parameters: a loss may have a few of its own.
_MOST_OF = 0.9


_VALUES = ("batch_size", "drop_last", "num_workers", "persistent_workers", "pin_memory", "prefetch_factor")


class Call:
    """A place that calls of one kind came from, how many of the looks saw it, and the loaders that it is about.

    `trained`: whether a backward pass came after a forward pass from there, and no other forward pass of the model.
    `takes`: of a line that calls the model itself, the dimensions of each positional argument, 0 where it is no tensor.
    `whole`: what is moved there has most parameters of a model. `torch`: the name `torch` is known there.
    `values`: what all loaders from there were made with, without those that differ.
    """

    __slots__ = ("count", "kind", "loaders", "moved", "place", "takes", "torch", "trained", "values", "whole")

    def __init__(self, kind: str, place: Place) -> None:
        self.kind = kind
        self.place = place
        self.count = 0
        self.trained = self.torch = self.whole = False
        self.loaders: list[LoaderSeen] = []
        self.moved: weakref.ref[Any] | None = None
        self.takes: list[int] = []
        self.values: dict[str, Any] | None = None

    def fact(self) -> dict[str, Any]:
        """Return it as the facts have it."""
        place = self.place
        told = {
            "kind": self.kind,
            **{name: getattr(self, name) for name in ("takes", "torch", "values", "whole")},
            **{name: getattr(place, name) for name in ("file", "line", "function")},
            "count": self.count,
            "roles": sorted({seen.role for seen in self.loaders}),
            **{name: getattr(place, name) for name in ("end_line", "column", "end_column", "source", "digest", "via")},
        }
        return {name: value for name, value in told.items() if value or name == "line"}


class Calls:
    """Keeps the places that calls of each kind came from.

    Of objects that are made: loader, ddp, fsdp, data_parallel, optimizer, autocast, grad_scaler, anomaly (autograd's
    anomaly mode), compile, profiler (torch's own). Of the process: affinity (its cores), threads. Of calls: model (`to`
    or `cuda` of a module with parameters), iteration (a loop over a loader), forward (of an outermost module;
    unused_forward where no backward pass followed on any), backward, optimizer_step, save (of a checkpoint),
    synchronize and empty_cache (torch.cuda's). In the step whose operators are counted also: sync (the host gets a
    value), copy (to a device), and in the forward pass and the loss: norm (a variance, a root), softmax, loss (a
    logarithm), one_hot, cat, embedding. `looks` are those left for backward passes, of which there are many: the caller
    checks it before it calls.
    """

    def __init__(self) -> None:
        self.looks = LOOKS
        self.off = False
        self.problem = ""  # why calls are no longer looked at, until that was reported
        self.news = False
        self._looks: Counter[str] = Counter()
        self._calls: dict[tuple[str, str, int, int], Call] = {}
        self._places: Counter[str] = Counter()
        self.directory = os.path.join(_working_directory(), "")  # noqa: PTH118 - that files are named from
        self._since = time.time()
        self.files = Files(self.directory, self._since)
        self._frames: Frames | None = None
        # Loaders by their id: a reference, where it was made, and the id of its data set.
        self._loaders: dict[int, tuple[weakref.ref[Any], Call, int]] = {}
        self._forwards: dict[int, Call] = {}  # the last one of each model, by its id, since the last backward pass

    def facts(self, models: Iterable[weakref.ref[Any]] = ()) -> list[dict[str, Any]]:
        """Return what was seen, as the facts have it; `models`: those that are trained."""
        if self._frames is not None:
            self._frames.forget_sources()
        calls = tuple(self._calls.values())
        for call in calls:
            if call.moved is not None and (moved := call.moved()) is not None and not call.whole:
                inside = {id(parameter) for parameter in parameters_of(moved)}
                alive = (parameters_of(model) for model in (reference() for reference in models) if model is not None)
                call.whole = any(sum(id(p) in inside for p in all_of) > _MOST_OF * len(all_of) for all_of in alive)
        # A model may first be called by a check before training, an evaluation or a drawing of its graph.
        trains = any(call.trained for call in calls)
        facts = [call.fact() for call in calls]
        for call, fact in zip(calls, facts, strict=True):
            if call.kind == "forward" and trains and not call.trained:
                fact["kind"] = "unused_forward"
        return facts

    def see_forward(self, model_id: int, args: Sequence[Any]) -> None:
        """Keep where a model was called, and with what if the line calls it without a function between."""
        if (call := self.see("forward")) is None:
            return
        self._forwards[model_id] = call
        if call.count == 1 and self._frames is not None and self._frames.calls_module(sys._getframe(1)):
            tensor = sys.modules["torch"].Tensor
            call.takes = [arg.dim() if isinstance(arg, tensor) else 0 for arg in args]

    def see(self, kind: str) -> Call | None:
        """Keep the user's line that the caller's caller was called from, and return it; None: there is none.

        It must not fail the script: what goes wrong here ends it.
        """
        if self.off or self._looks[kind] >= LOOKS:
            return None
        self._looks[kind] += 1
        try:
            frames = self._frames = self._frames or Frames(self.directory, self._since)
            frame, library = frames.find(sys._getframe(1))
            if frame is None:
                return None
            # The same instruction is the same call: its place is made once.
            key = (kind, frame.f_code.co_filename, frame.f_lineno, frame.f_lasti)
            call = self._calls.get(key)
            if call is None:
                if self._places[kind] >= PLACES:
                    return None
                self._places[kind] += 1
                call = self._calls[key] = Call(kind, frames.place(frame, library, is_call=kind != "iteration"))
                call.torch = "torch" in frame.f_globals
                self.news = True
            call.count += 1
        except Exception as e:  # noqa: BLE001 - the script goes on
            self.fail(e)
            return None
        return call

    def line(self, frame: FrameType | None) -> tuple[FrameType, Callable[[], Place]] | None:
        """Return the script's own frame at or below this one, and what makes its place; None: there is none."""
        if self.off:
            return None
        frames = self._frames = self._frames or Frames(self.directory, self._since)
        own, library = frames.find(frame)
        return None if own is None else (own, lambda: frames.place(own, library))

    def see_written(self, kind: str, path: str, pattern: str) -> None:
        """Keep the first lines of a file that match: of what the script did before calls were looked at."""
        if self.off or self._places[kind]:
            return
        try:
            frames = self._frames = self._frames or Frames(self.directory, self._since)
            for place in frames.written(path, pattern)[:PLACES]:
                self._places[kind] += 1
                call = self._calls[kind, path, place.line, 0] = Call(kind, place)
                call.count = 1
        except Exception as e:  # noqa: BLE001 - the script goes on
            self.fail(e)

    def see_backward(self) -> None:
        """Keep where a backward pass was called."""
        self.looks -= 1
        for call in self._forwards.values():
            call.trained = True
        self._forwards.clear()
        self.see("backward")

    @guarded
    def see_made(self, loader: Any) -> None:
        """Keep where a loader was made."""
        call = self.see("loader")
        if call is not None:
            self._loaders[id(loader)] = weakref.ref(loader), call, id(getattr(loader, "dataset", None))
            made = {name: vars(loader)[name] for name in _VALUES if type(vars(loader).get(name)) in (int, bool)}
            call.values = dict(made.items() & (made if call.values is None else call.values).items())

    def see_moved(self, module: Any) -> None:
        """Keep where a module with parameters is moved."""
        if not self.off and self._looks["model"] < LOOKS and parameters_of(module):
            call = self.see("model")
            if call is not None and call.moved is None:
                call.moved = weakref.ref(module)

    def see_iteration(self, loader: Any, seen: LoaderSeen) -> None:
        """Keep where a loader is iterated, and what the calls that made it are about.

        A library may have made it of one of the script's (accelerate's `prepare`): that has the same data set.
        """
        known = [self.see("iteration")]
        reference, made, data = self._loaders.get(id(loader), (None, None, 0))
        if made is not None and reference is not None and reference() is loader:
            known.append(made)
            if made.place.via:
                known += [call for _, call, of in self._loaders.values() if of == data and not call.place.via]
        for call in known:
            if call is not None and seen not in call.loaders and len(call.loaders) < LOOKS:
                call.loaders.append(seen)

    def fail(self, error: Exception) -> None:
        """Look at no call any more, since that failed."""
        self.off = True
        self.looks = 0
        self.problem = f"lines of the script are not named: {words_of(error)}"
        self.news = True


def _working_directory() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - no cost at the start of a job
    except OSError:  # it was removed
        return os.sep
