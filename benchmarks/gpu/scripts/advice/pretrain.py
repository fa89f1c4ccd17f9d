"""A language model with rotary positions and gated layers. There is nothing to fix: --fixed changes nothing."""

import torch
import torch.nn.functional as F
from clock import Clock, options
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

args = options(steps=80)
on_gpu = args.device == "cuda"
vocabulary, width, layers, batch, length = (256, 128, 2, 2, 32) if args.tiny else (16384, 2048, 6, 8, 1024)
workers, head = (1, 128) if args.tiny else (4, 128)


class Texts(Dataset[Tensor]):
    """Pieces of one long text, of which each token is two bytes."""

    def __init__(self) -> None:
        self.tokens = torch.randint(vocabulary, (4_000_000,), dtype=torch.int16)

    def __len__(self) -> int:
        return batch * (args.steps + 1)

    def __getitem__(self, number: int) -> Tensor:
        start = number * 9973 % (len(self.tokens) - length - 1)
        return self.tokens[start : start + length + 1].long()


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 6 * width, bias=False), nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        query, key, value = self.into(self.before(x)).unflatten(2, (3, -1, head)).permute(2, 0, 3, 1, 4)
        query, key = rotated(query, cosine, sine), rotated(key, cosine, sine)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        gate, raised = self.up(self.between(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * raised)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        waves = 10_000.0 ** (-torch.arange(0, head, 2) / head)
        angles = torch.outer(torch.arange(length), waves)
        self.register_buffer("cosine", angles.cos().bfloat16(), persistent=False)
        self.register_buffer("sine", angles.sin().bfloat16(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cosine, self.sine)
        return self.head(self.norm(x))


loader = DataLoader(Texts(), batch, num_workers=workers, pin_memory=on_gpu, persistent_workers=True)
model = Decoder().to(args.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
clock = Clock(args)
for texts in loader:
    texts = texts.to(args.device, non_blocking=True)
    with torch.autocast(args.device, torch.bfloat16):
        scores = model(texts[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), texts[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if not clock.step():
        break
