"""Forecasts speeds on a road network whose graph is learnt too. --fixed: the remedy."""

import torch
import torch.nn.functional as F
from clock import FIXED, Clock
from torch import nn

NODES, WINDOW, HORIZON, BATCH, STEPS = 800, 13, 3, 2, 80


def speeds(hours=1500):
    t = torch.arange(hours) * 2 * torch.pi / 24
    waves = torch.stack([torch.sin(t), torch.cos(t), torch.sin(2 * t)])
    return torch.randn(NODES, 3) @ waves + 0.2 * torch.randn(NODES, hours)


class LearntGraph(nn.Module):
    """Two embeddings for each node; who listens to whom is the softmax of their products."""

    def __init__(self, size=32):
        super().__init__()
        self.source, self.target = nn.Parameter(torch.randn(NODES, size)), nn.Parameter(torch.randn(size, NODES))

    def forward(self):
        return F.softmax(F.relu(self.source @ self.target), dim=1)


class Diffusion(nn.Module):
    def __init__(self, width, order=1):
        super().__init__()
        self.order = order
        self.mix = nn.Conv2d((order + 1) * width, width, 1)

    def forward(self, x, support):
        parts = [x]
        for _ in range(self.order):
            parts.append(torch.einsum("bcnt,nm->bcmt", parts[-1], support).contiguous())
        return self.mix(torch.cat(parts, 1))


class Layer(nn.Module):
    def __init__(self, width, dilation, graph):
        super().__init__()
        self.graph = graph
        self.filter = nn.Conv2d(width, width, (1, 2), dilation=(1, dilation))
        self.gate = nn.Conv2d(width, width, (1, 2), dilation=(1, dilation))
        self.diffusion, self.norm = Diffusion(width), nn.BatchNorm2d(width)

    def forward(self, x, support=None):
        if support is None:
            support = self.graph()  # the cause
        h = torch.tanh(self.filter(x)) * torch.sigmoid(self.gate(x))
        return self.norm(self.diffusion(h, support) + x[..., -h.shape[-1] :])


class Forecaster(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.graph = LearntGraph()
        self.start = nn.Conv2d(1, width, 1)
        self.layers = nn.ModuleList(Layer(width, dilation, self.graph) for dilation in (1, 2, 1, 2, 1, 2, 1, 2))
        self.end = nn.Sequential(nn.ReLU(), nn.Conv2d(width, 32, 1), nn.ReLU(), nn.Conv2d(32, HORIZON, 1))

    def forward(self, x):
        support = self.graph() if FIXED else None  # the cause
        x = self.start(x)
        for layer in self.layers:
            x = layer(x, support)
        return self.end(x)[..., -1].transpose(1, 2)


def batches(data):
    while True:
        begins = torch.randint(data.shape[1] - WINDOW - HORIZON, (BATCH,)).tolist()
        rows = torch.stack([data[:, begin : begin + WINDOW + HORIZON] for begin in begins])
        yield rows[:, None, :, :WINDOW], rows[:, :, WINDOW:]


model = Forecaster()
torch.set_num_threads(2)  # it has no worker
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
clock = Clock(STEPS)
for past, future in batches(speeds()):
    loss = F.l1_loss(model(past), future)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    if not clock.step():
        break
print(f"loss {loss.item():.5f}")
