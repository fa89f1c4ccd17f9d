"""Overrides of the outermost model's call: torch.autocast, torch.compile and model.memory_format.

Only modules with parameters count: a loss function stays as it is.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from threading import local
from typing import Any

from dlprof.overrides import Value
from dlprof.record.calls.attribution import passed, passing
from dlprof.record.captured import capture_test
from dlprof.record.hooks import hidden, hide, put
from dlprof.record.overrides.constructors import Effects
from dlprof.record.overrides.switches import by_torch
from dlprof.record.signals import handler_runs

_AUTOCAST, _COMPILE, _FORMAT = "torch.autocast", "torch.compile", "model.memory_format"


def install(asked: Mapping[str, Value], effects: Effects) -> None:
    """Wrap the call of modules, and torch.compile where the script's own is overridden too."""
    import torch

    if asked.keys().isdisjoint((_AUTOCAST, _COMPILE, _FORMAT)):
        return
    models = _Models(asked, effects)
    original: Any = torch.nn.Module.__call__
    is_traced = torch.compiler.is_dynamo_compiling
    is_captured = capture_test()  # a graph that the script keeps is as the script has it
    within_backward = getattr(torch._C, "_current_graph_task_id", lambda: -1)
    state = local()  # .inside: this thread is in the outermost model's call

    def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - what it stands for
        # In a backward pass: a part of the model that is computed again, as it was at first.
        if is_traced():
            return original(module, *args, **kwargs)
        passes = getattr(state, "inside", False) or within_backward() != -1 or is_captured() or not _is_model(module)
        if passes:
            with passing:
                return original(module, *args, **kwargs)
        state.inside = True
        try:
            with passing:
                return models.call(original, module, args, kwargs)
        finally:
            state.inside = False

    for name, method in vars(_Models).items():
        if hasattr(method, "__code__"):
            (hidden if name in ("call", "_called") else hide)(method)
    put(torch.nn.Module, "__call__", hidden(__call__))
    if _COMPILE in asked:
        put(torch, "compile", models.compiling(torch.compile))


def _is_model(module: Any) -> bool:
    """Return whether a module has parameters, and is no copy that DataParallel makes for each step."""
    try:
        return not getattr(module, "_is_replica", False) and next(module.parameters(), None) is not None
    except Exception:  # noqa: BLE001 - the script's code
        return False


