"""Land-cover segmentation on in-memory aerial tiles with a small U-Net."""

import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

N_CLASSES = 5


def make_tiles(n, seed):
    g = torch.Generator().manual_seed(seed)
    fields = F.interpolate(torch.randn(n, N_CLASSES, 8, 8, generator=g), size=64, mode="bilinear")
    mask = fields.argmax(1)
    palette = torch.tensor([[60, 90, 40], [150, 140, 110], [40, 60, 120], [110, 160, 70], [170, 170, 170.0]])
    img = palette[mask].permute(0, 3, 1, 2) + 25 * torch.randn(n, 3, 64, 64, generator=g)
    return img.clamp(0, 255).to(torch.uint8), mask.to(torch.uint8)


def conv(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self, c=24):
        super().__init__()
        self.e1 = nn.Sequential(conv(3, c), conv(c, c))
        self.e2 = nn.Sequential(conv(c, 2 * c), conv(2 * c, 2 * c))
        self.e3 = nn.Sequential(conv(2 * c, 4 * c), conv(4 * c, 4 * c))
        self.d2 = conv(6 * c, 2 * c)
        self.d1 = conv(3 * c, c)
        self.out = nn.Conv2d(c, N_CLASSES, 1)

    def forward(self, x):
        a = self.e1(x)
        b = self.e2(F.max_pool2d(a, 2))
        h = self.e3(F.max_pool2d(b, 2))
        h = self.d2(torch.cat([F.interpolate(h, scale_factor=2.0), b], 1))
        h = self.d1(torch.cat([F.interpolate(h, scale_factor=2.0), a], 1))
        return self.out(h)


MEAN = torch.tensor([106.0, 124.0, 104.0]).view(1, 3, 1, 1)


def to_input(img):
    return ((img.float() - MEAN) / 60.0).contiguous(memory_format=torch.channels_last)


def augment(img, mask):
    if torch.rand(()) < 0.5:
        img, mask = img.flip(-1), mask.flip(-1)
    if torch.rand(()) < 0.5:
        img, mask = img.flip(-2), mask.flip(-2)
    return img, mask


@torch.inference_mode()
def evaluate(model, img, mask, batch):
    model.eval()
    confusion = torch.zeros(N_CLASSES * N_CLASSES, dtype=torch.long)
    for x, y in zip(img.split(batch), mask.split(batch)):
        pred = model(to_input(x)).argmax(1)
        confusion += torch.bincount((y.long() * N_CLASSES + pred).flatten(), minlength=N_CLASSES**2)
    model.train()
    c = confusion.view(N_CLASSES, N_CLASSES).double()
    return (c.diag() / (c.sum(0) + c.sum(1) - c.diag()).clamp(min=1)).mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--fixed", action="store_true", help="kept for the job template, no effect")
    args = ap.parse_args()

    torch.manual_seed(0)
    img, mask = make_tiles(400, seed=1)
    img_val, mask_val = make_tiles(64, seed=2)
    model = UNet().to(memory_format=torch.channels_last)
    steps_per_epoch = len(img) // args.batch
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 4e-3, total_steps=args.epochs * steps_per_epoch)

    train_time = 0.0
    for epoch in range(args.epochs):
        t0 = time.perf_counter()
        total = torch.zeros(())
        order = torch.randperm(len(img))
        for b in range(steps_per_epoch):
            idx = order[b * args.batch : (b + 1) * args.batch]
            x, y = augment(img[idx], mask[idx])
            loss = F.cross_entropy(model(to_input(x)), y.long())
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
            total += loss.detach()
        train_time += time.perf_counter() - t0
        miou = evaluate(model, img_val, mask_val, 32)
        print(f"epoch {epoch}  loss {total.item() / steps_per_epoch:.4f}  val mIoU {miou:.3f}", flush=True)
    torch.save(model.state_dict(), "/tmp/tile_segmentation.pt")
    print(f"{1e3 * train_time / (args.epochs * steps_per_epoch):.1f} ms per step")


if __name__ == "__main__":
    main()
