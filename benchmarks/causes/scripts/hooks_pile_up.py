"""Every epoch adds hooks to all layers, and none is removed. --fixed: they are removed when the epoch ends."""

import torch
from clock import FIXED, Clock

model = torch.nn.Sequential(
    *(layer for _ in range(8) for layer in (torch.nn.Linear(192, 192), torch.nn.LayerNorm(192), torch.nn.ReLU()))
)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
spreads = {}


def watch():
    """Keep the spread of what every layer gives."""

    def keep(name):
        def hook(module, inputs, output):
            spreads[name] = output.detach().std()  # the cause

        return hook

    return [layer.register_forward_hook(keep(name)) for name, layer in model.named_modules()]  # the cause


clock = Clock(300)
more = True
while more:
    handles = watch()  # the cause
    for _ in range(10):
        x = torch.rand(64, 192)
        loss = (model(x) - x).square().mean()  # the cause
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        more = clock.step()
        if not more:
            break
    if FIXED:
        for handle in handles:
            handle.remove()
