"""Overrides of each DataLoader, as it is made: loader.*."""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import sys
import weakref
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

from dlprof.overrides import Value
from dlprof.record.hooks import watch_method
from dlprof.record.overrides.effects import Effects

# What a loader without workers must not be given, and what it has instead.
_OF_WORKERS = {"prefetch_factor": None, "persistent_workers": False, "multiprocessing_context": None, "timeout": 0}


def install(asked: Mapping[str, Value], effects: Effects) -> None:
    """Have loaders made with the settings asked for, those of torchdata too."""
    from torch.utils.data import DataLoader

    wanted = {name.partition(".")[2]: value for name, value in asked.items() if name.startswith("loader.")}
    if not wanted:
        return
    loaders = _Loaders(wanted, effects)
    watch_method(DataLoader, "__init__", loaders.making)
    watch_method(DataLoader, "_get_iterator", loaders.iterating)


class _Loaders:
    """The loaders of this process, and what the script gave those whose workers were changed."""

    def __init__(self, wanted: Mapping[str, Value], effects: Effects) -> None:
        self._wanted = wanted
        self._effects = effects
        self._making: list[int] = []  # loaders that are being made: a class may call the constructor above it
        self._given: weakref.WeakKeyDictionary[Any, Mapping[str, Any]] = weakref.WeakKeyDictionary()

    def making(self, original: Callable[..., None]) -> Callable[..., None]:
        """Return a constructor that gives a loader the settings."""
        signature = inspect.signature(original)

        @functools.wraps(original)
        def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - what it stands for
            if id(loader) in self._making or (changed := self._changed(signature, loader, args, kwargs)) is None:
                return original(loader, *args, **kwargs)
            bound, before = changed
            self._making.append(id(loader))
            try:
                original(*bound.args, **bound.kwargs)
            except Exception as e:  # noqa: BLE001 - made as the script says
                for setting in self._wanted:
                    self._effects.failed(f"loader.{setting}", e)
                return original(loader, *args, **kwargs)
            finally:
                self._making.remove(id(loader))
            try:
                self._note(loader, before)
            except Exception as e:  # noqa: BLE001 - the loader is made, and the script goes on
                self._effects.failed("loader." + next(iter(self._wanted)), e)
            return None

        return __init__

    def iterating(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return what starts a loader's workers, as the script had them where those asked for cannot be started."""

        @functools.wraps(original)
        def _get_iterator(loader: Any) -> Any:
            try:
                return original(loader)
            except Exception as e:
                if (given := self._given.pop(loader, None)) is None:
                    raise
                for setting in self._wanted:
                    if setting in given:
                        self._effects.failed(f"loader.{setting}", e)
                vars(loader).update({name: value for name, value in given.items() if name in vars(loader)})
                loader.multiprocessing_context = given["multiprocessing_context"]
                return original(loader)

        return _get_iterator

    def _changed(
        self, signature: inspect.Signature, loader: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[inspect.BoundArguments, dict[str, Any]] | None:
        """Return the arguments to make a loader with, and those of the script that differ; None: as the script says."""
        try:
            bound = signature.bind(loader, *args, **kwargs)
            bound.apply_defaults()
            if sys.modules["torch.utils.data"].get_worker_info() is not None:
                return None  # of a data set, in a worker
            given = {name: bound.arguments[name] for name in ("num_workers", *_OF_WORKERS) if name in bound.arguments}
            new = dict(self._wanted)
            workers = int(new.pop("num_workers", given["num_workers"]))
            if workers != given["num_workers"] and (why := self._why_not(bound, given["num_workers"], workers)):
                self._effects.failed("loader.num_workers", why)
                workers = given["num_workers"]
            if not workers:
                for setting in [s for s in new if s in _OF_WORKERS]:
                    del new[setting]
                if given["num_workers"]:
                    new |= _OF_WORKERS
            new["num_workers"] = workers
            before = {name: bound.arguments[name] for name in new if name in bound.arguments}
            bound.arguments.update({name: new[name] for name in before})
        except TypeError:
            return None  # not what this constructor takes: it says so itself
        except Exception as e:  # noqa: BLE001 - the script's loader is made as it says
            for setting in self._wanted:
                self._effects.failed(f"loader.{setting}", e)
            return None
        return bound, given | before

    def _why_not(self, bound: inspect.BoundArguments, given: int, workers: int) -> str:
        """Return why a loader's number of workers must stay; "": it may be changed."""
        if workers and multiprocessing.current_process().daemon:
            return "a daemonic process may start no workers"
        dataset = bound.arguments["dataset"]
        if not isinstance(dataset, sys.modules["torch.utils.data"].IterableDataset) or max(given, workers) <= 1:
            return ""
        if _shares(type(dataset)) or _names_worker(getattr(bound.arguments.get("worker_init_fn"), "__code__", None)):
            return ""
        return f"{type(dataset).__name__} is iterable and not known to share its data among workers"

    def _note(self, loader: Any, before: Mapping[str, Any]) -> None:
        workers = vars(loader).get("num_workers")
        for setting, value in self._wanted.items():
            if setting == "num_workers" and workers != value:
                continue  # it stays, and that is noted
            if setting not in before or (setting in _OF_WORKERS and not workers):
                continue
            self._effects.took(f"loader.{setting}", _plain(before[setting]))
        if workers:
            self._given[loader] = {name: before[name] for name in ("num_workers", *_OF_WORKERS) if name in before}


def _plain(value: Any) -> Any:
    """Return how workers are started by its name."""
    return value.get_start_method() if hasattr(value, "get_start_method") else value


def _shares(kind: type) -> bool:
    """Return whether an iterable data set's class asks which worker it is in, as one that shares its data must."""
    functions = (f for k in kind.__mro__ if not k.__module__.startswith("torch.") for f in vars(k).values())
    return any(_names_worker(getattr(f, "__code__", None)) for f in functions)


def _names_worker(code: CodeType | None) -> bool:
    if code is None:
        return False
    within = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return "get_worker_info" in code.co_names or any(map(_names_worker, within))
