"""A graph network, whose messages depend on both ends of an edge. --fixed: the ends are projected before the gather."""

import torch
import torch.nn.functional as F
from clock import Clock, options
from torch import Tensor, nn

args = options(steps=80)
torch.set_float32_matmul_precision("high")
nodes, edges, width, layers, classes = (64, 256, 16, 2, 5) if args.tiny else (20_000, 500_000, 512, 3, 40)


class Convolution(nn.Module):
    """The mean of an edge's messages, each of a linear layer on its source and its target."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(2 * width, width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def messages(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        if args.fixed:
            of_source, of_target = self.message.weight.chunk(2, 1)
            sent = F.linear(x, of_source).index_select(0, source)
            return F.relu(sent + F.linear(x, of_target, self.message.bias).index_select(0, target))
        ends = torch.cat([x.index_select(0, source), x.index_select(0, target)], 1)  # the cause
        return F.relu(self.message(ends))  # the cause

    def forward(self, x: Tensor, source: Tensor, target: Tensor, degree: Tensor) -> Tensor:
        sent = self.messages(x, source, target)  # the cause
        mean = torch.zeros_like(x).index_add(0, target, sent) / degree
        return x + F.relu(self.norm(self.update(torch.cat([x, mean], 1))))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(128, width)
        self.layers = nn.ModuleList(Convolution() for _ in range(layers))
        self.out = nn.Linear(width, classes)

    def forward(self, x: Tensor, source: Tensor, target: Tensor, degree: Tensor) -> Tensor:
        x = F.relu(self.into(x))
        for layer in self.layers:
            x = layer(x, source, target, degree)
        return self.out(x)


features = torch.randn(nodes, 128, device=args.device)
source, target = torch.randint(nodes, (2, edges), device=args.device)
target = target.sort().values
degree = torch.bincount(target, minlength=nodes).clamp(min=1).unsqueeze(1).float()
labels = torch.randint(classes, (nodes,), device=args.device)
model = Network().to(args.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
clock = Clock(args)
while True:
    loss = F.cross_entropy(model(features, source, target, degree), labels)
    optimizer.zero_grad()
    loss.backward()  # the cause
    optimizer.step()
    if not clock.step():
        break
