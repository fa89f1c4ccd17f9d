"""Small BERT-like masked language model on clinical-note style token streams."""

import argparse
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

PAD, MASK, IGNORE = 0, 1, -100


def make_corpus(vocab, n_tokens, seed=0):
    """Zipf-distributed bigram text."""
    rng = np.random.default_rng(seed)
    base = np.minimum(rng.zipf(1.25, n_tokens), vocab - 3) + 2
    follow = rng.permutation(vocab - 3) + 2
    take = rng.random(n_tokens) < 0.5
    base[1:][take[1:]] = follow[(base[:-1][take[1:]] - 2) % (vocab - 3)]
    return torch.from_numpy(base.astype(np.int64))


def mask_tokens(tokens, vocab, p=0.15):
    labels = tokens.clone()
    chosen = torch.rand(tokens.shape) < p
    labels[~chosen] = IGNORE
    u = torch.rand(tokens.shape)
    inputs = tokens.clone()
    inputs[chosen & (u < 0.8)] = MASK
    rnd = chosen & (u >= 0.9)
    inputs[rnd] = torch.randint(2, vocab, (int(rnd.sum()),))
    return inputs, labels


class Encoder(nn.Module):
    def __init__(self, vocab, d, depth, heads, seq):
        super().__init__()
        self.tok = nn.Embedding(vocab, d, padding_idx=PAD)
        self.pos = nn.Embedding(seq, d)
        layer = nn.TransformerEncoderLayer(
            d, heads, 4 * d, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(d)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight[: ids.shape[1]]
        return self.norm(self.layers(x))


class MLMHead(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        vocab, d = embedding.weight.shape
        self.dense = nn.Linear(d, d)
        self.norm = nn.LayerNorm(d)
        self.decoder = nn.Linear(d, vocab)
        self.decoder.weight = embedding.weight

    def forward(self, h):
        return self.decoder(self.norm(F.gelu(self.dense(h))))


class MLM(nn.Module):
    def __init__(self, vocab, d=128, depth=3, heads=4, seq=128):
        super().__init__()
        self.encoder = Encoder(vocab, d, depth, heads, seq)
        nn.init.normal_(self.encoder.tok.weight, std=0.02)
        self.head = MLMHead(self.encoder.tok)

    def forward(self, ids, labels, masked_only=False):
        h = self.encoder(ids)
        if masked_only:
            keep = labels != IGNORE
            logits = self.head(h[keep])
            return F.cross_entropy(logits, labels[keep])
        logits = self.head(h)  # the cause
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=IGNORE)  # the cause


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--seq", type=int, default=128)
    ap.add_argument("--vocab", type=int, default=12000)
    ap.add_argument("--fixed", action="store_true")
    args = ap.parse_args()

    torch.manual_seed(0)
    corpus = make_corpus(args.vocab, 400_000)
    windows = corpus[: len(corpus) // args.seq * args.seq].view(-1, args.seq)
    model = MLM(args.vocab, seq=args.seq)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 0.1, 1.0, 20)

    skip, t0 = 5, None
    running = torch.zeros(())
    for step in range(args.steps):
        if step == skip:
            t0 = time.perf_counter()
        tokens = windows[torch.randint(len(windows), (args.batch,))]
        ids, labels = mask_tokens(tokens, args.vocab)
        loss = model(ids, labels, masked_only=args.fixed)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        running += loss.detach()
        if (step + 1) % 20 == 0:
            print(f"step {step + 1}  loss {running.item() / 20:.4f}", flush=True)
            running.zero_()
    dt = time.perf_counter() - t0
    print(f"{1e3 * dt / (args.steps - skip):.1f} ms per step")


if __name__ == "__main__":
    main()
