"""An autoencoder on shards that the workers share out, with accumulated gradients and an average of the weights.

Nothing is known to be wrong with it.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Shards(IterableDataset):
    """Spectra of an instrument, a file of a thousand each; every worker reads its own files."""

    def __init__(self, files, seed=0):
        self.files, self.seed = files, seed

    def __iter__(self):
        worker = get_worker_info()
        files = self.files[worker.id :: worker.num_workers] if worker else self.files
        rng = np.random.default_rng([self.seed, worker.id if worker else 0])
        while True:
            for number in rng.permutation(len(files)):
                shard = np.load(files[number])
                for batch in np.array_split(rng.permutation(len(shard)), len(shard) // 64):
                    yield torch.from_numpy(shard[batch])


def write_shards(folder, count=6):
    files = []
    for n in range(count):
        peaks = np.random.default_rng(n).standard_normal((1_024, 16), np.float32)
        waves = np.sin(np.outer(np.arange(1, 17), np.linspace(0, 6, 512))).astype(np.float32)
        files.append(folder / f"shard_{n:03}.npy")
        np.save(files[-1], peaks @ waves)
    return files


class Autoencoder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv1d(1, width, 9, 4, 4), nn.GELU(), nn.Conv1d(width, 2 * width, 9, 4, 4), nn.GELU()
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose1d(2 * width, width, 8, 4, 2), nn.GELU(), nn.ConvTranspose1d(width, 1, 8, 4, 2)
        )

    def forward(self, x):
        return self.decoder(self.encoder(x[:, None])).squeeze(1)


def train(args, files):
    loader = DataLoader(Shards(files), batch_size=None, num_workers=args.workers)
    model = Autoencoder()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = iter(loader)
    began = 0.0
    for step in range(args.steps):
        if step == 10:
            began = time.perf_counter()
        optimizer.zero_grad()
        for _ in range(args.accumulate):
            x = next(batches)
            loss = nn.functional.mse_loss(model(x), x) / args.accumulate
            loss.backward()
        optimizer.step()
        if step % 5 == 0:
            average.update_parameters(model)
    return (time.perf_counter() - began) / (args.steps - 10) * 1e3


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the worker has the other core
    with tempfile.TemporaryDirectory() as name:
        print(f"STEP_MS {train(parser.parse_args(), write_shards(Path(name))):.3f}")
