"""A diffusion model: a U-Net learns the noise, which is drawn on the CPU. --fixed: drawn on the GPU."""

import torch
import torch.nn.functional as F
from clock import Clock, options
from torch import Tensor, nn

args = options(steps=70)
width, batch, size = (16, 2, 16) if args.tiny else (96, 64, 64)


class Residual(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, into), nn.SiLU(), nn.Conv2d(into, out, 3, padding=1))
        self.second = nn.Sequential(nn.GroupNorm(8, out), nn.SiLU(), nn.Conv2d(out, out, 3, padding=1))
        self.time, self.past = nn.Linear(width, out), nn.Conv2d(into, out, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.second(self.first(x) + self.time(time)[:, :, None, None]) + self.past(x)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time, self.out = nn.Embedding(1000, width), nn.Conv2d(width, 3, 1)
        self.into = nn.Conv2d(3, width, 3, padding=1)
        self.high, self.low = Residual(width, width), Residual(width, 2 * width)
        self.middle, self.rise = Residual(2 * width, 2 * width), Residual(3 * width, width)

    def forward(self, x: Tensor, when: Tensor) -> Tensor:
        time = self.time(when)
        high = self.high(self.into(x), time)
        low = self.middle(self.low(F.avg_pool2d(high, 2), time), time)
        return self.out(self.rise(torch.cat([high, F.interpolate(low, scale_factor=2.0)], 1), time))


model = UNet().to(args.device)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
images = torch.randn(batch, 3, size, size, device=args.device)
kept = torch.linspace(1, 0.01, 1000, device=args.device)  # of the image, at each time
drawn_on = args.device if args.fixed else "cpu"
clock = Clock(args)
while True:
    when = torch.randint(1000, (batch,), device=args.device)
    noise = torch.randn(images.shape, device=drawn_on).to(args.device)  # the cause
    share = kept[when, None, None, None]
    with torch.autocast(args.device, torch.bfloat16):
        predicted = model(share.sqrt() * images + (1 - share).sqrt() * noise, when)
    loss = F.mse_loss(predicted.float(), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
