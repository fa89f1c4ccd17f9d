"""Lars and Lamb step as the equations of their papers say."""

from __future__ import annotations

import torch
from parts.optimizers import Lamb, Lars


def test_lars_scales_each_layers_step_to_its_weights() -> None:
    model = torch.nn.Linear(3, 2)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = Lars(model, lr=2.0, momentum=0.9, weight_decay=0.1)
    gradients = [torch.randn_like(p) for p in before]
    for _ in range(2):
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    # The paper's equations, a layer at a time; its velocity holds the rate, which is the same in both steps.
    w, b = before
    velocity = torch.zeros_like(w)
    for _ in range(2):
        local = 0.001 * w.norm() / (gradients[0].norm() + 0.1 * w.norm())
        velocity = 0.9 * velocity + 2.0 * local * (gradients[0] + 0.1 * w)
        w = w - velocity
    torch.testing.assert_close(model.weight.detach(), w)
    torch.testing.assert_close(model.bias.detach(), b - 2.0 * (1 + 1.9) * gradients[1])


def test_lamb_scales_each_layers_step_to_its_weights() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(3, 2))
    optimizer = Lamb([weight], lr=0.1, weight_decay=0.5)
    w, gradients = weight.detach().clone(), [torch.randn(3, 2), torch.randn(3, 2)]
    mean, square = torch.zeros_like(w), torch.zeros_like(w)
    for n, gradient in enumerate(gradients, 1):
        weight.grad = gradient.clone()
        optimizer.step()
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        step = (mean / (1 - 0.9**n)) / ((square / (1 - 0.999**n)).sqrt() + 1e-6) + 0.5 * w
        w = w - 0.1 * w.norm() / step.norm() * step
    torch.testing.assert_close(weight.detach(), w)
