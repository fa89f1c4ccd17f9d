"""Frame-level phone recogniser on synthetic read speech (log-mel -> TDNN)."""

import argparse
import time

import numpy as np
import torch
import torch.nn as nn

N_PHONES, N_MELS = 40, 64


def make_corpus(n_utt, seed):
    rng = np.random.default_rng(seed)
    spectra = np.random.default_rng(1).normal(0, 1.0, (N_PHONES, N_MELS)).astype(np.float32)
    feats, labels = [], []
    for _ in range(n_utt):
        dur = rng.integers(3, 9, 110)
        ph = rng.integers(0, N_PHONES, 110)
        y = np.repeat(ph, dur)[:480]
        x = spectra[y] + rng.normal(0, 1.6, (len(y), N_MELS)).astype(np.float32)
        feats.append(x)
        labels.append(y)
    return torch.from_numpy(np.stack(feats)), torch.from_numpy(np.stack(labels))


class Recogniser(nn.Module):
    def __init__(self, h=80):
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv1d(N_MELS, h, 5, padding=2),
            nn.BatchNorm1d(h),
            nn.ReLU(),
            nn.Conv1d(h, h, 5, padding=2),
            nn.BatchNorm1d(h),
            nn.ReLU(),
            nn.Conv1d(h, h, 5, padding=2),
            nn.BatchNorm1d(h),
            nn.ReLU(),
        )
        self.context = nn.Sequential(
            nn.Conv1d(h, h, 5, padding=4, dilation=2),
            nn.ReLU(),
            nn.Conv1d(h, N_PHONES, 1),
        )

    def forward(self, x):
        return self.context(self.front(x.transpose(1, 2))).transpose(1, 2)


def collapse(seq):
    out = [seq[0]]
    for s in seq[1:]:
        if s != out[-1]:
            out.append(s)
    return out


def edit_distance(a, b):
    prev = list(range(len(b) + 1))
    for i, ca in enumerate(a, 1):
        cur = [i]
        for j, cb in enumerate(b, 1):
            cur.append(min(prev[j] + 1, cur[j - 1] + 1, prev[j - 1] + (ca != cb)))  # the cause
        prev = cur
    return prev[-1]


def phone_error_rate(logits, labels):
    hyps = logits.argmax(-1).tolist()
    errors = total = 0
    for hyp, ref in zip(hyps, labels.tolist()):
        ref = collapse(ref)
        errors += edit_distance(collapse(hyp), ref)  # the cause
        total += len(ref)
    return errors / total


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=80)
    ap.add_argument("--batch", type=int, default=24)
    ap.add_argument("--log-every", type=int, default=20)
    ap.add_argument("--fixed", action="store_true")
    args = ap.parse_args()

    torch.manual_seed(0)
    x_train, y_train = make_corpus(480, seed=10)
    x_dev, y_dev = make_corpus(24, seed=11)
    model = Recogniser()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()

    per_avg = None
    skip, t0 = 5, None
    model.train()
    for step in range(args.steps):
        if step == skip:
            t0 = time.perf_counter()
        idx = torch.randint(len(x_train), (args.batch,))
        x, y = x_train[idx], y_train[idx]
        logits = model(x)
        loss = criterion(logits.flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()

        if args.fixed:
            if step % args.log_every == 0:
                per = phone_error_rate(logits.detach(), y)
                per_avg = per if per_avg is None else 0.9 * per_avg + 0.1 * per
        else:
            per = phone_error_rate(logits.detach(), y)  # the cause
            per_avg = per if per_avg is None else 0.9 * per_avg + 0.1 * per
        if step % args.log_every == 0:
            print(f"step {step:4d}  loss {loss.item():.4f}  train PER {100 * per_avg:.1f}%", flush=True)
    dt = time.perf_counter() - t0

    model.eval()
    with torch.inference_mode():
        print(f"final loss {loss.item():.4f}  dev PER {100 * phone_error_rate(model(x_dev), y_dev):.1f}%")
    print(f"{1e3 * dt / (args.steps - skip):.1f} ms per step")


if __name__ == "__main__":
    main()