class _Models:
    """The outermost models of this process."""

    def __init__(self, asked: Mapping[str, Value], effects: Effects) -> None:
        import torch

        self._effects = effects
        self._autocast = asked.get(_AUTOCAST)
        self._mode = asked.get(_COMPILE)
        formats = {4: torch.channels_last, 5: torch.channels_last_3d} if _FORMAT in asked else {}
        last = asked.get(_FORMAT) == "channels_last"
        self._formats = formats if last else dict.fromkeys(formats, torch.contiguous_format)  # by dimensions
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._images: weakref.WeakSet[Any] = weakref.WeakSet()  # models whose convolutions were laid out
        self._ours: weakref.WeakSet[Any] = weakref.WeakSet()  # models that are compiled here
        self._ran: weakref.WeakSet[Any] = weakref.WeakSet()  # of those: models that have been called since
        self._theirs: weakref.WeakSet[Any] = weakref.WeakSet()  # models that the script compiles
        self._compiling = False

    def call(self, original: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an outermost model."""
        args, kwargs, context = self._prepare(module, args, kwargs)
        try:
            with passing:
                result = self._called(original, module, args, kwargs)
        finally:
            if context is not None:
                context.__exit__(None, None, None)
        return self._in_float32(result) if context is not None and self._autocast != "off" else result

    def _prepare(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Return what to call a model with, and the context that has been entered for it."""
        if module not in self._seen:
            self._see(module)
        if module in self._images:
            args = tuple(map(self._laid_out, args))
            kwargs = {name: self._laid_out(value) for name, value in kwargs.items()}
        context = None if self._autocast is None else self._context(module)
        if context is not None:
            context.__enter__()
        return args, kwargs, context

    def _see(self, module: Any) -> None:
        self._seen.add(module)
        for name, change in ((_FORMAT, self._lay_out), (_COMPILE, self._compile)):
            with self._effects.noting(name):  # else it stays as it is
                change(module)

    # -- torch.autocast

    def _context(self, module: Any) -> Any:
        import torch

        try:
            device = next(module.parameters()).device.type
            before = "off"
            if torch.is_autocast_enabled(device):
                now = torch.get_autocast_dtype(device)
                before = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(now, str(now))
            dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(str(self._autocast))
            context = torch.autocast(device, dtype=dtype, enabled=dtype is not None)
            self._effects.took(_AUTOCAST, before)
        except Exception as e:  # noqa: BLE001 - the model is called as the script does
            self._effects.failed(_AUTOCAST, e)
            return None
        return context

    def _in_float32(self, result: Any) -> Any:
        """Return what a model gave in float32, as it is without autocast: the script computes the loss with it."""
        import torch
        from torch.utils._pytree import tree_map

        half = (torch.float16, torch.bfloat16)
        try:
            return tree_map(lambda x: x.float() if isinstance(x, torch.Tensor) and x.dtype in half else x, result)
        except Exception as e:  # noqa: BLE001 - a result of the script's own kind
            self._effects.failed(_AUTOCAST, e)
            return result

    # -- model.memory_format

    def _lay_out(self, module: Any) -> None:
        """Lay out the weights of a model's convolutions, in place: its parameters are the same objects."""
        weights = [p for p in module.parameters() if p.dim() in self._formats]
        if not weights:
            return
        before = "contiguous_format" if all(p.is_contiguous() for p in weights) else "channels_last"
        for weight in weights:  # Module.to fails where some have four dimensions and some five
            weight.data = weight.data.contiguous(memory_format=self._formats[weight.dim()])
        self._images.add(module)
        self._effects.took(_FORMAT, before)

    def _laid_out(self, value: Any) -> Any:
        import torch

        if not isinstance(value, torch.Tensor) or value.dim() not in self._formats or value.layout != torch.strided:
            return value
        return value.contiguous(memory_format=self._formats[value.dim()])

    # -- torch.compile

    def _compile(self, module: Any) -> None:
        """Compile a model, in place, unless the script compiles it or a part of it: see `compiling`."""
        if self._mode in (None, "off") or any(m in self._theirs or hasattr(m, "_orig_mod") for m in module.modules()):
            return
        self._compiling = True
        try:
            module.compile(mode=str(self._mode))
        finally:
            self._compiling = False
        self._ours.add(module)

    def _called(self, original: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a model; one that cannot be compiled is called as it is."""
        before = handler_runs()
        try:
            result = original(module, *args, **kwargs)
        except BaseException as e:
            raised = self._raised(module, e, before)
            if raised is e:
                passed(e)
                raise
            if raised is not None:
                raise raised from None
            with passing:
                return original(module, *args, **kwargs)
        self._ran_compiled(module)
        return result

    def _raised(self, module: Any, error: BaseException, before: int) -> BaseException | None:
        """Return what a model's call raises; None: it could not be compiled, and is called as it is from now on."""
        if module not in self._ours or not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            return error
        if handler_runs() != before:  # the compiler's error is around what a signal's handler has raised
            return getattr(error, "inner_exception", None) or error.__cause__ or error.__context__ or error
        self._ours.discard(module)
        module._compiled_call_impl = None
        self._effects.failed(_COMPILE, error, undone=module in self._ran)
        return None

    def _ran_compiled(self, module: Any) -> None:
        if module in self._ours and module not in self._ran:
            self._ran.add(module)
            self._effects.took(_COMPILE, "off")

    def compiling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return torch.compile as the script calls it: with the mode asked for where it compiles a model, or off."""
        from torch.nn import Module

        @functools.wraps(original)
        def compile(model: Any = None, **options: Any) -> Any:  # noqa: A001 - torch's name
            if model is None:
                return functools.partial(compile, **options)
            module = model if isinstance(model, Module) else getattr(model, "__self__", None)
            if self._compiling or (not isinstance(module, Module) and by_torch(2)):
                return original(model, **options)
            before = options.get("mode") or "default"
            if self._mode == "off":
                self._effects.took(_COMPILE, before)
                return model
            if not isinstance(module, Module):
                return original(model, **options)
            self._theirs.add(module)
            if options.get("options") is not None or options.get("backend", "inductor") != "inductor":
                self._effects.failed(_COMPILE, "the script compiles a model with options or a backend of its own")
                return original(model, **options)
            compiled = original(model, **{**options, "mode": self._mode})
            self._effects.took(_COMPILE, before)
            return compiled

        return compile
