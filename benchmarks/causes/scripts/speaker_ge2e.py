"""Speaker encoder training with the generalized end-to-end (GE2E) objective.

Every batch holds N speakers with M utterances each. The encoder is an LSTM over
log-mel frames; the loss pulls an utterance to the centroid of its speaker.
"""

import argparse
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

FIXED = "--fixed" in sys.argv


class SyntheticVoices:
    """Speakers are random spectral envelopes, utterances are noisy modulations of them."""

    def __init__(self, num_speakers, n_mels, frames, seed):
        self.gen = torch.Generator().manual_seed(seed)
        self.frames = frames
        self.n_mels = n_mels
        self.envelopes = torch.randn(num_speakers, n_mels, generator=self.gen)

    def batch(self, n_speakers, n_utts):
        who = torch.randperm(self.envelopes.size(0), generator=self.gen)[:n_speakers]
        env = self.envelopes[who][:, None, None, :]
        shape = (n_speakers, n_utts, self.frames, self.n_mels)
        noise = torch.randn(shape, generator=self.gen)
        energy = torch.rand(n_speakers, n_utts, self.frames, 1, generator=self.gen)
        return (env * energy + 1.5 * noise).view(n_speakers * n_utts, self.frames, self.n_mels)


class SpeakerEncoder(nn.Module):
    def __init__(self, n_mels, hidden, proj):
        super().__init__()
        self.lstm = nn.LSTM(n_mels, hidden, num_layers=2, batch_first=True)
        self.proj = nn.Linear(hidden, proj)

    def forward(self, mels):
        _, (h, _) = self.lstm(mels)
        return F.normalize(self.proj(h[-1]), dim=-1)


class GE2ELoss(nn.Module):
    def __init__(self, init_w=10.0, init_b=-5.0):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(init_w))
        self.b = nn.Parameter(torch.tensor(init_b))

    def similarity(self, emb):
        n, m, _ = emb.shape
        centroids = emb.mean(dim=1)
        if FIXED:
            own = (emb.sum(dim=1, keepdim=True) - emb) / (m - 1)
            unit = F.normalize(emb, dim=-1)
            sim = unit @ F.normalize(centroids, dim=-1).t()
            own_sim = (unit * F.normalize(own, dim=-1)).sum(dim=-1, keepdim=True)
            mine = torch.eye(n, dtype=torch.bool)[:, None, :]
            return torch.where(mine, own_sim, sim) + 1e-6
        rows = []
        for spk in range(n):  # the cause
            for utt in range(m):  # the cause
                own = (emb[spk].sum(dim=0) - emb[spk, utt]) / (m - 1)  # the cause
                cands = torch.cat([centroids[:spk], own[None], centroids[spk + 1 :]])  # the cause
                rows.append(F.cosine_similarity(emb[spk, utt][None], cands, dim=-1) + 1e-6)  # the cause
        return torch.stack(rows).view(n, m, n)

    def forward(self, emb):
        n, m, _ = emb.shape
        sim = self.w.clamp(min=1e-6) * self.similarity(emb) + self.b
        target = torch.arange(n).repeat_interleave(m)
        return F.cross_entropy(sim.reshape(n * m, n), target)


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--fixed", action="store_true")
    p.add_argument("--speakers", type=int, default=24)
    p.add_argument("--utts", type=int, default=8)
    p.add_argument("--frames", type=int, default=36)
    p.add_argument("--n-mels", type=int, default=40)
    p.add_argument("--hidden", type=int, default=96)
    p.add_argument("--proj", type=int, default=96)
    p.add_argument("--steps", type=int, default=180)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--log-every", type=int, default=30)
    return p.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(7)
    voices = SyntheticVoices(400, args.n_mels, args.frames, seed=1)
    encoder = SpeakerEncoder(args.n_mels, args.hidden, args.proj)
    criterion = GE2ELoss()
    params = list(encoder.parameters()) + list(criterion.parameters())
    opt = torch.optim.Adam(params, lr=args.lr)

    warmup, t0 = 5, None
    for step in range(args.steps):
        if step == warmup:
            t0 = time.perf_counter()
        mels = voices.batch(args.speakers, args.utts)
        emb = encoder(mels).view(args.speakers, args.utts, -1)
        loss = criterion(emb)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 3.0)
        opt.step()
        if (step + 1) % args.log_every == 0:
            print(f"step {step + 1} ge2e {loss.item():.4f}", flush=True)
    wall = time.perf_counter() - t0
    print(f"final loss {loss.item():.5f}")
    print(f"{1000 * wall / (args.steps - warmup):.2f} ms per step")


if __name__ == "__main__":
    main()
