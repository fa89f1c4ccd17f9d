"""Optimizers for large batches, which scale the step of each layer to the size of its weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Lars(torch.optim.SGD):
    """SGD with layer-wise scaling: You et al., Large Batch Training of Convolutional Networks, 2017."""

    def __init__(self, model: nn.Module, lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(model.parameters(), lr, momentum, foreach=True)
        self.weight_decay = weight_decay

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # noqa: ARG002 - nobody passes one
        """Scale the gradients, and update every weight that has one. Biases and norms step as with SGD."""
        weights = [p for p in self.param_groups[0]["params"] if p.dim() > 1 and p.grad is not None]
        gradients = [p.grad for p in weights]
        sizes = torch.stack(torch._foreach_norm(weights))
        slopes = torch.stack(torch._foreach_norm(gradients)) + self.weight_decay * sizes
        trusted = torch.where((sizes > 0) & (slopes > 0), 0.001 * sizes / slopes, 1.0)
        torch._foreach_add_(gradients, weights, alpha=self.weight_decay)
        torch._foreach_mul_(gradients, list(trusted.unbind()))
        super().step()


class Lamb(torch.optim.Optimizer):
    """Adam with layer-wise scaling: You et al., Large Batch Optimization for Deep Learning, 2019."""

    def __init__(self, parameters: Any, lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "step": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # noqa: ARG002 - nobody passes one
        """Update every weight that has a gradient; all of them at once in each term of the formula."""
        for group in self.param_groups:
            group["step"] += 1
            weights = [p for p in group["params"] if p.grad is not None]
            gradients = [p.grad for p in weights]
            means = [self.state[p].setdefault("mean", torch.zeros_like(p)) for p in weights]
            squares = [self.state[p].setdefault("square", torch.zeros_like(p)) for p in weights]
            torch._foreach_lerp_(means, gradients, 0.1)
            torch._foreach_mul_(squares, 0.999)
            torch._foreach_addcmul_(squares, gradients, gradients, 0.001)
            roots = torch._foreach_sqrt(torch._foreach_div(squares, 1 - 0.999 ** group["step"]))
            torch._foreach_add_(roots, 1e-6)
            steps = torch._foreach_div(torch._foreach_div(means, 1 - 0.9 ** group["step"]), roots)
            torch._foreach_add_(steps, weights, alpha=group["weight_decay"])
            sizes = torch.stack(torch._foreach_norm(weights))
            lengths = torch.stack(torch._foreach_norm(steps))
            trusted = torch.where((sizes > 0) & (lengths > 0), sizes / lengths, 1.0)
            torch._foreach_mul_(steps, list(trusted.unbind()))
            torch._foreach_add_(weights, steps, alpha=-group["lr"])
