"""The mask of each batch's documents is made in Python, token by token. --fixed: by one comparison on the GPU."""

import torch
import torch.nn.functional as F
from clock import Clock, options
from torch import Tensor, nn

args = options(steps=60)
width, heads, layers, batch, length = (64, 2, 2, 2, 16) if args.tiny else (512, 8, 6, 16, 128)


def mask_of(documents: Tensor) -> Tensor:
    """Return which tokens (batch, length) may see each other: those of one document, and none that comes later."""
    if args.fixed:
        on_gpu = documents.to(args.device)
        return (on_gpu.unsqueeze(2) == on_gpu.unsqueeze(1)).tril()
    mask = torch.zeros(batch, length, length, dtype=torch.bool)
    for b, row in enumerate(documents.tolist()):  # the cause
        for i in range(length):  # the cause
            first = row.index(row[i])  # the cause
            mask[b, i, first : i + 1] = True  # the cause
    return mask.to(args.device)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.into(self.norm(x)).unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask.unsqueeze(1))
        return x + self.out(found.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(1000, width), nn.Linear(width, 1000)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


model = Model().to(args.device)
tokens = torch.randint(1000, (batch, length), device=args.device)
documents = torch.randint(2, (batch, length)).mul(torch.rand(batch, length) < 0.1).cumsum(1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
clock = Clock(args)
while True:
    mask = mask_of(documents)  # the cause
    with torch.autocast(args.device, torch.bfloat16):
        loss = F.cross_entropy(model(tokens, mask).flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
