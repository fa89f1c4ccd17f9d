"""Overrides of torch's optimizers, as they are made: optimizer.*."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from dlprof.overrides import Value
from dlprof.record.hooks import at_uninstall, hide, put
from dlprof.record.overrides.constructors import Effects, Kind, wanted, watched

# An optimizer takes one of them.
_OTHER = {"fused": "foreach", "foreach": "fused"}


def install(asked: Mapping[str, Value], effects: Effects) -> None:
    """Have optimizers made with the settings asked for, and look at each before its first step."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    optimizers, making = _Optimizers(wanted(asked, "optimizer"), effects), list[int]()
    for kind in {k for k in vars(torch.optim).values() if isinstance(k, type) and issubclass(k, torch.optim.Optimizer)}:
        # A class that inherits its constructor has that of the class above.
        if "__init__" in vars(kind) and not optimizers.wanted.keys().isdisjoint(_parameters(kind)):
            put(kind, "__init__", watched(optimizers, making, vars(kind)["__init__"]))
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
        self.before_step = self._hook()

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

    def _hook(self) -> Any:
        """Return what is called before each step."""

        def before_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
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

        return before_step

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
