"""Overrides of DistributedDataParallel, as the script wraps its model: ddp.*."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from dlprof.overrides import Value
from dlprof.record.attribution import passing
from dlprof.record.hooks import put
from dlprof.record.overrides.constructors import Effects, Kind, wanted, watched

_HOOK = "ddp.comm_hook"
# torch 2.13 has it for `broadcast_buffers`, which warns since; with this one buffers are sent as a model is wrapped.
_SYNC = "forward_sync_buffers"


def install(asked: Mapping[str, Value], effects: Effects) -> None:
    """Have models wrapped with the settings asked for."""
    from torch.nn.parallel import DistributedDataParallel

    settings = wanted(asked, "ddp")
    hook = settings.pop("comm_hook", None)
    wrapping = _Wrapping(settings, None if hook is None else str(hook), effects)
    making = watched(wrapping, [], DistributedDataParallel.__init__)
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
