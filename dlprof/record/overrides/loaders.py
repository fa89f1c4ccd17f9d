"""Overrides of each DataLoader, as it is made: loader.*."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import sys
import weakref
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

from dlprof.overrides import Value
from dlprof.record import handlers
from dlprof.record.attribution import passed, passing
from dlprof.record.hooks import watch_method
from dlprof.record.loaders import worker_info
from dlprof.record.overrides.constructors import Effects, Kind, wanted, watched

# What only a loader with workers may be given, and what one without has instead.
_OF_WORKERS = {"prefetch_factor": None, "persistent_workers": False, "multiprocessing_context": None, "timeout": 0}


def install(asked: Mapping[str, Value], effects: Effects) -> None:
    """Have loaders made with the settings asked for, those of torchdata too."""
    from torch.utils.data import DataLoader

    loaders, making = _Loaders(wanted(asked, "loader"), effects), list[int]()
    watch_method(DataLoader, "__init__", functools.partial(watched, loaders, making))
    watch_method(DataLoader, "_get_iterator", loaders.starting)


class _Loaders(Kind):
    """The loaders of this process, and what the script gave those whose workers were changed."""

    group = "loader"

    def __init__(self, settings: Mapping[str, Value], effects: Effects) -> None:
        super().__init__(settings, effects)
        self._given: weakref.WeakKeyDictionary[Any, Mapping[str, Any]] = weakref.WeakKeyDictionary()

    def change(self, made: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments of a loader; what belongs to workers only where there are some."""
        if worker_info() is not None:
            return {}  # a data set's, in a worker
        new = dict(super().change(made, given))
        workers = int(new.get("num_workers", given["num_workers"]))
        if workers != given["num_workers"] and (why := _why_not(given, workers)):
            self.effects.failed("loader.num_workers", why)
            workers = given["num_workers"]
            del new["num_workers"]
        if not workers:
            for name in [name for name in new if name in _OF_WORKERS]:
                if new[name] != _OF_WORKERS[name]:
                    self.effects.failed(f"loader.{name}", "a loader has no workers")
                del new[name]
            if given["num_workers"]:
                new |= {name: value for name, value in _OF_WORKERS.items() if name in given}
        return new

    def done(self, made: Any, given: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
        """Remember what the script gave a loader with other workers: they may not start."""
        if getattr(made, "num_workers", 0) and not changed.keys().isdisjoint(("num_workers", *_OF_WORKERS)):
            with contextlib.suppress(TypeError):  # one that cannot be a key: its workers start as asked for, or not
                self._given[made] = {name: given[name] for name in ("num_workers", *_OF_WORKERS) if name in given}

    def starting(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return what starts a loader's workers: as the script has them where those asked for do not start."""

        @functools.wraps(original)
        def _get_iterator(loader: Any) -> Any:
            before = handlers.runs()
            try:
                return original(loader)
            except BaseException as e:
                refused = isinstance(e, Exception) and handlers.runs() == before
                given = self._given.pop(loader, None) if self._given and refused else None
                if given is None:
                    passed(e)
                    raise
                for setting in self.wanted:
                    if setting in given:
                        self.effects.failed(f"loader.{setting}", e, undone=True)
                _give(loader, given)
                with passing:
                    return original(loader)

        return _get_iterator


def _why_not(given: Mapping[str, Any], workers: int) -> str:
    """Return why a loader's number of workers must stay as given; "": it may be changed."""
    if workers and multiprocessing.current_process().daemon:
        return "a daemonic process may start no workers"
    dataset, before = given["dataset"], given["num_workers"]
    if not isinstance(dataset, sys.modules["torch.utils.data"].IterableDataset) or max(before, workers) <= 1:
        return ""
    if _shares(dataset) or _asks(getattr(given.get("worker_init_fn"), "__code__", None)):
        return ""
    return f"{type(dataset).__name__} is iterable, and not known to share its samples among workers"


def _shares(dataset: Any, depth: int = 4) -> bool:
    """Return whether an iterable data set looks up which worker it is in, as it must to share its samples.

    By the code of its class, or that of all iterable data sets that it wraps.
    """
    kinds = (kind for kind in type(dataset).__mro__ if not kind.__module__.startswith("torch."))
    if any(_asks(getattr(f, "__code__", None)) for kind in kinds for f in vars(kind).values()):
        return True
    held = getattr(dataset, "__dict__", {}).values()
    parts = [part for value in held for part in (value if isinstance(value, (list, tuple)) else [value])]
    within = [part for part in parts if isinstance(part, sys.modules["torch.utils.data"].IterableDataset)]
    return bool(within) and depth > 0 and all(_shares(part, depth - 1) for part in within)


def _asks(code: CodeType | None) -> bool:
    if code is None:
        return False
    within = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return "get_worker_info" in code.co_names or any(map(_asks, within))


def _give(loader: Any, settings: Mapping[str, Any]) -> None:
    """Set what a loader was made with. It refuses some of that once it is made."""
    workers = settings["num_workers"]
    plain = {name: value for name, value in settings.items() if name != "multiprocessing_context"}
    if workers and plain.get("prefetch_factor", 0) is None:
        plain["prefetch_factor"] = 2  # as its constructor does
    vars(loader).update({name: value for name, value in plain.items() if name in vars(loader)})
    loader.multiprocessing_context = settings["multiprocessing_context"] if workers else None
