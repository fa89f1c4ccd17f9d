"""Word-level LSTM language model on a generated novel."""

import argparse
import os
import sys
import tempfile
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

START = time.perf_counter()
FIXED = "--fixed" in sys.argv

EOS = "<eos>"


def write_novel(path, words, vocab, line_len, seed):
    rng = np.random.default_rng(seed)
    names = np.array([f"w{i}" for i in range(vocab)], dtype=object)
    zipf = 1.0 / np.arange(1, vocab + 1)
    stream = names[rng.choice(vocab, words, p=zipf / zipf.sum())]
    with open(path, "w") as fh:
        for i in range(0, words, line_len):
            fh.write(" ".join(stream[i : i + line_len]) + "\n")


class Corpus:
    def __init__(self, folder):
        self.vocab = {}
        self.train = self.read(os.path.join(folder, "train.txt"))
        self.valid = self.read(os.path.join(folder, "valid.txt"))

    def read(self, path):
        total = 0
        with open(path) as fh:
            for line in fh:
                words = [*line.split(), EOS]
                total += len(words)
                for word in words:
                    if word not in self.vocab:
                        self.vocab[word] = len(self.vocab)
        return self.encode(path, total)

    def encode(self, path, total):
        ids = [0] * total if FIXED else torch.empty(total, dtype=torch.long)
        pos = 0
        with open(path) as fh:
            for line in fh:
                for word in [*line.split(), EOS]:
                    ids[pos] = self.vocab[word]  # the cause
                    pos += 1
        return torch.as_tensor(ids)


def batchify(ids, batch_size):
    steps = ids.numel() // batch_size
    return ids[: steps * batch_size].view(batch_size, steps).t().contiguous()


class WordLSTM(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.LSTM(dim, dim, num_layers=1)
        self.out = nn.Linear(dim, vocab)
        self.out.weight = self.embed.weight
        nn.init.uniform_(self.embed.weight, -0.1, 0.1)
        nn.init.zeros_(self.out.bias)

    def forward(self, x, state=None):
        h, state = self.rnn(self.embed(x), state)
        return self.out(h), state


@torch.inference_mode()
def evaluate(model, data, bptt, max_windows):
    model.eval()
    state, losses = None, []
    for i in range(0, min(data.size(0) - 1 - bptt, bptt * max_windows), bptt):
        logits, state = model(data[i : i + bptt], state)
        losses.append(F.cross_entropy(logits.flatten(0, 1), data[i + 1 : i + 1 + bptt].flatten()))
    model.train()
    return torch.stack(losses).mean().item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--fixed", action="store_true")
    p.add_argument("--words", type=int, default=6_000_000)
    p.add_argument("--vocab", type=int, default=3000)
    p.add_argument("--dim", type=int, default=160)
    p.add_argument("--batch-size", type=int, default=24)
    p.add_argument("--bptt", type=int, default=32)
    p.add_argument("--steps", type=int, default=220)
    args = p.parse_args()

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        write_novel(os.path.join(folder, "train.txt"), args.words, args.vocab, 18, seed=1)
        write_novel(os.path.join(folder, "valid.txt"), args.words // 40, args.vocab, 18, seed=2)
        corpus = Corpus(folder)
    print(f"{corpus.train.numel()} training tokens, {len(corpus.vocab)} words", flush=True)
    train, valid = batchify(corpus.train, args.batch_size), batchify(corpus.valid, args.batch_size)
    model = WordLSTM(len(corpus.vocab), args.dim)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)

    state = None
    for step in range(args.steps):
        i = step * args.bptt
        logits, state = model(train[i : i + args.bptt], state)
        state = tuple(s.detach() for s in state)
        loss = F.cross_entropy(logits.flatten(0, 1), train[i + 1 : i + 1 + args.bptt].flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        if (step + 1) % 50 == 0:
            print(
                f"step {step + 1} loss {loss.item():.4f} valid {evaluate(model, valid, args.bptt, 10):.4f}", flush=True
            )
    wall = time.perf_counter() - START
    print(f"final loss {loss.item():.5f}")
    print(f"{1000 * wall / args.steps:.2f} ms per step")


if __name__ == "__main__":
    main()
