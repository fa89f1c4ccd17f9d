"""An all-to-all of pieces of any size, that gradients go back through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class ToOwners(torch.autograd.Function):
    """An all-to-all that gradients go back through: pieces of the first dimension, so many for and from each rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, give: Sequence[int], take: Sequence[int]) -> Tensor:
        """Return what the ranks have for this one, in their order."""
        ctx.give, ctx.take = give, take
        return exchange(x, give, take)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return each rank the gradients of what it sent."""
        return exchange(grads[0], ctx.take, ctx.give), None, None


to_owners: Callable[[Tensor, Sequence[int], Sequence[int]], Tensor] = ToOwners.apply


def exchange(x: Tensor, give: Sequence[int], take: Sequence[int]) -> Tensor:
    """Send each rank its rows, and return those that came, in the ranks' order."""
    came = x.new_empty(sum(take), *x.shape[1:])
    dist.all_to_all_single(came, x.contiguous(), list(take), list(give))
    return came
