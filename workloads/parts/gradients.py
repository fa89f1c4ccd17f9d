"""What DistributedDataParallel can do to gradients to make them smaller on their way between the ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel


def compress(model: DistributedDataParallel, how: str, device: str) -> None:
    """Exchange the gradients of a model in 16 bits ("fp16") or as products of small matrices ("powersgd")."""
    if how == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return
    # From the step on that the paper's authors found late enough: Vogels et al., PowerSGD, 2019.
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=10)
    hook = powerSGD_hook.powerSGD_hook
    model.register_comm_hook(state, in_turn(hook) if device == "cpu" else hook)


def in_turn(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return DDP's hook, made to take a bucket when it is done with the one before.

    PowerSGD exchanges a bucket several times, and gloo's threads begin what follows the first exchange: several buckets
    at once in an order that each rank has for itself, and the ranks would wait for each other forever.
    """
    before: list[Any] = []

    @functools.wraps(hook)  # DDP reads its signature
    def call(state: Any, bucket: Any) -> Any:
        if before:
            before.pop().wait()
        before.append(hook(state, bucket))
        return before[0]

    return call
