"""FT-Transformer on a mixed tabular data set (hospital readmission style)."""

import argparse
import time

import numpy as np
import pandas as pd
import torch
import torch.nn as nn
import torch.nn.functional as F


def make_table(n, seed=0):
    rng = np.random.default_rng(seed)
    num = {f"lab_{i}": rng.normal(0, 1, n).astype(np.float32) for i in range(14)}
    cat = {f"code_{i}": rng.integers(0, card, n) for i, card in enumerate((2, 3, 5, 8, 12, 20, 40, 80))}
    df = pd.DataFrame({**num, **cat})
    score = (
        df["lab_0"] * df["lab_1"]
        + np.sin(2 * df["lab_2"])
        + 0.8 * (df["code_5"] % 3 == 0)
        - 0.5 * (df["code_7"] % 5 == 1)
        + 0.3 * df["lab_3"]
    )
    df["readmitted"] = (score + rng.logistic(0, 0.5, n) > 0.3).astype(np.float32)
    return df


class FTTransformer(nn.Module):
    def __init__(self, n_num, cards, d=64, depth=3, heads=4):
        super().__init__()
        self.w = nn.Parameter(torch.randn(n_num, d) * 0.1)
        self.b = nn.Parameter(torch.zeros(n_num, d))
        offsets = torch.tensor([0, *np.cumsum(cards)[:-1].tolist()])
        self.register_buffer("offsets", offsets)
        self.emb = nn.Embedding(sum(cards), d)
        nn.init.normal_(self.emb.weight, std=0.1)
        self.cls = nn.Parameter(torch.zeros(1, 1, d))
        layer = nn.TransformerEncoderLayer(
            d, heads, 2 * d, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(d), nn.ReLU(), nn.Linear(d, 1))

    def forward(self, num, cat):
        tokens = torch.cat(
            [self.cls.expand(len(num), -1, -1), num[:, :, None] * self.w + self.b, self.emb(cat + self.offsets)], 1
        )
        return self.head(self.blocks(tokens)[:, 0]).squeeze(1)


def auc(score, y):
    rank = torch.empty_like(score)
    rank[score.argsort()] = torch.arange(1, len(score) + 1, dtype=score.dtype)
    pos = y.sum()
    return ((rank[y > 0].sum() - pos * (pos + 1) / 2) / (pos * (len(y) - pos))).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch", type=int, default=256)
    ap.add_argument("--fixed", action="store_true", help="kept for the job template, no effect")
    args = ap.parse_args()

    torch.manual_seed(0)
    df = make_table(14_000)
    num_cols = [c for c in df if c.startswith("lab")]
    cat_cols = [c for c in df if c.startswith("code")]
    num = torch.tensor(df[num_cols].to_numpy(np.float32))
    cat = torch.tensor(df[cat_cols].to_numpy(np.int64))
    y = torch.tensor(df["readmitted"].to_numpy(np.float32))
    n_train = 12_000
    model = FTTransformer(len(num_cols), [int(df[c].max()) + 1 for c in cat_cols])
    decay = [p for p in model.parameters() if p.ndim > 1]
    other = [p for p in model.parameters() if p.ndim <= 1]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 1e-2}, {"params": other, "weight_decay": 0.0}], lr=1e-3)
    best, best_state = 0.0, None

    train_time = steps = 0
    for epoch in range(args.epochs):
        t0 = time.perf_counter()
        total = torch.zeros(())
        for idx in torch.randperm(n_train).split(args.batch):
            loss = F.binary_cross_entropy_with_logits(model(num[idx], cat[idx]), y[idx])
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            total += loss.detach() * len(idx)
            steps += 1
        train_time += time.perf_counter() - t0
        model.eval()
        with torch.inference_mode():
            score = torch.cat([model(a, b) for a, b in zip(num[n_train:].split(1000), cat[n_train:].split(1000))])
        model.train()
        val = auc(score, y[n_train:])
        if val > best:
            best, best_state = val, {k: v.clone() for k, v in model.state_dict().items()}
        print(f"epoch {epoch}  loss {total.item() / n_train:.4f}  val AUC {val:.4f}", flush=True)
    torch.save(best_state, "/tmp/readmission_ft.pt")
    print(f"best AUC {best:.4f}")
    print(f"{1e3 * train_time / steps:.1f} ms per step")


if __name__ == "__main__":
    main()
