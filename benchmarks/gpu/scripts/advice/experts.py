"""A language model with a mixture of experts. --fixed: the experts are one batched product instead of a loop."""

import torch
import torch.nn.functional as F
from clock import Clock, options
from torch import Tensor, nn

args = options(steps=80)
width, layers, count, batch, length = (64, 2, 4, 2, 16) if args.tiny else (512, 6, 16, 16, 512)
vocabulary = 256 if args.tiny else 4096


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.into(x)))


class Mixture(nn.Module):
    """Each token goes through the expert that its router scores highest."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weight, which = self.router(tokens).float().softmax(1).max(1)
        found = self.batched(tokens, which) if args.fixed else self.looped(tokens, which)  # the cause
        return (found * weight.unsqueeze(1)).view_as(x)

    def looped(self, tokens: Tensor, which: Tensor) -> Tensor:
        found = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):  # the cause
            rows = torch.where(which == number)[0]  # the cause
            found.index_add_(0, rows, expert(tokens[rows]).to(found.dtype))  # the cause
        return found

    def batched(self, tokens: Tensor, which: Tensor) -> Tensor:
        """Place the tokens of each expert in a row of its own, as long as the longest."""
        ordinal = F.one_hot(which, count).cumsum(0)
        room = int(ordinal[-1].max())
        place = which * room + ordinal.gather(1, which.unsqueeze(1)).squeeze(1) - 1
        rows = tokens.new_zeros(count * room, width).index_copy(0, place, tokens).view(count, room, width)
        into = torch.stack([expert.into.weight for expert in self.experts])
        out = torch.stack([expert.out.weight for expert in self.experts])
        done = F.gelu(rows @ into.transpose(1, 2)) @ out.transpose(1, 2)
        return done.flatten(0, 1).index_select(0, place).to(tokens.dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into, self.out, self.mixture = nn.Linear(width, 3 * width), nn.Linear(width, width), Mixture()

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.into(self.before(x)).unflatten(2, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mixture(self.between(x))


model = nn.Sequential(
    nn.Embedding(vocabulary, width),
    *(Block() for _ in range(layers)),
    nn.LayerNorm(width),
    nn.Linear(width, vocabulary),
).to(args.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
tokens = torch.randint(vocabulary, (batch, length + 1), device=args.device)
clock = Clock(args)
while True:
    with torch.autocast(args.device, torch.bfloat16):
        scores = model(tokens[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
