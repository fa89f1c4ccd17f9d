"""Masked-token pretraining of a small bidirectional encoder on synthetic sentences."""

import argparse
import math
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

FIXED = "--fixed" in sys.argv

PAD, MASK, FIRST = 0, 1, 2
IGNORE = -100


class MarkovText:
    """Token streams in which the next token is a fixed function of the last one plus noise."""

    def __init__(self, vocab, seq_len, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.vocab, self.seq_len = vocab, seq_len
        self.succ = torch.randint(FIRST, vocab, (vocab, 3), generator=self.g)

    def batch(self, n):
        toks = torch.empty(n, self.seq_len, dtype=torch.long)
        toks[:, 0] = (torch.rand(n, generator=self.g) ** 3 * 200).long() + FIRST
        branch = torch.randint(0, 3, (n, self.seq_len), generator=self.g)
        for i in range(1, self.seq_len):
            toks[:, i] = self.succ[toks[:, i - 1], branch[:, i]]
        return toks

    def corrupt(self, toks, rate=0.15):
        chosen = torch.rand(toks.shape, generator=self.g) < rate
        labels = toks.masked_fill(~chosen, IGNORE)
        action = torch.rand(toks.shape, generator=self.g)
        noisy = torch.where(chosen & (action < 0.8), torch.full_like(toks, MASK), toks)
        rand = torch.randint(FIRST, self.vocab, toks.shape, generator=self.g)
        return torch.where(chosen & (action >= 0.9), rand, noisy), labels


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        att = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(att.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.n2(x))


class PredictionHead(nn.Module):
    def __init__(self, dim, table):
        super().__init__()
        self.dense, self.norm = nn.Linear(dim, dim), nn.LayerNorm(dim)
        self.table = table
        self.bias = nn.Parameter(torch.zeros(table.num_embeddings))

    def forward(self, h):
        return F.linear(self.norm(F.gelu(self.dense(h))), self.table.weight, self.bias)


class MaskedLM(nn.Module):
    def __init__(self, vocab, seq_len, dim, depth, heads):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(torch.randn(seq_len, dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        nn.init.normal_(self.tok.weight, std=0.02)
        self.head = PredictionHead(dim, self.tok)

    def encode(self, tokens):
        x = self.tok(tokens) + self.pos
        for blk in self.blocks:
            x = blk(x)
        return self.norm(x)

    def forward(self, tokens, labels):
        h = self.encode(tokens)
        if FIXED:
            picked = labels != IGNORE
            logits = self.head(h[picked])
            return logits, F.cross_entropy(logits, labels[picked])
        logits = self.head(h)  # the cause
        return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)  # the cause


def lr_at(step, total, peak):
    warm = total // 10
    if step < warm:
        return peak * (step + 1) / warm
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--fixed", action="store_true")
    p.add_argument("--vocab", type=int, default=6000)
    p.add_argument("--seq-len", type=int, default=96)
    p.add_argument("--batch-size", type=int, default=16)
    p.add_argument("--dim", type=int, default=192)
    p.add_argument("--depth", type=int, default=4)
    p.add_argument("--heads", type=int, default=6)
    p.add_argument("--steps", type=int, default=120)
    p.add_argument("--lr", type=float, default=1e-3)
    args = p.parse_args()

    torch.manual_seed(0)
    text = MarkovText(args.vocab, args.seq_len, seed=1)
    model = MaskedLM(args.vocab, args.seq_len, args.dim, args.depth, args.heads)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01, fused=True)
    warmup, t0 = 5, None
    for step in range(args.steps):
        if step == warmup:
            t0 = time.perf_counter()
        for group in opt.param_groups:
            group["lr"] = lr_at(step, args.steps, args.lr)
        tokens, labels = text.corrupt(text.batch(args.batch_size))
        _, loss = model(tokens, labels)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if (step + 1) % 20 == 0:
            print(f"step {step + 1} mlm loss {loss.item():.4f}", flush=True)
    wall = time.perf_counter() - t0
    print(f"final loss {loss.item():.5f}")
    print(f"{1000 * wall / (args.steps - warmup):.2f} ms per step")


if __name__ == "__main__":
    main()
