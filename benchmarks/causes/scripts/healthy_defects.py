"""Surface-defect segmentation with a small U-Net on generated steel textures."""

import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class SteelSheets:
    """Images and masks live in memory as uint8; augmentation is applied to whole batches."""

    def __init__(self, count, size, seed):
        g = torch.Generator().manual_seed(seed)
        yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        cx, cy = torch.randint(8, size - 8, (2, count, 1, 1), generator=g)
        radius = torch.randint(3, 9, (count, 1, 1), generator=g)
        self.masks = ((xx - cx) ** 2 + (yy - cy) ** 2 < radius**2).to(torch.uint8)
        grain = torch.randint(60, 160, (count, size, size), generator=g)
        self.images = (grain + 60 * self.masks.long()).clamp_(0, 255).to(torch.uint8)

    def epoch(self, batch_size, gen):
        order = torch.randperm(self.images.size(0), generator=gen)
        for idx in order.split(batch_size):
            if idx.numel() < batch_size:
                return
            x = self.images[idx].unsqueeze(1).float().div_(127.5).sub_(1.0)
            y = self.masks[idx].unsqueeze(1).float()
            if torch.rand((), generator=gen) < 0.5:
                x, y = x.flip(-1), y.flip(-1)
            yield x, y


def double_conv(cin, cout):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, padding=1, bias=False),
        nn.BatchNorm2d(cout),
        nn.ReLU(inplace=True),
        nn.Conv2d(cout, cout, 3, padding=1, bias=False),
        nn.BatchNorm2d(cout),
        nn.ReLU(inplace=True),
    )


class SmallUNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.enc1 = double_conv(1, width)
        self.enc2 = double_conv(width, 2 * width)
        self.enc3 = double_conv(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.dec2 = double_conv(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.dec1 = double_conv(2 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        a = self.enc1(x)
        b = self.enc2(F.max_pool2d(a, 2))
        c = self.enc3(F.max_pool2d(b, 2))
        d = self.dec2(torch.cat([self.up2(c), b], dim=1))
        return self.out(self.dec1(torch.cat([self.up1(d), a], dim=1)))


def segmentation_loss(logits, y):
    prob = logits.sigmoid()
    inter = (prob * y).sum(dim=(1, 2, 3))
    dice = 1 - (2 * inter + 1) / (prob.sum(dim=(1, 2, 3)) + y.sum(dim=(1, 2, 3)) + 1)
    return F.binary_cross_entropy_with_logits(logits, y) + dice.mean()


@torch.inference_mode()
def iou(model, data, batch_size):
    model.eval()
    inter = union = torch.zeros(())
    for idx in torch.arange(data.images.size(0)).split(batch_size):
        x = data.images[idx].unsqueeze(1).float().div_(127.5).sub_(1.0)
        hit = model(x) > 0
        y = data.masks[idx].unsqueeze(1).bool()
        inter = inter + (hit & y).sum()
        union = union + (hit | y).sum()
    model.train()
    return (inter / union.clamp(min=1)).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--images", type=int, default=1600)
    p.add_argument("--size", type=int, default=64)
    p.add_argument("--width", type=int, default=16)
    p.add_argument("--batch-size", type=int, default=16)
    p.add_argument("--epochs", type=int, default=3)
    args = p.parse_args()

    torch.manual_seed(0)
    gen = torch.Generator().manual_seed(1)
    train, valid = SteelSheets(args.images, args.size, 2), SteelSheets(64, args.size, 3)
    model = SmallUNet(args.width)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    step, warmup, t0 = 0, 5, None
    for epoch in range(args.epochs):
        total, batches = torch.zeros(()), 0
        for x, y in train.epoch(args.batch_size, gen):
            if step == warmup:
                t0 = time.perf_counter()
            loss = segmentation_loss(model(x), y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            total += loss.detach()
            batches += 1
            step += 1
        print(f"epoch {epoch} loss {total.item() / batches:.4f} iou {iou(model, valid, 32):.3f}", flush=True)
    wall = time.perf_counter() - t0
    print(f"final loss {total.item() / batches:.5f}")
    print(f"{1000 * wall / (step - warmup):.2f} ms per step")


if __name__ == "__main__":
    main()
