"""Next characters of ballads: a decoder-only transformer on one long tensor of characters."""

import argparse
import random
import time

import torch
import torch.nn.functional as F
from torch import nn


def make_ballads(characters, seed):
    rng = random.Random(seed)
    words = ["".join(rng.choice("aeioubdlmnrst") for _ in range(rng.randint(2, 7))) for _ in range(400)]
    text = " ".join(rng.choices(words, k=characters // 4))
    alphabet = sorted(set(text))
    number = {character: i for i, character in enumerate(alphabet)}
    return torch.tensor([number[c] for c in text], dtype=torch.uint8), len(alphabet)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_a, self.norm_b = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_a(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_b(x)), approximate="tanh"))


class Ballads(nn.Module):
    def __init__(self, letters, length, width=256, heads=4, depth=4):
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, width), nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, letters, bias=False)
        nn.init.normal_(self.letter.weight, std=0.02)

    def forward(self, characters):
        return self.out(self.norm(self.blocks(self.letter(characters) + self.place)))


@torch.no_grad()
def held_out_loss(model, batches):
    model.eval()
    losses = [F.cross_entropy(model(b[:, :-1]).flatten(0, 1), b[:, 1:].flatten()) for b in batches]
    model.train()
    return torch.stack(losses).mean().item()


def main(args):
    torch.manual_seed(args.seed)
    text, letters = make_ballads(400_000, args.seed)
    windows = text.unfold(0, args.length + 1, 1)
    draw = lambda last, count: windows[torch.randint(*last, (count,))].long()
    border = len(windows) * 9 // 10
    model = Ballads(letters, args.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    validation = [draw((border, len(windows)), args.batch) for _ in range(2)]
    ends = []
    for step in range(1, args.steps + 1):
        batch = draw((0, border), args.batch)
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: held out {held_out_loss(model, validation):.4f}")
        ends.append(time.perf_counter())
    half = len(ends) // 2
    print(f"loss {loss.item():.6f}")
    print(f"{(ends[-1] - ends[half]) / (len(ends) - 1 - half) * 1e3:.2f} ms per step")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--fixed", action="store_true", help="changes nothing here")
    main(parser.parse_args())
