"""What was seen of the script's loaders, models and optimizers: the facts of a rank are written from it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from dlprof.record.calls.seen import Calls
from dlprof.record.loaders import LoaderSeen, begin_pass, settings_of

# A script that makes modules or optimizers as it goes, as meta-learning does: this many of each are kept.
_MOST = 100

# Calls of outermost modules that are looked at for autocast.
_AUTOCAST_LOOKS = 16


@dataclass(slots=True, eq=False)
class Observed:
    """What the hooks have seen. References are weak: nothing of the script's lives longer for being watched."""

    news: bool = False  # something is not in facts.json yet
    calls: Calls = field(default_factory=Calls)
    loaders: list[LoaderSeen] = field(default_factory=list)
    models: list[weakref.ref[Any]] = field(default_factory=list)
    optimizers: list[weakref.ref[Any]] = field(default_factory=list)
    autocast: dict[str, Any] | None = None
    grad_scaler: bool = False
    graphs: int = 0  # CUDA graphs that were captured
    pipeline: dict[str, Any] | None = None  # the pipeline schedule that this rank runs
    autocast_looks: int = _AUTOCAST_LOOKS  # left
    model_id: int = 0  # of the last model and the last optimizer, which need no look
    optimizer_id: int = 0
    _model_ids: set[int] = field(default_factory=set)
    _optimizer_ids: set[int] = field(default_factory=set)

    def see_model(self, module: Any) -> None:
        """Keep an outermost module that has parameters."""
        self.model_id = id(module)
        if self.model_id in self._model_ids or len(self._model_ids) >= _MOST:
            return
        self._model_ids.add(self.model_id)
        if next(module.parameters(), None) is not None:
            self.models.append(weakref.ref(module))
            self.calls.see("forward")
            self.news = True

    def see_optimizer(self, optimizer: Any) -> bool:
        """Keep an optimizer, and return whether it was new."""
        self.optimizer_id = id(optimizer)
        if self.optimizer_id in self._optimizer_ids or len(self._optimizer_ids) >= _MOST:
            return False
        self._optimizer_ids.add(self.optimizer_id)
        self.optimizers.append(weakref.ref(optimizer))
        self.news = True
        return True

    def see_loader(self, loader: Any, iterator: Any, began_ns: int, took_ns: int) -> None:
        """Keep a loader, and give its new iterator a pass; iter() began then and took so long (perf_counter, ns)."""
        seen = next((s for s in self.loaders if s.loader() is loader), None)
        if seen is None:
            settings = settings_of(loader)
            # A script that makes its loader anew each epoch has one loader.
            seen = next((s for s in self.loaders if s.loader() is None and s.settings == settings), None)
            if seen is not None:
                seen.loader = weakref.ref(loader)
            else:
                seen = LoaderSeen(weakref.ref(loader), settings)
                self.loaders.append(seen)
                self.news = True
        self.calls.see_iteration(loader, seen)
        begin_pass(iterator, seen, began_ns, took_ns)

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
