"""Product-tag prediction from bag-of-words, data parallel with accelerate.

torchrun --nproc-per-node 2 tags_accelerate.py
"""
import time

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

TAGS = 200
FEATURES = 2048
HIDDEN = 1536
ACCUMULATION = 8
MICRO_BATCH = 16
MICRO_STEPS = 160
WARMUP = 8


class TagNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.GELU(), nn.LayerNorm(HIDDEN),
                                  nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.LayerNorm(HIDDEN))
        self.head = nn.Linear(HIDDEN, TAGS)

    def forward(self, words):
        return self.head(self.body(words))


def make_products(n, seed=0):
    gen = torch.Generator().manual_seed(seed)
    words = (torch.rand(n, FEATURES, generator=gen) < 0.02).float()
    tags = (words @ torch.randn(FEATURES, TAGS, generator=gen) > 8).float()
    return TensorDataset(words, tags)


def main():
    set_seed(9)
    accelerator = Accelerator(cpu=True)
    dataset = make_products(MICRO_STEPS * MICRO_BATCH * accelerator.num_processes)
    loader = DataLoader(dataset, batch_size=MICRO_BATCH, shuffle=True)
    model = TagNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    model.train()
    for step, (words, tags) in enumerate(loader):
        if step == WARMUP:
            start = time.perf_counter()
        loss = F.binary_cross_entropy_with_logits(model(words), tags)
        accelerator.backward(loss / ACCUMULATION)
        if (step + 1) % ACCUMULATION == 0:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if step % 40 == 0:
            accelerator.print(f"micro step {step} loss {loss.item():.5f}")
    elapsed = time.perf_counter() - start
    accelerator.print(f"final loss {loss.item():.5f}")
    accelerator.print(f"{elapsed / (MICRO_STEPS - WARMUP) * 1000:.1f} ms per step")
    accelerator.end_training()


if __name__ == "__main__":
    main()
