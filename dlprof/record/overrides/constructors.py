"""Makes the loaders, optimizers and DistributedDataParallel of the script with other arguments: `loader.*` and so on.

What each override has done in this process: how often it took effect, where, what was there before, what failed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import multiprocessing
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

from dlprof.overrides import Value
from dlprof.plain import words_of
from dlprof.record.calls.attribution import passed, passing
from dlprof.record.calls.frames import own_files
from dlprof.record.hooks import at_uninstall, hide, put, watch_method
from dlprof.record.loaders import worker_info
from dlprof.record.signals import handler_runs
from dlprof.redaction import shown


class Kind:
    """A kind of object whose constructors are wrapped; `wanted` are the overrides that were asked for, by setting."""

    group: str  # of the overrides: "loader"

    def __init__(self, settings: Mapping[str, Value], effects: Effects) -> None:
        self.wanted = settings
        self.effects = effects
        self.making: list[int] = []  # those that are being made: a class may call the constructor above it

    def change(self, made: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments to make an object with instead of those given; an override that it leaves is noted."""
        new = {name: value for name, value in self.wanted.items() if name in given}
        for name in self.wanted.keys() - new.keys():
            self.effects.failed(f"{self.group}.{name}", f"{type(made).__name__} does not take it")
        return new

    def refused(self, made: Any, given: Mapping[str, Any]) -> None:
        """Take back what a constructor that failed may have changed in its arguments."""

    def done(self, made: Any, given: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
        """See an object that was made with changed arguments."""

    def fail(self, error: BaseException) -> None:
        """Note why none of them took effect."""
        for setting in self.wanted:
            self.effects.failed(f"{self.group}.{setting}", error)


def wanted(asked: Mapping[str, Value], group: str) -> dict[str, Value]:
    """Return the overrides of a group, by setting."""
    return {name.partition(".")[2]: value for name, value in asked.items() if name.startswith(f"{group}.")}


def _bound(
    signature: inspect.Signature, made: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments | None:
    """Return the arguments by name, with the defaults; None: they do not fit."""
    try:
        bound = signature.bind(made, *args, **kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    return bound


def watched(kind: Kind, original: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor that makes objects of a kind with changed arguments."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(made: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - what it stands for
        if id(made) in kind.making:
            with passing:
                return original(made, *args, **kwargs)
        bound = _bound(signature, made, args, kwargs)
        if bound is None:
            with passing:
                return original(made, *args, **kwargs)  # which says what is wrong
        given = dict(bound.arguments)
        kind.making.append(id(made))
        try:
            try:
                changed = kind.change(made, given)
            except Exception as e:  # noqa: BLE001 - made as the script says
                kind.fail(e)
                changed = {}
            bound.arguments.update(changed)
            before = handler_runs()
            try:
                original(*bound.args, **bound.kwargs)
            except BaseException as e:
                # What a signal's handler raises refuses nothing.
                if not changed or not isinstance(e, Exception) or handler_runs() != before:
                    passed(e)
                    raise
                kind.fail(e)
                kind.refused(made, bound.arguments)
                bound.arguments.update({name: given[name] for name in changed if name in kind.wanted})
                with passing:
                    original(*bound.args, **bound.kwargs)
                return None
        finally:
            kind.making.remove(id(made))
        try:
            for setting in kind.wanted:
                if setting in changed:
                    kind.effects.took(f"{kind.group}.{setting}", given[setting])
            kind.done(made, given, changed)
        except Exception as e:  # noqa: BLE001 - it is made, and the script goes on
            kind.fail(e)
        return None

    return __init__


# Distinct places and earlier values that are kept of an override, and how often a place is looked for: some take effect
# in every step.
_MOST_KEPT = 8

_MOST_LOOKS = 64

Place = tuple[str, int, str]  # file, line and function


class Effects:
    """The overrides of a process, by name; its collector writes them. Any thread may call these methods."""

    def __init__(self, asked: Mapping[str, Value]) -> None:
        self.news = True  # something is not in the file yet
        self._is_own = own_files()
        self._cwd = os.getcwd()  # noqa: PTH109 - a prefix
        self._looks = dict.fromkeys(asked, _MOST_LOOKS)
        self._entries: dict[str, dict[str, Any]] = {
            name: {"value": shown(name, value), "applied": 0, "before": [], "places": [], "error": None}
            for name, value in asked.items()
        }

    def took(self, name: str, before: Any, *, placed: bool | Place = True) -> None:
        """Note that an override took effect, and what was there before.

        `placed`: where; True: the line of the script that is being run, False: nowhere in particular. It is looked for
        a few times, and the file is written again for a new place or value only.
        """
        entry = self._entries[name]
        entry["applied"] += 1
        if self._looks[name] <= 0:
            return
        self._looks[name] -= 1
        if (shown_before := shown(name, before)) != entry["value"] or not entry["before"]:
            self._add(entry["before"], shown_before)  # what a library makes again has the value already
        place = self._place(sys._getframe(1)) if placed is True else placed
        if place:
            self._add(entry["places"], [place[0].removeprefix(self._cwd + os.sep), *place[1:]])
        if entry["applied"] == 1:
            self.news = True

    def has_applied(self, name: str) -> bool:
        """Return whether an override took effect so far."""
        return bool(self._entries[name]["applied"])

    def failed(self, name: str, why: BaseException | str, *, undone: bool = False) -> None:
        """Note why an override did not take effect, or not everywhere; the first reason is kept.

        `undone`: it had taken effect, and was taken back.
        """
        entry = self._entries[name]
        if undone and entry["applied"]:
            entry["applied"] -= 1
        if entry["error"] is None:
            entry["error"] = why if isinstance(why, str) else words_of(why)
            self.news = True

    @contextlib.contextmanager
    def noting(self, *names: str) -> Iterator[None]:
        """Note what is raised meanwhile as the reason why these overrides did not take effect; it goes no further."""
        try:
            yield
        except Exception as e:  # noqa: BLE001 - a torch that is not as we know it; the script goes on
            for name in names:
                self.failed(name, e)

    def written(self) -> Mapping[str, Any]:
        """Return what the file holds."""
        self.news = False
        return self._entries

    def _add(self, kept: list[Any], value: Any) -> None:
        if value not in kept and len(kept) < _MOST_KEPT:
            kept.append(value)
            self.news = True

    def _place(self, frame: FrameType | None) -> Place | None:
        """Return the place of the innermost frame that is in no library; None: there is none."""
        while frame is not None:
            file = frame.f_code.co_filename
            if self._is_own(file):
                return file, frame.f_lineno, frame.f_code.co_name
            frame = frame.f_back
        return None


# -- loaders

# What only a loader with workers may be given, and what one without has instead.
_OF_WORKERS = {"prefetch_factor": None, "persistent_workers": False, "multiprocessing_context": None, "timeout": 0}


def install_loaders(asked: Mapping[str, Value], effects: Effects) -> None:
    """Have loaders made with the settings asked for, those of torchdata too."""
    from torch.utils.data import DataLoader

    loaders = _Loaders(wanted(asked, "loader"), effects)
    watch_method(DataLoader, "__init__", functools.partial(watched, loaders))
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
            before = handler_runs()
            try:
                return original(loader)
            except BaseException as e:
                refused = isinstance(e, Exception) and handler_runs() == before
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


# -- DistributedDataParallel

_HOOK = "ddp.comm_hook"
# torch 2.13 has it for `broadcast_buffers`, which warns since; with this one buffers are sent as a model is wrapped.
_SYNC = "forward_sync_buffers"


def install_ddp(asked: Mapping[str, Value], effects: Effects) -> None:
    """Have models wrapped with the settings asked for."""
    from torch.nn.parallel import DistributedDataParallel

    settings = wanted(asked, "ddp")
    hook = settings.pop("comm_hook", None)
    wrapping = _Wrapping(settings, None if hook is None else str(hook), effects)
    making = watched(wrapping, DistributedDataParallel.__init__)
    if hook is not None:
        for name in ("register_comm_hook", "_register_builtin_comm_hook"):
            put(DistributedDataParallel, name, wrapping.registering(getattr(DistributedDataParallel, name)))
    put(DistributedDataParallel, "__init__", making)


class _Wrapping(Kind):
    """How models are wrapped in this process."""

    group = "ddp"

    def __init__(self, settings: Mapping[str, Value], hook: str | None, effects: Effects) -> None:
        super().__init__(settings, effects)
        self._hook = hook
        self._register: Any = None  # the method of DistributedDataParallel's own

    def change(self, made: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments of the wrapper."""
        new = dict(super().change(made, given))
        if float(new.get("bucket_cap_mb", 0.5)).is_integer():
            new["bucket_cap_mb"] = int(new["bucket_cap_mb"])
        if "bucket_cap_mb" in new and given.get("bucket_cap_mb_list") is not None:
            new["bucket_cap_mb_list"] = None
        if _SYNC in given:
            new.pop("broadcast_buffers", None)  # set once it is made: see `done`
        return new

    def done(self, made: Any, given: Mapping[str, Any], changed: Mapping[str, Any]) -> None:  # noqa: ARG002 - see Kind
        """Set what torch reads in each forward pass, and register the hook that exchanges gradients in 16 bits."""
        if _SYNC in given and "broadcast_buffers" in self.wanted:
            self.effects.took("ddp.broadcast_buffers", getattr(made, _SYNC))
            setattr(made, _SYNC, self.wanted["broadcast_buffers"])
        if self._hook is None:
            return
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
        with self.effects.noting(_HOOK):  # else gradients are exchanged as they are
            self._register(made, None, hooks[self._hook])
            self.effects.took(_HOOK, None)

    def registering(self, original: Any) -> Any:
        """Return the method with which the script registers a hook: ours stays where it is in place."""
        if original.__name__ == "register_comm_hook":
            self._register = original

        @functools.wraps(original)
        def register(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
            if not getattr(wrapper, "_comm_hooks", None):
                with passing:
                    return original(wrapper, *args, **kwargs)
            theirs = kwargs.get("hook", kwargs.get("comm_hook_type", args[-1] if args else None))
            self.effects.took(_HOOK, getattr(theirs, "__name__", str(theirs)))
            return None

        return register


# -- optimizers

# An optimizer takes one of them.
_OTHER = {"fused": "foreach", "foreach": "fused"}


def install_optimizers(asked: Mapping[str, Value], effects: Effects) -> None:
    """Have optimizers made with the settings asked for, and look at each before its first step."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    optimizers = _Optimizers(wanted(asked, "optimizer"), effects)
    for kind in {k for k in vars(torch.optim).values() if isinstance(k, type) and issubclass(k, torch.optim.Optimizer)}:
        # A class that inherits its constructor has that of the class above.
        if "__init__" in vars(kind) and not optimizers.wanted.keys().isdisjoint(_parameters(kind)):
            put(kind, "__init__", watched(optimizers, vars(kind)["__init__"]))
    at_uninstall(register_optimizer_step_pre_hook(hide(optimizers.before_step, with_callees=True)).remove)


def _parameters(kind: type) -> Mapping[str, object]:
    return inspect.signature(kind.__init__).parameters  # type: ignore[misc]


class _Optimizers(Kind):
    """The optimizers of this process, and what those that were changed had before."""

    group = "optimizer"

    def __init__(self, settings: Mapping[str, Value], effects: Effects) -> None:
        super().__init__(settings, effects)
        self._keys: list[set[str]] = []  # of the groups of parameters that the optimizer being made was given
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()  # looked at before their first step
        self._before: weakref.WeakKeyDictionary[Any, Mapping[str, Any]] = weakref.WeakKeyDictionary()

    def change(self, made: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments of an optimizer; its groups of parameters are a list, to be read a second time."""
        new = dict(super().change(made, given))
        if not new:
            return {}
        for name, value in [*new.items()]:
            if value and given.get(_OTHER[name]):
                new[_OTHER[name]] = None
        parameters = given["params"]
        if not isinstance(parameters, (list, tuple, dict)) and isinstance(parameters, Iterator):
            parameters = list(parameters)
        self._keys = [set(group) for group in _dicts(parameters)]
        return new | {"params": parameters}

    def refused(self, made: Any, given: Mapping[str, Any]) -> None:  # noqa: ARG002 - see Kind
        """Take out of the groups what the constructor has put there: it would hold in the second attempt too."""
        for group, keys in zip(_dicts(given["params"]), self._keys, strict=False):
            for key in group.keys() - keys:
                del group[key]

    def done(self, made: Any, given: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
        """Remember what the script gave an optimizer; its first step may show that it must have that back."""
        if changed:
            self._before[made] = {name: given[name] for name in changed if name != "params"}

    def before_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Look at an optimizer before its first step; called before each."""
        try:
            if optimizer in self._known:
                return
            self._known.add(optimizer)
            before = self._before.pop(optimizer, None)
            if before is None:
                self._explain(optimizer)
            elif self.wanted.get("fused") and "fused" in before and (why := _not_fused(optimizer)):
                self.effects.failed("optimizer.fused", why, undone=True)
                for group in optimizer.param_groups:
                    group.update(before)
                vars(optimizer).pop("_step_supports_amp_scaling", None)
        except Exception as e:  # noqa: BLE001 - the script's step goes on
            self.fail(e)

    def _explain(self, optimizer: Any) -> None:
        """Note of an optimizer whose constructor was not changed that it takes no such setting."""
        for name in self.wanted:
            if not self.effects.has_applied(f"optimizer.{name}"):
                self.effects.failed(f"optimizer.{name}", f"{type(optimizer).__name__} does not take it")


def _dicts(parameters: Any) -> list[dict[str, Any]]:
    """Return the groups among an optimizer's parameters."""
    if isinstance(parameters, dict):
        return [parameters]
    return [one for one in parameters if isinstance(one, dict)] if isinstance(parameters, (list, tuple)) else []


def _not_fused(optimizer: Any) -> str:
    """Return why an optimizer's first step, which is about to be taken, would fail with fused=True; "": it would not.

    A step that fails halfway has changed some parameters, and cannot be taken again.
    """
    from torch.optim.optimizer import _device_dtype_check_for_fused

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                return "fused optimizers take no sparse gradients"
            try:
                _device_dtype_check_for_fused(parameter)
            except RuntimeError as e:
                return str(e)
    return ""
