"""Fine-tunes a small decoder on conversations with low-rank adapters."""

import argparse
import gc
import random
import time

import torch
import torch.nn.functional as F
from torch import nn

WORDS = (
    "the a to of and in is it you that for on with as this be are have not can will how what when where why who".split()
)


def make_conversations(count, seed=0):
    rng = random.Random(seed)
    records = []
    for number in range(count):
        texts = [" ".join(rng.choices(WORDS, k=12)) for _ in range(2)]
        turns = [{"role": r, "content": t, "tags": ["en"]} for r, t in zip(("user", "assistant"), texts)]
        records.append({"id": number, "source": {"name": "forum"}, "conversations": turns})
    return records


class Tokenizer:
    def __init__(self):
        self.ids = {word: i for i, word in enumerate(["<pad>", "<user>", "<assistant>", "<eos>", *WORDS])}

    def encode(self, record, length):
        tokens, learned = [], []
        for turn in record["conversations"]:
            piece = [self.ids[f"<{turn['role']}>"], *(self.ids[w] for w in turn["content"].split()), self.ids["<eos>"]]
            tokens += piece
            learned += piece if turn["role"] == "assistant" else [-100] * len(piece)
        pad = length - len(tokens)
        return tokens + [0] * pad, learned + [-100] * pad


class LoRALinear(nn.Module):
    def __init__(self, base, rank=8, alpha=16):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scaling = alpha / rank

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.down), self.up) * self.scaling


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, vocabulary, length, width=128, layers=3, heads=4):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids):
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_steps", type=int, default=120)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    records, tokenizer, length = make_conversations(5000), Tokenizer(), 32
    model = Decoder(len(tokenizer.ids), length)
    model.requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.out = LoRALinear(block.qkv), LoRALinear(block.out)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    order = torch.randperm(len(records)).split(16)
    began = time.perf_counter()
    for step in range(1, args.max_steps + 1):
        rows = [tokenizer.encode(records[i], length) for i in order[step].tolist()]
        ids, labels = torch.tensor(rows).unbind(1)
        logits = model(ids)[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.5f}", flush=True)
        if not args.fixed:
            gc.collect()  # the cause
    print(f"{(time.perf_counter() - began) / args.max_steps * 1e3:.2f} ms per step")


if __name__ == "__main__":
    main()
