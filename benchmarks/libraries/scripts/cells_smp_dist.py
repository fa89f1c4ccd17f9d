"""Segmentation of cell images on two ranks (segmentation-models-pytorch, gloo).

Run: torchrun --nproc-per-node 2 cells_smp_dist.py
"""
import os
import time

import segmentation_models_pytorch as smp
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

SIZE = 64
BATCH = 2
EPOCHS = 2
COUNT = 240
WARMUP = 5


class CellDataset(Dataset):
    """Bright blobs on a noisy background with their mask."""

    def __init__(self, count):
        gen = torch.Generator().manual_seed(10)
        axis = torch.arange(SIZE).float()
        yy, xx = torch.meshgrid(axis, axis, indexing="ij")
        self.images = 0.2 * torch.rand(count, 3, SIZE, SIZE, generator=gen)
        self.masks = torch.zeros(count, 1, SIZE, SIZE)
        for index in range(count):
            for _ in range(5):
                cy, cx, r = torch.rand(3, generator=gen) * torch.tensor([SIZE, SIZE, 6.0]) + torch.tensor([0, 0, 4.0])
                inside = (yy - cy) ** 2 + (xx - cx) ** 2 < r**2
                self.images[index, :, inside] += 0.5
                self.masks[index, 0, inside] = 1

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.masks[index]


def broadcast_model(model):
    """Start from the same weights everywhere."""
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
            param.grad /= size


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)

    dataset = CellDataset(COUNT)
    sampler = DistributedSampler(dataset, shuffle=True, seed=1)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, drop_last=True)
    model = smp.Unet("timm-mobilenetv3_small_100", encoder_weights=None, decoder_channels=(64, 32, 16, 16, 8), classes=1)
    broadcast_model(model)
    dice = smp.losses.DiceLoss(mode="binary")
    bce = smp.losses.SoftBCEWithLogitsLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    marks = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros(())
        for image, mask in loader:
            logits = model(image)
            loss = dice(logits, mask) + bce(logits, mask)
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model)
            optimizer.step()
            total += loss.detach()
            marks.append(time.perf_counter())
        dist.all_reduce(total)
        mean = total.item() / (len(loader) * dist.get_world_size())
        if rank == 0:
            print(f"epoch {epoch}: loss {mean:.4f}")

    if rank == 0:
        steps = torch.tensor(marks, dtype=torch.float64).diff()[WARMUP:]
        print(f"final loss {mean:.4f}")
        print(f"{1000 * steps.mean().item():.1f} ms per step (pid {os.getpid()})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
