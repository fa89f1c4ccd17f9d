"""Click-through-rate model (wide & deep) on a synthetic impression log."""

import argparse
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

FIXED = "--fixed" in sys.argv


class ImpressionLog(Dataset):
    def __init__(self, n_rows, n_fields, vocab, n_dense, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.cats = (torch.rand(n_rows, n_fields, generator=g) ** 2 * vocab).long()
        self.dense = torch.randn(n_rows, n_dense, generator=g)
        effect = torch.randn(n_fields, vocab, generator=g) * 0.4
        score = effect.gather(1, self.cats.t()).sum(0) + 0.5 * self.dense[:, 0] - 1.0
        self.clicks = (torch.rand(n_rows, generator=g) < score.sigmoid()).float()

    def __len__(self):
        return self.clicks.size(0)

    def __getitem__(self, idx):
        return self.cats[idx], self.dense[idx], self.clicks[idx]


class WideDeep(nn.Module):
    def __init__(self, n_fields, vocab, n_dense, dim, hidden):
        super().__init__()
        self.register_buffer("offset", torch.arange(n_fields) * vocab)
        self.table = nn.Embedding(n_fields * vocab, dim)
        self.wide = nn.Embedding(n_fields * vocab, 1)
        nn.init.normal_(self.table.weight, std=0.05)
        nn.init.zeros_(self.wide.weight)
        self.deep = nn.Sequential(
            nn.Linear(n_fields * dim + n_dense, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden // 2),
            nn.ReLU(),
            nn.Linear(hidden // 2, 1),
        )

    def forward(self, cats, dense):
        ids = cats + self.offset
        deep_in = torch.cat([self.table(ids).flatten(1), dense], dim=1)
        return self.deep(deep_in).squeeze(1) + self.wide(ids).sum(dim=(1, 2))


def make_loader(data, batch_size, generator):
    order = RandomSampler(data, generator=generator)
    if FIXED:
        return DataLoader(data, sampler=BatchSampler(order, batch_size, drop_last=True), batch_size=None)
    return DataLoader(data, batch_size=batch_size, sampler=order, drop_last=True)  # the cause


@torch.inference_mode()
def holdout_logloss(model, data):
    model.eval()
    out = F.binary_cross_entropy_with_logits(model(data.cats, data.dense), data.clicks)
    model.train()
    return out.item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--fixed", action="store_true")
    p.add_argument("--rows", type=int, default=160_000)
    p.add_argument("--fields", type=int, default=16)
    p.add_argument("--vocab", type=int, default=500)
    p.add_argument("--dense", type=int, default=8)
    p.add_argument("--dim", type=int, default=16)
    p.add_argument("--hidden", type=int, default=384)
    p.add_argument("--batch-size", type=int, default=2048)
    p.add_argument("--epochs", type=int, default=10)
    args = p.parse_args()

    torch.manual_seed(0)
    train = ImpressionLog(args.rows, args.fields, args.vocab, args.dense)
    valid = ImpressionLog(8192, args.fields, args.vocab, args.dense)
    model = WideDeep(args.fields, args.vocab, args.dense, args.dim, args.hidden)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    loader = make_loader(train, args.batch_size, torch.Generator().manual_seed(9))

    step, warmup, t0 = 0, 5, None
    for epoch in range(args.epochs):
        total = 0.0
        for cats, dense, clicks in loader:
            if step == warmup:
                t0 = time.perf_counter()
            loss = F.binary_cross_entropy_with_logits(model(cats, dense), clicks)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            total += loss.item()
            step += 1
        print(f"epoch {epoch} train {total / len(loader):.4f} valid {holdout_logloss(model, valid):.4f}", flush=True)
    wall = time.perf_counter() - t0
    print(f"final loss {total / len(loader):.6f}")
    print(f"{1000 * wall / (step - warmup):.2f} ms per step")


if __name__ == "__main__":
    main()
