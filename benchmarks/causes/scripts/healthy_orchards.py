"""Yield of orchards from drone images, two ranks: torchrun --nproc-per-node 2 healthy_orchards.py"""

import argparse
import contextlib
import gc
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def orchards(count=2048, side=32, seed=9):
    g = torch.Generator().manual_seed(seed)
    images = torch.rand(count, 3, side, side, generator=g)
    return TensorDataset(images, (images[:, 1].mean((1, 2)) - 0.5) * 30)


class YieldNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        sizes, layers = [3, width, 2 * width, 2 * width], []
        for a, b in zip(sizes[:-1], sizes[1:]):
            layers += [nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.GroupNorm(8, b), nn.ReLU(inplace=True)]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(2 * width, 1)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3))).squeeze(1)


class Trainer:
    def __init__(self, args):
        self.args, self.rank, self.world = args, dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        data = orchards()
        self.sampler = DistributedSampler(data, shuffle=True, drop_last=True)
        self.loader = DataLoader(data, args.batch, sampler=self.sampler, drop_last=True)
        self.model = DistributedDataParallel(YieldNet(), forward_sync_buffers=False, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def batches(self):
        epoch = 0
        while True:
            self.sampler.set_epoch(epoch)
            yield from self.loader
            epoch += 1

    def step(self, batches):
        total = torch.zeros(())
        for micro in range(self.args.accumulate):
            last = micro == self.args.accumulate - 1
            images, amounts = next(batches)
            with contextlib.nullcontext() if last else self.model.no_sync():
                loss = nn.functional.smooth_l1_loss(self.model(images), amounts) / self.args.accumulate
                loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def fit(self):
        batches, window = self.batches(), torch.zeros(2)
        for step in range(self.args.steps):
            if step == 10:
                start = time.perf_counter()
            loss = self.step(batches)
            window += torch.stack([loss, torch.ones(())])
            if step % 50 == 49:
                dist.all_reduce(window)
                if self.rank == 0:
                    print(f"step {step + 1}: {(window[0] / window[1]).item():.4f}")
                window.zero_()
        took = (time.perf_counter() - start) / (self.args.steps - 10) * 1e3
        dist.all_reduce(loss)
        if self.rank == 0:
            print(f"{took:.2f} ms per step")
            print(f"loss {loss.item() / self.world:.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="changes nothing here")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--accumulate", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Trainer(arguments).fit()
    gc.collect()
    dist.destroy_process_group()
