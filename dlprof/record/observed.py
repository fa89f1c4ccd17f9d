"""What was seen of the script's loaders, models and optimizers: the facts of a rank are written from it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from dlprof.record.calls import Calls
from dlprof.record.loaders import (
    LoaderSeen,
    Padding,
    Pass,
    Referable,
    adopt,
    begin_pass,
    described,
    loader_of,
    settings_of,
)
from dlprof.record.model.names import parameters_of
from dlprof.record.model.parameters import Dropped

# A script that makes modules or optimizers as it goes, as meta-learning does: this many of each are kept.
_MOST = 100

# Samples or tokens of one step.
_MOST_TOLD = 2**50

# Calls of outermost modules that are looked at for autocast.
_AUTOCAST_LOOKS = 16
_FORWARD_LOOKS = 24
_IDLE_LOOKS = 8


@dataclass(slots=True, eq=False)
class Observed:
    """What the hooks have seen. References are weak: they keep none of the script's objects alive."""

    news: bool = False  # something is not in facts.json yet
    calls: Calls = field(default_factory=Calls)
    padding: Padding = field(default_factory=Padding)
    dropped: Dropped = field(default_factory=Dropped)
    loaders: list[LoaderSeen] = field(default_factory=list)
    models: list[weakref.ref[Any]] = field(default_factory=list)
    optimizers: list[weakref.ref[Any]] = field(default_factory=list)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)  # of the command line, by name; see hooks.py
    autocast: dict[str, Any] | None = None
    grad_scaler: bool = False
    graphs: int = 0  # CUDA graphs that were captured
    evaluated: int = 0  # steps of forward passes alone
    graded: int = 0  # those of them whose graph nobody uses: gradients were on
    pipeline: dict[str, Any] | None = None  # the pipeline schedule that this rank runs
    told: bool = False  # the script says how many samples or tokens its steps are
    untold: str = ""  # the type of what it said instead of a number, the first time
    idle_looks: int = _IDLE_LOOKS  # the same, of those without gradients once training has begun
    autocast_looks: int = _AUTOCAST_LOOKS  # left
    forward_looks: int = _FORWARD_LOOKS  # left, of forward passes with gradients, for where they are called
    model_id: int = 0  # of the last model and the last optimizer, which need no look
    optimizer_id: int = 0
    is_model: bool = False  # the last module has parameters
    learns: bool = False  # the last module has parameters: it is a model, and no loss
    frozen: bool = False  # none of its parameters is trained, as of a teacher: what it computes is for another model
    _model_ids: dict[int, bool] = field(default_factory=dict)
    _frozen_ids: set[int] = field(default_factory=set)
    _models: set[int] = field(default_factory=set)
    _optimizer_ids: set[int] = field(default_factory=set)
    _alive: dict[int, weakref.ref[Any]] = field(default_factory=dict)
    _looked_models: int = 0
    _looked_optimizers: int = 0

    def see_model(self, module: Any, args: Sequence[Any] = ()) -> None:
        """Keep an outermost module that has parameters."""
        self.model_id = id(module)
        self.learns = self._model_ids.get(self.model_id, False)
        self.is_model = self.model_id in self._models
        self.frozen = self.model_id in self._frozen_ids
        if len(self.optimizers) > 1 and any(getattr(arg, "requires_grad", False) for arg in args):
            self.dropped.through.add(self.model_id)
        if self.model_id in self._model_ids or self._looked_models >= _MOST:
            return
        self._looked_models += 1
        self._watch(module)
        parameters = parameters_of(module)
        self.learns = self._model_ids[self.model_id] = bool(parameters)
        if self.learns:
            self._models.add(self.model_id)
            self.is_model = True
            self.frozen = not any(parameter.requires_grad for parameter in parameters)
            if self.frozen:
                self._frozen_ids.add(self.model_id)
                self.calls.see("frozen_forward")
            else:
                self.calls.see_forward(module, args)
            self.models.append(weakref.ref(module))
            self.news = True

    def _watch(self, one: Any) -> None:
        """Forget an object's address once it is gone: the next one may get the same."""
        address = id(one)

        def forget(_gone: object) -> None:
            self._alive.pop(address, None)
            self._model_ids.pop(address, None)
            for known in (self._models, self._frozen_ids, self._optimizer_ids, self.dropped.through):
                known.discard(address)
            self.model_id = 0 if self.model_id == address else self.model_id
            self.optimizer_id = 0 if self.optimizer_id == address else self.optimizer_id

        self._alive[address] = weakref.ref(one, forget)

    def look_no_more(self) -> None:
        """Count no more of what the last model gets: its loader says as much, and it gets no tokens."""
        self.learns = self._model_ids[self.model_id] = False

    def see_evaluation(self, *, with_graph: bool) -> None:
        """Count a step of forward passes alone."""
        self.evaluated += 1
        if with_graph:
            self.news = self.news or not self.graded
            self.graded += 1

    def see_optimizer(self, optimizer: Any) -> bool:
        """Keep an optimizer, and return whether it was new."""
        self.optimizer_id = id(optimizer)
        if self.optimizer_id in self._optimizer_ids or self._looked_optimizers >= _MOST:
            return False
        self._looked_optimizers += 1
        self._watch(optimizer)
        self._optimizer_ids.add(self.optimizer_id)
        self.optimizers.append(weakref.ref(optimizer))
        self.news = True
        return True

    def see_loader(self, loader: Any, iterator: Any, began_ns: int, took_ns: int) -> None:
        """Keep a loader, and give its new iterator a pass; iter() began then and took so long (perf_counter, ns)."""
        seen = next((s for s in self.loaders if s.loader() is loader), None)
        if seen is None:
            like = described(loader, iterator)
            if like is None:
                begin_pass(iterator, None, began_ns, took_ns)
                return
            settings = settings_of(like)
            # A script that makes its loader anew each epoch has one loader.
            seen = next((s for s in self.loaders if s.loader() is None and s.settings == settings), None)
            if seen is not None:
                seen.loader = weakref.ref(loader)
            else:
                seen = LoaderSeen(weakref.ref(loader), settings, data_of=self._reads_as(loader))
                self.loaders.append(seen)
                self.news = True
        self.calls.see_iteration(loader, seen)
        begin_pass(iterator, seen, began_ns, took_ns)

    def _reads_as(self, loader: Any) -> int | None:
        """Return the place of the first loader that is there and reads the same data set object."""
        alive = ((place, seen.loader()) for place, seen in enumerate(self.loaders))
        return next((place for place, one in alive if one is not None and one.dataset is loader.dataset), None)

    def adopt(self, iterator: Any) -> Pass:
        """Return the pass of an iterator whose making was not seen, as in a process that is recorded from its middle.

        Its loader is known by what the iterator has kept of it; where the loader comes by later, it is the same one.
        """
        over = adopt(iterator)
        over.adopted = True
        try:
            loader = loader_of(iterator)
            settings = None if loader is None else settings_of(loader)
        except Exception:  # noqa: BLE001 - another torch's
            return over
        if settings is not None:
            seen = next((s for s in self.loaders if s.settings == settings), None)
            if seen is None:
                seen = LoaderSeen(weakref.ref(Referable()), settings)  # the loader is not known, and so not there
                self.loaders.append(seen)
                self.news = True
            over.loader = seen
        return over

    def see_batch(self, batch: Any, step: int, over: Pass | None = None) -> None:
        """Look at the padding of a batch that a step works on, unless its loader is known for something else."""
        if over is None or over.loader is None or over.loader.role == "train":
            self.padding.look(batch, step, self.models)

    def see_told(self, number: Any) -> int:
        """Return a number of samples or tokens that the script gives; 0: it gives none, or nothing that is one."""
        if number is None:
            return 0
        # A tensor on a device is not read: that would wait for the device.
        if isinstance(number, Integral) and not isinstance(number, bool) and 0 < int(number) <= _MOST_TOLD:
            self.news = self.news or not self.told
            self.told = True
            return int(number)
        if not self.untold:
            self.untold = type(number).__name__
            self.calls.problem = f"dlprof.step() takes whole numbers of samples and tokens, not a {self.untold}"
            self.news = True
        return 0

    def see_autocast(self) -> None:
        """Look whether autocast is on, until it was seen once."""
        import torch

        self.autocast_looks -= 1
        for device in ("cuda", "cpu"):
            if torch.is_autocast_enabled(device):
                dtype = str(torch.get_autocast_dtype(device)).replace("torch.", "")
                self.autocast = {"enabled": True, "dtype": dtype}
                self.autocast_looks = 0
                self.news = True
                return
        self.autocast = {"enabled": False, "dtype": None}
